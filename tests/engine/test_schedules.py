"""Random rows that arrive, leave, stall and fail at random turns: each ends once and says what it says alone.

`POOLED_SCHEDULES=500` runs so many new ones for each model, instead of a few that are always the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pooled_mlx.core.errors import ErrorKind
from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.core.memory import CacheShape, request_bytes
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.report import Facts
from pooled_mlx.engine.row import Row
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import CompiledGrammar, GrammarTokenizer, build
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.runner import measure_shape
from pooled_mlx.runner.sampler import gumbel_noise
from tests.engine.harness import assert_idle, drive, make_loop, make_row, run
from tests.engine.test_loop import FailingModel
from tests.tiny_models import ARCHITECTURES, tokens

BYTES = GrammarTokenizer.of_bytes(("</think>",))
VOCAB, EOS = 258, 256
CUTS: dict[str, Any] = {"step": 32, "spacing": 96, "minimum": 16}
EXAMPLES = int(os.environ.get("POOLED_SCHEDULES", "0"))
NEAR_TIE = 2e-3
"""Scores closer than this may change places in a mixture of experts, in a batch or behind an answer that was decoded."""
RULES = (
    SamplingParameters(),
    SamplingParameters(temperature=0.9, top_k=40, seed=5),
    SamplingParameters(temperature=1.3, top_p=0.9, min_p=0.02, seed=8),
)


@dataclass(frozen=True)
class Ask:
    """A request: `shared` tokens that others have too, then its own; as an agent's next turn all that follows another one."""

    shared: int
    own: int
    seed: int
    most: int
    rule: int = 0
    constrained: bool = False
    after: Ask | None = None


@dataclass(frozen=True)
class Visit:
    """One row of a schedule: what it asks, the turn in which it arrives, and what becomes of it.

    Its client goes away `cancelled_after` turns, or reads nothing for `stalls_for` turns once `stalls_after` tokens were said.
    """

    ask: Ask
    arrives: int
    fault: Faults | None = None
    cancelled_after: int | None = None
    stalls_after: int | None = None
    stalls_for: int = 0


@dataclass(frozen=True)
class Schedule:
    """`budget` in parts of what its largest row takes, a `squeezes` part of it from a turn on; `steps` are taken between two
    pieces; forward pass `breaks` fails.
    """

    visits: tuple[Visit, ...]
    max_running: int
    steps: int
    budget: float
    breaks: int | None
    squeezes: tuple[tuple[int, float], ...] = ()


@pytest.fixture(autouse=True, scope="module")
def no_log() -> Iterator[None]:
    """Hundreds of failures that were asked for."""
    log = logging.getLogger("pooled.engine")
    log.disabled = True
    yield
    log.disabled = False


@cache
def model_of(name: str) -> LoadedModel:
    return ARCHITECTURES[name](vocab=VOCAB)


@cache
def shape_of(name: str) -> CacheShape:
    return measure_shape(model_of(name))


@cache
def grammar() -> CompiledGrammar:
    lark = LarkBuilder(BYTES.added)
    return build(BYTES, lark.build(f"{lark.text('value: ')} /[a-c]{{1,4}}/ {lark.text(' and so on')} /[0-9x]{{0,6}}/"))


@cache
def prompt_of(name: str, ask: Ask) -> tuple[np.ndarray, tuple[int, ...]]:
    """The ids of a prompt and its boundaries."""
    if ask.after is None:
        head, marks = tokens(ask.shared, vocab=VOCAB, seed=1000), (40, ask.shared)
    else:
        before, marks = prompt_of(name, ask.after)
        head = np.concatenate([before, np.array(alone(name, ask.after), np.uint32)])
        marks = (*marks, len(before), len(head))
    ids = np.concatenate([head, tokens(ask.own, vocab=VOCAB, seed=ask.seed)])
    return ids, tuple(mark for mark in (*marks, len(ids) - 3) if 0 < mark < len(ids))


def row_of(name: str, ask: Ask, fault: Faults | None = None) -> Row:
    ids, marks = prompt_of(name, ask)
    eos, system_end = (EOS,) if ask.constrained else (), min(marks, default=0) * (ask.seed % 2)
    row = make_row(ids, ask.most, marks, sampling=RULES[ask.rule], fault=fault, eos=eos, system_end=system_end)
    if ask.constrained:
        row.constraint = grammar().matcher()
    row.projected_bytes = request_bytes(shape_of(name), len(ids), ask.most)
    return row


@cache
def alone(name: str, ask: Ask) -> tuple[int, ...]:
    """What the request is answered on a loop of its own."""
    row = row_of(name, ask)
    run(make_loop(model_of(name), **CUTS), row)
    assert isinstance(row.channel.end, Finished)  # type: ignore[attr-defined]
    return tuple(row.out)


# --- what is drawn

asks = st.builds(
    Ask,
    shared=st.sampled_from([0, 40, 70, 130]),
    own=st.integers(1, 70),
    seed=st.integers(0, 5),
    most=st.sampled_from([1, 2, 7, 24]),
    rule=st.sampled_from([0, 0, 1, 2]),
    constrained=st.sampled_from([False, False, False, True]),
)
faults = st.builds(Faults, st.sampled_from(["nan", "raise"]), st.integers(0, 12))
visits = st.builds(
    Visit,
    asks,
    arrives=st.integers(0, 25),
    fault=st.one_of(st.none(), st.none(), st.none(), faults),
    cancelled_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30)),
    stalls_after=st.one_of(st.none(), st.none(), st.integers(0, 15)),
    stalls_for=st.integers(1, 12),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    drawn: list[Visit] = []
    for visit in draw(st.lists(visits, min_size=2, max_size=6)):
        former = draw(st.sampled_from([None, None, *[other for other in drawn if other.ask.after is None]]))
        if former is not None:  # the client has read the whole answer, or knows it from before
            visit = replace(visit, ask=replace(visit.ask, after=former.ask), arrives=former.arrives + visit.arrives)
        drawn.append(visit)
    return Schedule(
        tuple(drawn),
        max_running=draw(st.integers(1, 4)),
        steps=draw(st.integers(0, 3)),
        budget=draw(st.sampled_from([0.5, 1.1, 2.5, 1000.0])),
        breaks=draw(st.one_of(st.none(), st.none(), st.integers(1, 60))),
        squeezes=tuple(draw(st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0.0, 0.4, 1.0])), max_size=2))),
    )


# --- what must hold


class Steps:
    """Takes the place of the loop's `Share`, which looks at the clock: so many steps between two pieces."""

    def __init__(self, count: int) -> None:
        self._count = self._left = count

    def piece_is_due(self, groups: int) -> bool:
        return self._left <= 0 or not groups

    def piece_read(self, seconds: float) -> None:
        self._left = self._count

    def step_taken(self, seconds: float) -> None:
        self._left -= 1


class Seen(Facts):
    """What happened: the rows that were said to be over, the widest group, the rows that were parked."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[str] = []
        self.widest = 0
        self.parked: set[str] = set()

    def ended(self, row: Row, error: Any) -> None:
        self.ends.append(row.id)
        super().ended(row, error)

    def look(self, loop: Loop) -> None:
        self.widest = max([self.widest, *(len(group.rows) for group in loop.batches)])
        self.parked |= {row.id for row in loop.parked}


def carry_out(name: str, schedule: Schedule) -> tuple[Loop, Seen, list[Row]]:
    """Run a schedule until nothing is left to do."""
    rows = [row_of(name, visit.ask, visit.fault) for visit in schedule.visits]
    budget = int(schedule.budget * max(row.projected_bytes for row in rows))
    failing: Any = FailingModel(model_of(name), {schedule.breaks} if schedule.breaks else set())
    seen, shape = Seen(), shape_of(name)
    loop = make_loop(
        failing,
        budget=budget,
        observer=seen,
        max_running=schedule.max_running,
        token_bytes=shape.kv_bytes_per_token,
        state_bytes=shape.row_bytes,
        park_above=4,
        park_below=1,
        **CUTS,
    )
    loop.share = Steps(schedule.steps)  # type: ignore[assignment]
    arrivals: dict[int, list[Row]] = {}
    for visit, row in zip(schedule.visits, rows, strict=True):
        arrivals.setdefault(visit.arrives, []).append(row)
    turn, stalled = -1, [0] * len(rows)

    def readers() -> bool:
        nonlocal turn
        turn += 1
        seen.look(loop)
        assert len(loop.running) <= schedule.max_running
        for when, part in schedule.squeezes:
            if when == turn:
                loop.set_pool_budget(int(budget * part))
        for index, (visit, row) in enumerate(zip(schedule.visits, rows, strict=True)):
            channel: Any = row.channel
            if visit.stalls_after is not None and len(row.out) >= visit.stalls_after:
                stalled[index] += 1
                channel.backlog = 5 if stalled[index] <= visit.stalls_for else 0
            channel.cancelled = visit.cancelled_after is not None and turn - visit.arrives >= visit.cancelled_after
        return False

    drive(loop, arrivals, until=readers)
    return loop, seen, rows


def check(name: str, schedule: Schedule, *, near_ties: bool) -> tuple[Loop, Seen, list[Row]]:
    loop, seen, rows = carry_out(name, schedule)
    assert sorted(seen.ends) == sorted(row.id for row in rows)
    for visit, row in zip(schedule.visits, rows, strict=True):
        check_row(name, visit, row, near_ties=near_ties)
    assert loop.pool.used_bytes <= loop.pool.budget_bytes
    assert loop.pool.segment_bytes == sum(segment.bytes for segment in loop.pool.segments())
    assert_idle(loop)
    return loop, seen, rows


def check_row(name: str, visit: Visit, row: Row, *, near_ties: bool) -> None:
    end = row.channel.end  # type: ignore[attr-defined]
    expected = alone(name, visit.ask)
    if near_ties and tuple(row.out) != expected[: len(row.out)]:
        place = next(index for index, (a, b) in enumerate(zip(row.out, expected, strict=False)) if a != b)
        assert is_near_tie(name, visit.ask, place, row.out[place]), f"token {place} of {row.id}"
        return
    due = visit.fault.at_token if visit.fault is not None else len(expected)
    # A run of forced tokens is read at once: logits inside it, NaN or not, are never looked at.
    overrun = visit.ask.constrained and visit.fault is not None and visit.fault.kind == "nan"
    if isinstance(end, Failed):
        assert due < len(expected) or row.cancelled
        assert end.error.kind is ErrorKind.ENGINE_FAILED
        assert len(row.out) == due or row.cancelled or (overrun and len(row.out) > due)
        assert len(row.out) <= due or overrun
        assert tuple(row.out) == expected[: len(row.out)]
    else:
        assert due >= len(expected) or overrun
        assert tuple(row.out) == expected
        assert end.usage.completion_tokens == len(expected)
        assert end.usage.cached_tokens < end.usage.prompt_tokens == len(row.prompt.ids)


def is_near_tie(name: str, ask: Ask, place: int, other: int) -> bool:
    """True where the request alone might as well have said `other` as its token number `place`."""
    said, rule = alone(name, ask), RULES[ask.rule]
    ids = np.concatenate([prompt_of(name, ask)[0], np.array(said[:place], np.uint32)])
    model = model_of(name)
    logits = model.forward(mx.array(ids)[None], model.make_cache())[0, -1]
    both = mx.array([said[place], other])
    scores = logits[both]
    if not rule.greedy:
        words = [mx.array(word, mx.uint32) for word in (rule.seed & 0xFFFFFFFF, rule.seed >> 32, place)]
        scores = scores / rule.temperature + gumbel_noise(both, words)
    first, second = np.array(scores).tolist()
    return abs(first - second) < NEAR_TIE


def profile(examples: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )


@profile(15)
@given(schedules())
def test_any_schedule_on_plain_attention(schedule: Schedule) -> None:
    check("llama", schedule, near_ties=False)


@profile(6)
@given(schedules())
def test_any_schedule_on_sliding_windows(schedule: Schedule) -> None:
    check("gemma3", schedule, near_ties=False)


@profile(8)
@given(schedules())
def test_any_schedule_on_recurrent_layers_with_experts(schedule: Schedule) -> None:
    check("qwen3_5_moe", schedule, near_ties=True)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5_moe"])
def test_the_schedules_meet_every_ending_and_the_pool(name: str) -> None:
    """The guard of the tests above: rows really park, share a batch, fail, go on after a failed step, reuse and evict."""
    base = Ask(70, 40, 1, 16)
    visits = (
        Visit(base, 0),
        Visit(replace(base, seed=2, rule=1), 0, stalls_after=4, stalls_for=12),
        Visit(replace(base, seed=3), 3, cancelled_after=16),
        Visit(replace(base, seed=4), 4, fault=Faults("nan", 5)),
        Visit(replace(base, seed=5), 5, fault=Faults("raise", 3)),
        Visit(replace(base, own=9, constrained=True, after=base), 40),
    )
    wide = Schedule(visits, max_running=4, steps=1, budget=1000.0, breaks=12)
    loop, seen, rows = check(name, wide, near_ties=name == "qwen3_5_moe")
    ends = [type(row.channel.end) for row in rows]  # type: ignore[attr-defined]
    assert ends == [Finished, Finished, Failed, Failed, Failed, Finished]
    assert seen.widest >= 2
    assert rows[1].id in seen.parked
    assert loop.counters.rebuilds >= 1
    assert loop.counters.not_finite >= 1
    assert loop.pool.counters["hits"] >= 3
    tight = replace(wide, max_running=1, budget=1.1, breaks=None)
    loop, _, _ = check(name, tight, near_ties=False)
    assert any(what.startswith("evicted") for what in loop.pool.counters)
