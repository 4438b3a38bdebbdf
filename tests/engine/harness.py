"""Drives the engine's loop without a server: rows over token ids, an answer that is the ids themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pooled_mlx.core.events import Event, Failed, Finished, Text, check_order
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request, Role, ToolCall, Turn
from pooled_mlx.engine.cuts import CutRule
from pooled_mlx.engine.facts import Facts
from pooled_mlx.engine.loop import Loop, LoopSettings
from pooled_mlx.engine.mlx_backend import LoadedModel, mx
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.prompt import Prompt
from pooled_mlx.engine.rows import EndReason, Row
from pooled_mlx.engine.sampler import SamplingParameters
from pooled_mlx.engine.segments import is_divisible
from pooled_mlx.engine.slots import Observer

_numbers = itertools.count()
MOST_TURNS = 20_000


class ModelProxy:
    """Stands before a model, for tests that change or watch its forward passes."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        return self._model.forward(ids, cache)

    def last_logits(self, ids: mx.array, cache: list[Any]) -> mx.array:
        return self.forward(ids, cache)[:, -1]


class PlainAnswer:
    """Every token is a text event; nothing is held back."""

    stop: str | None = None
    in_reasoning = False
    reasoning_tokens = 0
    notes: tuple[str, ...] = ()
    ended_in_thought: bool = False

    def feed(self, token: int) -> list[Event]:
        return [Text(f"{token} ")]

    def finish(self, reason: EndReason) -> list[Event]:
        return []

    def finish_reason(self, reason: EndReason) -> EndReason:
        return reason

    def parsed(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        return "", "", ()


class ListChannel:
    """A channel that a test reads directly."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.cancelled = False
        self.backlog = 0

    def put(self, event: Event) -> None:
        self.events.append(event)

    @property
    def end(self) -> Finished | Failed:
        """The last event, after a check of the whole order."""
        check_order(self.events)
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last


def make_row(
    ids: Sequence[int] | np.ndarray,
    most: int = 30,
    boundaries: Sequence[int] = (),
    *,
    system_end: int = 0,
    sampling: SamplingParameters | None = None,
    eos: Sequence[int] = (),
    tools: bool = False,
    answer: Any = None,
    roles: Mapping[int, Role] | None = None,
    **more: Any,
) -> Row:
    """A row over a prompt of token ids, greedy unless told otherwise. `roles` tells which turn begins at which token."""
    turns = (Turn("user", "question"), Turn("assistant", "answer"), Turn("user", "more"))
    if roles is not None:
        turns = tuple(Turn(role, f"turn {number}") for number, role in enumerate(roles.values()))
    request = Request(id=f"row-{next(_numbers)}", turns=turns)
    prompt = Prompt(
        ids=np.asarray(ids, np.uint32),
        boundaries=tuple(boundaries),
        head=max(boundaries, default=0),
        system_end=system_end,
        reasoning_open=False,
        opened="",
        turns=tuple((start, number) for number, start in enumerate(roles or ())),
        history=b"",
    )
    channel: Any = ListChannel()
    return Row(
        prepared=Prepared(request, len(prompt.ids), most),
        prompt=prompt,
        channel=channel,
        answer=answer or PlainAnswer(),
        sampling=sampling or SamplingParameters(),
        max_tokens=most,
        context_limited=False,
        eos_ids=frozenset(eos),
        **more,
    )


class Ticks:
    """A clock that goes on by a millisecond whenever it is read: whatever takes turns by time does so alike on every run."""

    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        self._now += 0.001
        return self._now


def make_loop(
    model: LoadedModel,
    *,
    step: int = 64,
    spacing: int = 256,
    minimum: int = 64,
    budget: int = 1 << 30,
    remember: Callable[[Row], None] = lambda row: None,
    explain: Callable[[Row, Match], None] = lambda row, match: None,
    observer: Observer | None = None,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> Loop:
    """A loop with its own pool and clock: what is scheduled does not depend on the machine's speed."""
    rule, clock = CutRule(step, spacing, min(minimum, step)), clock or Ticks()
    pool = Pool(budget, b"test", divisible=is_divisible(model.make_cache()), rule=rule, clock=clock)
    chosen = LoopSettings(**{"token_bytes": 1024, **settings})
    return Loop(model, pool, rule, chosen, observer or Facts(), remember, explain, clock=clock)


def drive(loop: Loop, arrivals: Mapping[int, Sequence[Row]], until: Callable[[], bool] | None = None) -> int:
    """Submit rows before the given turns and run until nothing is left to do (or `until`); returns the number of turns."""
    waiting = dict(arrivals)
    for turn in range(MOST_TURNS):
        for row in waiting.pop(turn, ()):
            loop.submit(row)
        if until is not None and until():
            return turn
        if loop.busy:
            loop.turn()
        elif not waiting:
            return turn
    raise AssertionError(f"the loop was not done after {MOST_TURNS} turns")


def assert_idle(loop: Loop) -> None:
    """Nothing runs, and everything that was held for it has been given back."""
    assert not loop.running
    assert not loop.waiting
    assert [segment for segment in loop.pool.segments() if segment.leases or segment.tips] == []
    backings = {segment.data._backing for segment in loop.pool.segments()} - {None}  # type: ignore[attr-defined]
    assert backings <= {loop.slots.hot.backing if loop.slots.hot is not None else None}
    assert loop.pool.reserved_bytes == 0
    loop.slots.drop_hot()
    assert loop.pool.spare_bytes == 0
    assert all(segment.data._backing is None for segment in loop.pool.segments())  # type: ignore[attr-defined]


def run(loop: Loop, *rows: Row) -> None:
    """Submit all rows at once and run them to their ends."""
    drive(loop, {0: rows})


def solo_greedy(model: LoadedModel, ids: np.ndarray, count: int) -> list[int]:
    """What mlx-lm's own generator gives for this prompt."""
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(ids), model.module, max_tokens=count)]
