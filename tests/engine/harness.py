"""Drives the engine's loop without a server: rows over token ids, an answer that is the ids themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.events import Event, Failed, Finished, Text, check_order
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request, Role, ToolCall, Turn
from pooled_mlx.core.runner import Runner, SamplingParameters, Shape
from pooled_mlx.engine.ledger import stored_of
from pooled_mlx.engine.loop import Loop, LoopSettings, Observer
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.report import Facts
from pooled_mlx.engine.row import Bounds, EndReason, Hook, Row
from pooled_mlx.prompt.prompt import Prompt
from pooled_mlx.replay.faults import Faults, ScriptHook
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.runner import MlxRunner

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

    def last_logits(self, ids: mx.array, cache: list[Any], places: int = 1) -> mx.array:
        logits = self.forward(ids, cache)[:, -places:]
        return logits[:, 0] if places == 1 else logits[0]


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
    fault: Faults | None = None,
    hook: Hook | None = None,
    close_thinking_id: int | None = None,
    thinking_budget: int | None = None,
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
        bounds=Bounds(sampling or SamplingParameters(), frozenset(eos), close_thinking_id, thinking_budget),
        max_tokens=most,
        hook=hook or (ScriptHook(None, fault) if fault is not None else None),
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
    shrinks: tuple[tuple[int, int], ...] = (),
    budget: int = 1 << 30,
    remember: Callable[[Row], None] = lambda row: None,
    explain: Callable[[Row, Match], None] = lambda row, match: None,
    observer: Observer | None = None,
    clock: Callable[[], float] | None = None,
    known_tokens: int | None = None,
    **settings: Any,
) -> Loop:
    """A loop with its own pool."""
    return loop_on(
        MlxRunner(model, known_tokens),
        CutRule(step, spacing, min(minimum, step), shrinks),
        budget,
        remember=remember,
        explain=explain,
        observer=observer,
        clock=clock,
        **settings,
    )


def loop_on(
    runner: Runner,
    rule: CutRule,
    budget: int = 1 << 30,
    *,
    remember: Callable[[Row], None] = lambda row: None,
    explain: Callable[[Row, Match], None] = lambda row, match: None,
    observer: Observer | None = None,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> Loop:
    """A loop with its own pool and clock on a runner: what is scheduled does not depend on the machine's speed."""
    clock = clock or Ticks()
    pool = Pool(budget, b"test", divisible=runner.facts.divisible, rule=rule, clock=clock)
    chosen = LoopSettings(**{"token_bytes": 1024, **settings})
    return Loop(runner, pool, chosen, observer or Facts(), remember, explain, clock=clock)


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
    assert loop.ledger.live_bytes == 0
    drop_slack(loop)
    assert loop.ledger.slack_bytes == 0
    entries = {entry for book in loop.ledger._books.values() for entry in book.named}
    assert entries == {stored_of(segment) for segment in loop.pool.segments()}
    for segment in loop.pool.segments():
        assert loop.runner.finite([stored_of(segment).span], stored_of(segment).state)


def reopenable(loop: Loop) -> list[int]:
    """The sealed buffers that a request could go on in, oldest first."""
    return [number for number, book in loop.ledger._books.items() if book.end is not None]


def drop_slack(loop: Loop) -> None:
    """Free what can be freed without forgetting anything: nothing can be reopened afterwards."""
    loop.ledger.trim(0)


def first_logits(loop: Loop, row: Row) -> list[np.ndarray]:
    """Keep the logits that the first choice of a row is made from, as soon as it is; [0] is that of its prompt."""
    kept: list[np.ndarray] = []
    runner: Any = loop.runner
    choose = runner.choose

    def record(cache: int, shapes: Sequence[Shape]) -> None:
        if cache == row.cache and not row.out:
            kept.append(np.array(runner._open[cache].logits[0].astype(mx.float32)))
            runner.choose = choose
        choose(cache, shapes)

    runner.choose = record
    return kept


def run(loop: Loop, *rows: Row) -> None:
    """Submit all rows at once and run them to their ends."""
    drive(loop, {0: rows})


def solo_greedy(model: LoadedModel, ids: np.ndarray, count: int) -> list[int]:
    """What mlx-lm's own generator gives for this prompt."""
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(ids), model.module, max_tokens=count)]
