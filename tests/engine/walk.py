"""Random walks through the engine's loop: requests that share beginnings come, go on, stall and are given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.core.runner import Runner
from pooled_mlx.engine.ledger import Stored
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.report import Facts
from pooled_mlx.engine.row import Row, Stage
from tests.engine.harness import Ticks, loop_on, make_row

RULE = CutRule(step=8, spacing=24, minimum=4)
PARK_ABOVE = 6
_MOST_TURNS = 2_000


@dataclass(frozen=True)
class Arrival:
    """A request: `own` new tokens after a part of what an earlier one read and said (0 none, 1 all of it, else that part)."""

    after: int
    part: float
    own: int
    most: int
    side: bool = False


@dataclass(frozen=True)
class Turns:
    """So many turns of the loop."""

    count: int


@dataclass(frozen=True)
class Happening:
    """Something that happens to row number `place` of those that are not over, or to all."""

    what: str
    place: int = 0


Step = Arrival | Turns | Happening


def steps(*happenings: str) -> st.SearchStrategy[list[Step]]:
    """Walks. Half of the requests go on exactly where an earlier one ended, as an agent's do."""
    arrival = st.builds(
        Arrival,
        after=st.integers(0, 9),
        part=st.sampled_from([0.0, 1.0, 1.0, 1.0, 0.5, 0.8]),
        own=st.integers(1, 40),
        most=st.one_of(st.integers(1, 14), st.integers(1, 60)),
        side=st.sampled_from([False, False, False, True]),
    )
    turns = st.builds(Turns, st.integers(1, 30))
    happens = st.builds(Happening, st.sampled_from(happenings), st.integers(0, 5))
    return st.lists(st.one_of(arrival, turns, arrival, turns, happens), min_size=8, max_size=40)


class Ended(Facts):
    """Counts how often each row was said to be over."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, int] = {}

    def ended(self, row: Row, error: ApiError | None) -> None:
        self.times[row.id] = self.times.get(row.id, 0) + 1


class Walk:
    """A loop on `runner` and the rows that were sent to it. `check` is called after every turn.

    `memory_bytes` is the pool's budget, `token_bytes` and `state_bytes` what tokens and rows take.
    """

    def __init__(
        self, runner: Runner, memory_bytes: int, token_bytes: int, state_bytes: int, check: Callable[[Walk], None]
    ) -> None:
        self.ended = Ended()
        self.loop: Loop = loop_on(
            runner,
            RULE,
            memory_bytes,
            observer=self.ended,
            clock=Ticks(),
            token_bytes=token_bytes,
            state_bytes=state_bytes,
            park_above=PARK_ABOVE,
            park_below=1,
            park_limit_seconds=1.0,
            max_running=3,
        )
        self.rows: list[Row] = []
        self.turns = 0
        self._memory_bytes, self._check = memory_bytes, check
        self._random = np.random.default_rng(7)

    def take(self, step: Step) -> None:
        """One step of the walk."""
        match step:
            case Arrival():
                self._arrive(step)
            case Turns(count):
                for _ in range(count):
                    self.turn()
            case Happening(what, place):
                self._happen(what, place)

    def turn(self) -> None:
        """One turn of the loop, if it has something to do."""
        if self.loop.busy:
            self.loop.turn()
            self.turns += 1
            self._check(self)

    def finish(self) -> None:
        """Everybody reads on, and all rows come to their ends."""
        for row in self.rows:
            channel_of(row).backlog = 0
        self.loop.set_pool_budget(self._memory_bytes)
        for _ in range(_MOST_TURNS):
            if not self.loop.busy:
                return
            self.turn()
        raise AssertionError(f"not done after {_MOST_TURNS} turns")

    def _arrive(self, arrival: Arrival) -> None:
        before = np.zeros(0, np.uint32)
        if self.rows:
            earlier = self.rows[-1 - arrival.after % len(self.rows)]
            ids = np.concatenate([earlier.prompt.ids, np.asarray(earlier.out, np.uint32)])
            before = ids[: int(len(ids) * arrival.part)]
        own = self._random.integers(0, 512, arrival.own).astype(np.uint32)
        ids = np.concatenate([before, own])
        marks = sorted({len(before), *(row for row in (len(ids) // 2, len(ids) - 1) if row > 0)} - {0})
        row = make_row(ids, arrival.most, marks, tools=not arrival.side)
        if arrival.side:
            row.prepared = _as_side(row)
        settings = self.loop.settings
        row.projected_bytes = settings.token_bytes * (len(ids) + arrival.most) + settings.state_bytes
        self.rows.append(row)
        self.loop.submit(row)

    def _happen(self, what: str, place: int) -> None:
        if what == "squeeze":
            self.loop.set_pool_budget(self._memory_bytes // 4)
        elif what == "widen":
            self.loop.set_pool_budget(self._memory_bytes)
        elif what == "forget":
            self.loop.pool.clear()
        elif going := [row for row in self.rows if not row.ended]:
            channel = channel_of(going[place % len(going)])
            if what == "cancel":
                channel.cancelled = True
            else:
                channel.backlog = PARK_ABOVE + 1 if what == "stall" else 0


def _as_side(row: Row) -> Any:
    request = replace(row.prepared.request, turns=row.prepared.request.turns[:1], tools=())
    return replace(row.prepared, request=request)


def channel_of(row: Row) -> Any:
    """The channel that a test reads directly."""
    return row.channel


def stored(loop: Loop) -> set[Stored]:
    """What the books say is stored."""
    return {entry for book in loop.ledger._books.values() for entry in book.named}


def check_rows(walk: Walk, says: Callable[[Row], list[int]], *, may_fail: bool) -> None:
    """Each row is over once at most, and says what it says alone; all of them once the walk is finished."""
    for row in walk.rows:
        times = walk.ended.times.get(row.id, 0)
        assert times == (1 if row.stage is Stage.OVER else 0), f"{row.id} ended {times} times"
        assert row.out == says(row)[: len(row.out)], f"{row.id} says something else than alone"
        ends = [event for event in channel_of(row).events if isinstance(event, Finished | Failed)]
        assert len(ends) == times
        if ends and isinstance(ends[0], Finished):
            assert len(row.out) == row.max_tokens
        elif ends and not channel_of(row).cancelled:
            assert may_fail or "too long" in ends[0].error.message, ends[0].error.message
