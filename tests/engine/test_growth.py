"""Caches that must grow get room for more than the prompt at hand, out of memory that nobody else wants."""

from __future__ import annotations

import pytest

from pooled_mlx.engine.loop import Loop
from tests.engine.harness import assert_idle, drive, drop_slack, reopenable, run, solo_greedy
from tests.engine.test_accounts import MODEL, after, loop_of, row_of, used
from tests.tiny_models import tokens

GROWTH = 256


def capacity_of(loop: Loop) -> int:
    """Tokens that the kept cache has room for."""
    return loop.runner.room_of(reopenable(loop)[-1])


@pytest.mark.parametrize("kept", [True, False], ids=["kept cache", "restored cache"])
def test_a_conversation_seldom_copies_its_cache(kept: bool) -> None:
    loop = loop_of()
    row = row_of(tokens(2000, seed=1), 8, (1990,))
    run(loop, row)
    if not kept:
        drop_slack(loop)
    capacities = [capacity_of(loop)] if kept else []
    for turn in range(10):
        ids = after(row, 60, 10 + turn)
        row = row_of(ids, 8, (len(ids) - 4,))
        run(loop, row)
        capacities.append(capacity_of(loop))
        assert row.prefilled_tokens == 60
    assert row.out == solo_greedy(MODEL, row.prompt.ids, 8)
    assert row.position > 2048 + 2 * GROWTH, "in steps of mlx-lm it would have grown three times"
    assert len(set(capacities)) <= 2
    assert max(capacities) < row.position * 9 / 8 + GROWTH
    assert_idle(loop)


@pytest.mark.parametrize(("budget", "capacity"), [(1300, 1024), (2000, 1280)], ids=["needed", "free"])
def test_only_free_memory_is_spare(budget: int, capacity: int) -> None:
    loop = loop_of(budget)
    row = row_of(tokens(1000, seed=1), 20, (990,), projected=1000 + 20 + GROWTH)
    capacities: list[int] = []
    drive(loop, {0: [row]}, until=lambda: bool(row.out))
    assert row.cache is not None
    capacities.append(loop.runner.room_of(row.cache))
    drive(loop, {})
    assert capacities == [capacity]
    assert used(loop) <= budget


def test_a_cache_that_may_become_larger_than_its_row_needs_is_counted_so() -> None:
    budget = 1144 + 300 + 2 * (4 + GROWTH)
    loop = loop_of(budget)
    first = row_of(tokens(1144, seed=1), 4, (1140,), projected=1144 + 4 + GROWTH)
    second = row_of(tokens(300, seed=2), 4, (290,), projected=300 + 4 + GROWTH)
    most, spare = [0.0], list[int]()
    drive(loop, {0: [first]}, until=lambda: bool(first.out) and spare.append(first.hold.spare_tokens) is None)
    drive(loop, {0: [second]}, until=lambda: most.append(used(loop)) or False)
    assert spare == [143]
    assert max(most) <= budget
    for row in (first, second):
        assert row.out == solo_greedy(MODEL, row.prompt.ids, 4)
    assert_idle(loop)
