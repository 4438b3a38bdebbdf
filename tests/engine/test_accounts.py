"""Who is admitted, what is evicted and what is in memory, by tokens of K/V of a model whose K/V is all that counts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.events import Failed
from pooled_mlx.core.memory import CacheShape, plan_memory, request_bytes
from pooled_mlx.core.request import Turn
from pooled_mlx.engine.ledger import stored_of
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.runner import layers
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.runner import measure_shape
from tests.engine.harness import ModelProxy, assert_idle, drive, drop_slack, make_loop, make_row, reopenable, run, solo_greedy
from tests.engine.test_resources import active_bytes, wide_llama
from tests.mac_devices import MACS
from tests.tiny_models import tokens

MODEL = wide_llama()
TOKEN = measure_shape(MODEL).kv_bytes_per_token
STEP = 256


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured log records keep tracebacks, and these the arrays of the frames in them."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def loop_of(budget: int = 20_000, model: Any = MODEL, **settings: Any) -> Loop:
    return make_loop(model, budget=budget * TOKEN, step=STEP, spacing=1024, token_bytes=TOKEN, **settings)


def row_of(ids: np.ndarray, most: int, boundaries: Sequence[int] = (), projected: int = 0, **more: Any) -> Row:
    row = make_row(ids, most, boundaries, **more)
    row.projected_bytes = TOKEN * (projected or len(ids) + most)
    return row


def after(row: Row, count: int, seed: int) -> np.ndarray:
    """The next turn: what `row` read and said, and something new."""
    return np.concatenate([row.ids[: row.position], tokens(count, seed=seed)])


def tokens_stored(loop: Loop, row: Row) -> int:
    return loop.pool.lookup(after(row, 1, 1)).tokens


def used(loop: Loop) -> float:
    return loop.pool.used_bytes / TOKEN


def test_a_batch_keeps_nothing_of_the_caches_that_it_was_made_of() -> None:
    before = active_bytes()
    loop = loop_of()
    rows = [row_of(tokens(1000, seed=seed), 60, (100, 990)) for seed in (1, 2)]
    drive(loop, {0: rows}, until=lambda: len(rows[1].out) > 5)
    assert [len(group.rows) for group in loop.batches] == [2]
    loop.ledger.settle()
    assert (active_bytes() - before) / TOKEN <= used(loop) + 2 * STEP + 10
    for row in rows:
        row.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert_idle(loop)


def test_rows_with_one_beginning_are_admitted_as_they_fit() -> None:
    loop = loop_of(1700)
    history = tokens(1000, seed=1)
    run(loop, row_of(history, 4, (990,)))
    drop_slack(loop)
    rows = [row_of(np.concatenate([history[:990], tokens(40 + seed, seed=10 + seed)]), 20, (990,)) for seed in range(4)]
    most = [0.0]
    drive(loop, {0: rows}, until=lambda: most.append(used(loop)) or False)
    assert max(most) <= 1700
    assert [row.cached_tokens for row in rows] == [990] * 4
    assert [row.out for row in rows] == [solo_greedy(MODEL, row.prompt.ids, 20) for row in rows]
    assert_idle(loop)


def test_a_regenerated_answer_leaves_the_conversation_in_memory_once() -> None:
    loop = loop_of(2900)
    history = tokens(1000, seed=1)
    first, again = row_of(history, 6, (990,)), row_of(history, 6, (990,))
    run(loop, first)
    run(loop, again)
    assert used(loop) < 1.4 * 1006
    following = row_of(after(first, 60, 5), 30, (990, 1006))
    drive(loop, {0: [following]}, until=lambda: len(following.out) > 3)
    assert following.cached_tokens == 1006
    loop.ledger.settle()
    assert used(loop) < 1.3 * 1166
    drive(loop, {})
    assert_idle(loop)


def test_the_last_row_of_a_batch_has_its_beginning_once_again() -> None:
    loop = loop_of()
    rows = [row_of(tokens(800, seed=1), 60, (790,)), row_of(tokens(790, seed=2), 5, (780,))]
    drive(loop, {0: rows}, until=lambda: rows[1].ended and len(rows[0].out) > 20)
    assert [segment for segment in rows[0].hold.parent.path() if stored_of(segment).span.buffer != rows[0].cache] == []
    drop_slack(loop)
    assert used(loop) < 1.3 * (800 + 60 + 795)
    drive(loop, {})
    assert [row.out for row in rows] == [solo_greedy(MODEL, row.prompt.ids, row.max_tokens) for row in rows]
    assert_idle(loop)


def test_a_request_that_has_to_wait_changes_nothing() -> None:
    loop = loop_of(3000)
    running, first = row_of(tokens(200, seed=3), 400, (190,)), row_of(tokens(500, seed=1), 4, (490,))
    drive(loop, {0: [running], 3: [first]}, until=lambda: first.ended)
    kept = reopenable(loop)
    assert len(kept) == 1
    big = row_of(tokens(300, seed=2), 5, projected=2500)
    for _ in range(3):
        if big not in loop.waiting:
            loop.submit(big)
        loop.turn()
    assert list(loop.waiting) == [big]
    assert reopenable(loop) == kept
    assert tokens_stored(loop, first) == 504
    running.channel.cancelled = True
    drive(loop, {})
    assert big.finish == "length"


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a running row"])
def test_the_kept_cache_is_taken_over_however_tight_the_budget_is(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(1124 + 300 * beside, max_running=2)
    first = row_of(tokens(600, seed=1), 6, (40, 596))
    run(loop, first)
    if beside:
        short = row_of(tokens(20, seed=9), 280)
        drive(loop, {0: [short]}, until=lambda: len(short.out) > 2)

    def copied(*arguments: Any, **more: Any) -> int:
        raise AssertionError("the path was copied")

    kept = reopenable(loop)

    following = row_of(after(first, 20, 5), 6, (40, 596, 606), projected=1000)
    loop.submit(following)
    monkeypatch.setattr(loop.runner, "open", copied)
    loop.turn()
    assert following not in loop.waiting
    assert kept in ([following.hold.claim], [following.cache])
    drive(loop, {})
    assert following.cached_tokens == 606
    assert following.out == solo_greedy(MODEL, following.prompt.ids, 6)


def test_an_admitted_row_keeps_its_cache_while_others_end() -> None:
    loop = loop_of()
    first, other = row_of(tokens(600, seed=1), 4, (590,)), row_of(tokens(30, seed=3), 12)
    run(loop, first)
    drive(loop, {0: [other]}, until=lambda: len(other.out) >= 10)
    following = row_of(after(first, 40, 9), 4, (590, 604))
    loop.share.piece_read(1.0)  # decode steps are due before its first piece
    loop.submit(following)
    loop.turn()
    claim = following.hold.claim
    assert claim is not None
    drive(loop, {}, until=lambda: following.cache is not None)
    assert other.ended
    assert following.cache == claim
    drive(loop, {})
    assert following.out == solo_greedy(MODEL, following.prompt.ids, 4)


def test_a_cancelled_row_gives_the_cache_back_that_it_waited_to_take() -> None:
    loop = loop_of()
    first, other = row_of(tokens(600, seed=1), 4, (590,)), row_of(tokens(30, seed=3), 200)
    run(loop, first)
    (kept,) = reopenable(loop)
    drive(loop, {0: [other]}, until=lambda: len(other.out) >= 10)
    following = row_of(after(first, 40, 9), 4, (590, 604))
    loop.share.piece_read(1.0)
    loop.submit(following)
    loop.turn()
    assert following.hold.claim == kept
    following.channel.cancelled = True
    loop.turn()
    assert reopenable(loop) == [kept]
    assert loop.ledger.slack_bytes > 0
    drive(loop, {})


def test_a_title_in_between_does_not_take_the_place_of_the_conversation() -> None:
    loop = loop_of()
    run(loop, row_of(tokens(600, seed=1), 4, (590,)))
    kept = reopenable(loop)
    title = row_of(tokens(60, seed=2), 4)
    title.prepared = replace(title.prepared, request=replace(title.prepared.request, turns=(Turn("user", "A title, please"),)))
    assert title.is_side
    run(loop, title)
    assert reopenable(loop) == kept
    assert_idle(loop)


def test_a_context_that_fills_the_pool_is_stored_like_any_other() -> None:
    shape = CacheShape(TOKEN)
    loop = loop_of(drafts=False)  # each answer is cut after a certain token
    loop.set_pool_budget(request_bytes(shape, 1024, 0))
    history, reused = tokens(600, seed=1), []
    for turn in range(4):
        row = row_of(history, 1024 - len(history), (40, len(history) - 4))
        row.projected_bytes = request_bytes(shape, len(history), 1024 - len(history))
        drive(loop, {0: [row]}, until=lambda row=row: len(row.out) >= 5 and setattr(row, "max_tokens", 6) is not None)
        reused.append(row.cached_tokens)
        history = after(row, 20, 100 + turn)
    assert reused == [0, 606, 632, 658]
    assert not any(name.startswith("refused") for name in loop.pool.counters)


def test_what_an_answer_may_take_evicts_nothing_before_it_does() -> None:
    loop = loop_of(1500, drafts=False)
    talks, reused = [tokens(500, seed=seed) for seed in (1, 2)], []
    for turn in range(3):
        for index in (0, 1):
            row = row_of(talks[index], 500, (len(talks[index]) - 4,))
            drive(loop, {0: [row]}, until=lambda row=row: len(row.out) >= 5 and setattr(row, "max_tokens", 6) is not None)
            reused.append(row.cached_tokens)
            talks[index] = after(row, 20, 100 + turn + 10 * index)
    assert reused == [0, 0, 506, 506, 532, 532]


def test_an_edit_lets_go_of_the_copy_and_not_of_another_conversation() -> None:
    loop = loop_of(2500)
    other, first = row_of(tokens(800, seed=77), 4, (790,)), row_of(tokens(900, seed=1), 6, (890,))
    run(loop, other)
    run(loop, first)
    edited = row_of(np.concatenate([first.prompt.ids[:890], tokens(20, seed=6)]), 20, (890,))
    drive(loop, {0: [edited]}, until=lambda: len(edited.out) > 2)
    assert tokens_stored(loop, other) == 804
    assert edited.cached_tokens == 890
    loop.ledger.settle()
    assert used(loop) <= 2500
    drive(loop, {})
    assert edited.out == solo_greedy(MODEL, edited.prompt.ids, 20)


def test_a_smaller_budget_takes_copies_before_conversations() -> None:
    loop = loop_of(4000)
    other, first = row_of(tokens(800, seed=77), 4, (790,)), row_of(tokens(1000, seed=1), 4, (990,))
    run(loop, other)
    run(loop, first)
    branch = row_of(np.concatenate([first.prompt.ids[:990], tokens(5, seed=4)]), 4, (990,))
    run(loop, branch)
    loop.set_pool_budget(2000 * TOKEN)
    assert used(loop) <= 2000
    assert tokens_stored(loop, other) == 804
    assert tokens_stored(loop, first) >= 990


class FailsOnce(ModelProxy):
    """Raises in one piece of a prompt when told to."""

    due = False

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        if self.due and ids.shape[1] > 1:
            self.due = False
            raise RuntimeError("injected")
        return super().forward(ids, cache)


def test_a_failed_piece_costs_others_nothing_of_the_beginning_they_share() -> None:
    model = FailsOnce(MODEL)
    loop = loop_of(model=model)
    system = tokens(400, seed=1)
    talks = [row_of(np.concatenate([system, tokens(100, seed=20 + index)]), 4, (400,)) for index in range(3)]
    for talk in talks:
        run(loop, talk)
    stored = [tokens_stored(loop, talk) for talk in talks]
    failing = row_of(np.concatenate([system, tokens(600, seed=99)]), 4, (400,))
    drive(loop, {0: [failing]}, until=lambda: failing.position > 700)
    model.due = True
    drive(loop, {})
    assert model.due is False
    assert loop.counters.rebuilds == 1
    assert [tokens_stored(loop, talk) for talk in talks] == stored == [504] * 3
    assert failing.out == solo_greedy(MODEL, failing.prompt.ids, 4)
    again = row_of(after(talks[0], 30, 5), 4, (400, 504))
    run(loop, again)
    assert again.out == solo_greedy(MODEL, again.prompt.ids, 4)


def test_a_path_that_cannot_be_copied_whole_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model: LoadedModel = wide_llama(layers=8)
    token = measure_shape(model).kv_bytes_per_token
    before = active_bytes()
    loop = make_loop(model, step=64, spacing=64, token_bytes=token)
    first = make_row(tokens(200, seed=1), 4, (190,))
    run(loop, first)
    drop_slack(loop)
    real, calls = layers._joined, [0]

    def fails(parts: Any, spare: int = 0) -> Any:
        if isinstance(parts[0], tuple):
            calls[0] += 1
            if calls[0] % 8 == 7:
                raise RuntimeError("injected")  # one of the device's own would halve the step and empty the pool
        return real(parts, spare)

    monkeypatch.setattr(layers, "_joined", fails)
    second = make_row(after(first, 60, 3), 4, (190,))
    run(loop, second)
    assert isinstance(second.channel.end, Failed)  # type: ignore[attr-defined]
    assert calls[0] > 7
    monkeypatch.setattr(layers, "_joined", real)
    assert (active_bytes() - before) / token < 1.1 * 204
    third = make_row(after(first, 60, 3), 4, (190,))
    run(loop, third)
    assert third.cached_tokens == 204
    assert third.out == solo_greedy(model, third.prompt.ids, 4)


def test_the_largest_request_of_a_plan_fits_into_its_pool() -> None:
    for facts in MACS:
        for shape in (CacheShape(20_480, 64 << 20), CacheShape(131_072), CacheShape(28_672, 0, 30 << 20)):
            plan = plan_memory(facts, facts.limit_bytes // 2, shape, context_max=262_144)
            assert plan.fits(plan.context_tokens, 0).ok
            assert request_bytes(shape, plan.context_tokens - 1, 1) <= plan.pool_bytes
