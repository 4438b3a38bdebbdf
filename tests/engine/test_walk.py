"""Walks of thousands of turns over a runner that only counts: scheduling, pool and ledger against an oracle."""

from __future__ import annotations

import logging
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pooled_mlx.engine.ledger import stored_of
from pooled_mlx.engine.row import Row
from tests.counting_runner import STATE_BYTES, TOKEN_BYTES, CountingRunner, answer
from tests.engine.harness import assert_idle
from tests.engine.walk import Happening, Step, Turns, Walk, check_rows, steps, stored

EXAMPLES = int(os.environ.get("POOLED_WALKS", "0"))
BUDGET = 220 * TOKEN_BYTES + 8 * STATE_BYTES
QUIET = ("cancel", "stall", "read on", "squeeze", "widen", "forget")
FAILING = ("open", "reopen", "grow", "read", "mark", "step", "choose", "take", "join", "leave", "seal", "trim", "insert")
WALKS = settings(
    max_examples=EXAMPLES or 80,
    deadline=None,
    derandomize=not EXAMPLES,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
_answers: dict[bytes, list[int]] = {}


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def alone(row: Row) -> list[int]:
    """What a cold run of a row says."""
    key = row.prompt.ids.tobytes()
    if len(_answers.get(key, ())) < row.max_tokens:
        _answers[key] = answer(row.prompt.ids.tolist(), row.max_tokens)
    return _answers[key]


class Failing:
    """Lets the next call of a command fail."""

    def __init__(self) -> None:
        self.due: Counter[str] = Counter()
        self.failed = 0

    def __call__(self, command: str) -> None:
        if self.due[command] > 0:
            self.due[command] -= 1
            self.failed += 1
            raise RuntimeError(f"{command} fails")


def check_books(walk: Walk, runner: CountingRunner) -> None:
    """Every byte is in the books once, and nothing else is."""
    loop = walk.loop
    ledger, pool = loop.ledger, loop.pool
    assert set(ledger._books) == set(runner.caches)
    for number, book in ledger._books.items():
        assert book.sealed == 0 or book.bytes == runner.bytes_of(number), f"buffer {number}"
        assert book.named_bytes == sum(entry.delta_bytes for entry in book.named)
    entries = {stored_of(segment) for segment in pool.segments()}
    assert stored(loop) == entries, "the books name what the pool has not, or the other way round"
    assert set(runner.states) == {entry.state for entry in entries if entry.state is not None}
    for number in ledger.caches:
        if not ledger._books[number].sealed:
            ledger.measure(number)
    ids_bytes = sum(segment.ids.nbytes for segment in pool.segments())
    assert pool.used_bytes - ids_bytes == runner.bytes


@pytest.mark.parametrize("divisible", [True, False], ids=["divisible", "with states"])
@pytest.mark.parametrize("fails", [False, True], ids=["quiet", "failing"])
def test_every_row_ends_once_and_every_byte_is_in_the_books(divisible: bool, fails: bool) -> None:
    turns: list[int] = []
    seen: Counter[str] = Counter()

    @WALKS
    @given(steps(*QUIET, *QUIET, *QUIET, *(f"fail {command}" for command in FAILING if fails)), st.sampled_from([1, 2, 8]))
    def walks(walk_steps: list[Step], budgets: int) -> None:
        failing = Failing()
        runner = CountingRunner(divisible=divisible, fail=failing)
        walk = Walk(runner, BUDGET * budgets, TOKEN_BYTES, STATE_BYTES, lambda walk: check_books(walk, runner))
        insert = walk.loop.pool.insert
        walk.loop.pool.insert = lambda *args, **fields: failing("insert") or insert(*args, **fields)  # type: ignore[method-assign]
        for step in walk_steps:
            if isinstance(step, Happening) and step.what.startswith("fail "):
                failing.due[step.what[5:]] += 1 + step.place // 4
            else:
                walk.take(step)
        walk.finish()
        failing.due.clear()
        walk.take(Turns(1))
        check_rows(walk, alone, may_fail=failing.failed > 0)
        walk.loop.ledger.settle()
        assert_idle(walk.loop)
        check_books(walk, runner)
        turns.append(walk.turns)
        seen.update(walk.loop.pool.counters)
        seen.update(drafted=walk.loop.counters.drafted, accepted=walk.loop.counters.accepted)
        seen.update(failed=failing.failed, parked=sum(row.times.parked > 0 for row in walk.rows))

    walks()
    assert sum(turns) >= 2_500, sum(turns)
    assert seen["hits"]
    assert 0 < seen["accepted"] < seen["drafted"]
    assert seen["misses"]
    assert seen["parked"]
    assert bool(seen["failed"]) == fails
