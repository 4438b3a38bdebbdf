"""What is stored is what its ids say, it stays as it was, and whoever goes on from it says what he says alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.events import Failed
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.layers import arrays_in
from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine.harness import ModelProxy, assert_idle, drive, drop_slack, make_loop, make_row, run, solo_greedy
from tests.engine.test_exactness import ask
from tests.engine.test_not_finite import poison
from tests.engine.test_resources import active_bytes, wide_llama
from tests.tiny_models import ARCHITECTURES, tokens

_models: dict[str, LoadedModel] = {}


def loaded(name: str) -> LoadedModel:
    if name not in _models:
        _models[name] = ARCHITECTURES[name]()
    return _models[name]


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(request.param)


@pytest.fixture(params=["llama", "qwen3_moe"])
def divisible(request: pytest.FixtureRequest) -> LoadedModel:
    """A model that resumes anywhere."""
    return loaded(request.param)


@pytest.fixture(params=["qwen3_5_moe", "gemma3"])
def indivisible(request: pytest.FixtureRequest) -> LoadedModel:
    """A model that resumes only where a state was kept."""
    return loaded(request.param)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured log records keep tracebacks, and these the arrays of the frames in them."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.uint32) for part in parts])


def said(row: Row) -> np.ndarray:
    return joined(row.prompt.ids, row.out)


def stored_of(loop: Loop, ids: np.ndarray) -> int:
    """How many tokens of `ids` a prompt that goes on from them could resume from."""
    return loop.pool.lookup(joined(ids, [1])).tokens


def paths_of(loop: Loop) -> list[list[int]]:
    """The ids of every stored path."""
    return [joined(*(part.ids for part in segment.path())).tolist() for segment in loop.pool.segments()]


def check(model: LoadedModel, row: Row) -> None:
    assert row.out == solo_greedy(model, row.prompt.ids, row.max_tokens)


# --- resuming


def test_behind_a_resume_inside_a_segment_the_right_ids_are_stored(divisible: LoadedModel) -> None:
    loop = make_loop(divisible)
    first = make_row(tokens(250, seed=1), 3, (240,))
    branch = make_row(joined(first.prompt.ids[:150], tokens(100, seed=2)), 3, (240,))
    run(loop, first)
    run(loop, branch)
    assert branch.cached_tokens == 128
    following = make_row(joined(said(branch), tokens(30, seed=3)), 8, (240, 253))
    run(loop, following)
    assert following.cached_tokens == 253
    check(divisible, following)
    texts = [said(row).tolist() for row in (first, branch, following)]
    assert all(any(path == text[: len(path)] for text in texts) for path in paths_of(loop))


@pytest.mark.parametrize("end", [253, 240], ids=["with its end", "its end gone"])
def test_a_resume_inside_a_segment_leaves_it_as_it_was(divisible: LoadedModel, end: int) -> None:
    loop = make_loop(divisible)
    first = make_row(tokens(250, seed=1), 3, (240,))
    run(loop, first)
    run(loop, make_row(tokens(80, seed=9), 3))
    leaf = loop.pool.lookup(joined(said(first), [1])).parent
    assert leaf is not None
    if end < 253:
        loop.pool.drop(leaf, "not finite")
    branch = make_row(joined(first.prompt.ids[:150], tokens(100, seed=2)), 12, (240,))
    run(loop, branch)
    assert branch.cached_tokens == 128
    check(divisible, branch)
    following = make_row(joined(said(first)[:end], tokens(30, seed=3)), 12, (240, end))
    run(loop, following)
    assert following.cached_tokens == end
    check(divisible, following)


def test_what_a_resume_inside_a_segment_needs_is_counted() -> None:
    wide = wide_llama(layers=4)
    before = active_bytes()
    loop = make_loop(wide, token_bytes=wide_token_bytes(wide))
    first = make_row(tokens(600, seed=1), 2, (590,))
    run(loop, first)
    run(loop, make_row(tokens(30, seed=9), 2))
    branch = make_row(joined(first.prompt.ids[:500], tokens(20, seed=2)), 30)
    drive(loop, {0: [branch]}, until=lambda: len(branch.out) == 5)
    assert branch.cached_tokens == 448
    for gone in (None, branch):  # with what it resumed from in the pool, and without
        if gone is not None:
            loop.pool.clear()
        loop.ledger.settle()
        assert active_bytes() - before <= loop.pool.used_bytes + 40 * wide_token_bytes(wide)
    drive(loop, {})
    assert_idle(loop)


def wide_token_bytes(wide: LoadedModel) -> int:
    cache = wide.make_cache()
    mx.eval(wide.forward(mx.array([[0] * 256]), cache))
    return sum(array.nbytes for array in arrays_in(cache)) // 256


def test_a_state_is_the_same_for_the_first_who_resumes_there_and_the_last(indivisible: LoadedModel) -> None:
    """One token is left to read: what a model writes in place, it would write into what is stored."""
    loop = make_loop(indivisible)
    ids = tokens(200, seed=1)
    run(loop, make_row(ids, 2, (150,)))
    for last in (3, 70, 111):
        row = make_row(joined(ids[:150], [last]), 25)
        run(loop, row)
        assert row.cached_tokens == 150
        check(indivisible, row)


def test_a_prompt_given_up_where_no_other_stops_leaves_nothing_there(model: LoadedModel) -> None:
    """Without an output layer of its own a long last piece is read in two, and no longer prompt stops between them."""
    whole = replace(model, parts=None)
    loop = make_loop(whole)
    ids, marks = tokens(214, seed=1), (100,)
    row = make_row(ids, 5, marks)
    drive(loop, {0: [row]}, until=lambda: row.position == 213)
    row.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert {segment.end for segment in loop.pool.segments()} == {100}
    longer = joined(ids[:213], tokens(60, seed=2))
    warm, cold = ask(loop, longer, marks), ask(make_loop(whole), longer, marks)
    assert warm.row.cached_tokens == 100
    assert np.array_equal(warm.logits, cold.logits)
    assert_idle(loop)


# --- what is no number


class Spoils(ModelProxy):
    """Makes NaN of one kind of layer in the cache after a piece, when told to: what the piece itself says is right."""

    due = False

    def __init__(self, model: LoadedModel, attention: bool) -> None:
        super().__init__(model)
        self._attention = attention

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits = super().forward(ids, cache)
        if self.due and ids.shape[1] > 1:
            self.due = False
            mx.eval(logits)
            for layer in cache:
                if (type(layer).__name__ == "KVCache") == self._attention:
                    for array in arrays_in(layer):
                        array[...] = float("nan")
        return logits


@pytest.mark.parametrize(
    ("name", "attention"), [("llama", True), ("qwen3_5_moe", True), ("qwen3_5_moe", False), ("gemma3", True), ("gemma3", False)]
)
@pytest.mark.parametrize("length", [100, 300], ids=["in the last piece", "in the first of many"])
def test_what_is_no_number_is_stored_at_no_time(name: str, attention: bool, length: int) -> None:
    model: Any = Spoils(loaded(name), attention)
    loop = make_loop(model, step=128, spacing=128, minimum=16)
    run(loop, make_row(tokens(100, seed=1), 3, (64,)))
    known = [segment.key for segment in loop.pool.segments()]
    sick = make_row(tokens(length, seed=2), 5, (64, 100))
    model.due = True

    def stored() -> bool:
        assert [segment.key for segment in loop.pool.segments()] == known
        return False

    drive(loop, {0: [sick]}, until=stored)
    assert isinstance(sick.channel.end, Failed)  # type: ignore[attr-defined]
    assert sick.out == []
    assert_idle(loop)


class Passes(ModelProxy):
    """Notes the shape of every pass."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.shapes.append(ids.shape)
        return super().forward(ids, cache)


def test_nothing_is_read_behind_a_stored_state_that_went_bad(indivisible: LoadedModel) -> None:
    passes: Any = Passes(indivisible)
    ids = tokens(300, seed=12)
    run(make_loop(passes), make_row(ids, 5, (100, 200)))
    cold = list(passes.shapes)
    loop = make_loop(passes)
    run(loop, make_row(ids, 5, (100, 200)))
    drop_slack(loop)
    assert poison(loop, "states")
    passes.shapes.clear()
    row = make_row(ids, 5, (100, 200))
    run(loop, row)
    assert passes.shapes == cold
    assert row.cached_tokens == 0
    check(indivisible, row)


# --- the kept cache, and segments that two rows computed


def overtaken(loop: Loop, model: LoadedModel, **more: Any) -> tuple[Row, Row]:
    """Two rows: the second one's prompt begins with all that the first one says, and it is read while that is still said.

    The first one stores its answer, tokens 70..250, and its cache is kept. The second one comes to token 250 after that, and
    stores 250..380 from a cache of its own. It is in the middle of its own answer on return.
    """
    ids = tokens(210, seed=1)
    answer = solo_greedy(model, ids, 40)
    first = make_row(ids, 40, (70,))
    second = make_row(joined(ids, answer, tokens(200, seed=2)), 200, (70, 250, 380), **more)
    drive(loop, {0: [first]}, until=lambda: len(first.out) == 38)
    drive(loop, {0: [second]}, until=lambda: first.ended)
    assert 70 < second.position < 250
    assert stored_of(loop, said(first)) == 250
    drive(loop, {}, until=lambda: second.position >= 250)
    return first, second


@pytest.mark.parametrize(("common", "cached"), [(380, 380), (330, 314)], ids=["behind its end", "inside what follows it"])
def test_a_kept_cache_is_taken_over_only_where_it_ends_at_the_match(divisible: LoadedModel, common: int, cached: int) -> None:
    loop = make_loop(divisible)
    first, second = overtaken(loop, divisible)
    drive(loop, {}, until=lambda: len(second.out) >= 3)
    third = make_row(joined(second.prompt.ids[:common], tokens(40, seed=3)), 12)
    drive(loop, {0: [third]}, until=lambda: third.ended)
    assert not second.ended
    assert third.cached_tokens == cached
    check(divisible, third)
    fourth = make_row(joined(said(first), tokens(20, seed=4)), 12)
    drive(loop, {0: [fourth]}, until=lambda: fourth.ended)
    assert fourth.cached_tokens == 250
    check(divisible, fourth)
    drive(loop, {})
    check(divisible, second)
    assert_idle(loop)


def test_a_kept_cache_whose_segment_is_gone_is_not_taken_over(model: LoadedModel) -> None:
    """It was promised to a row that is still waiting for its first piece when the segment is dropped."""
    loop = make_loop(model)
    first = make_row(tokens(200, seed=1), 10, (100,))
    run(loop, first)
    following, short = make_row(joined(said(first), tokens(90, seed=2)), 12), make_row(tokens(20, seed=3), 12)
    loop.submit(following)
    loop.submit(short)
    loop.turn()
    assert (len(loop.running), following.position) == (2, 0)
    leaf = loop.pool.lookup(following.prompt.ids).parent
    assert leaf is not None
    assert leaf.end == 210
    loop.pool.drop(leaf, "not finite")
    drive(loop, {})
    assert following.cached_tokens == 100
    check(model, following)
    check(model, short)
    assert_idle(loop)


def test_a_kept_cache_that_nobody_can_go_on_from_is_given_up() -> None:
    wide = wide_llama(layers=4)
    token = wide_token_bytes(wide)
    loop = make_loop(wide, token_bytes=token)
    run(loop, make_row(tokens(1000, seed=1), 2, (990,)))
    loop.pool.clear()
    run(loop, make_row(tokens(30, seed=2), 2, roles={0: "user"}))
    assert loop.pool.used_bytes <= 300 * token
    assert_idle(loop)


def test_a_row_that_fails_takes_nothing_with_it_that_another_one_stored(model: LoadedModel) -> None:
    loop = make_loop(model)
    first, second = overtaken(loop, model, fault=Faults("nan", 0))
    drive(loop, {})
    assert isinstance(second.channel.end, Failed)  # type: ignore[attr-defined]
    assert stored_of(loop, said(first)) == 250
    assert_idle(loop)


def test_a_side_request_given_up_takes_nothing_with_it_that_another_one_stored(model: LoadedModel) -> None:
    loop = make_loop(model)
    run(loop, make_row(joined(tokens(210, seed=1)[:70], tokens(90, seed=5)), 2, (70,)))
    first, second = overtaken(loop, model, roles={0: "user"})
    second.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert isinstance(second.channel.end, Failed)  # type: ignore[attr-defined]
    assert stored_of(loop, said(first)) == 250
    assert_idle(loop)


def test_stored_numbers_stay_as_they_are_whoever_computes_the_same_again(model: LoadedModel) -> None:
    """Those of an answer differ from those of a prompt with the same ids by rounding: they must not change under anybody."""

    def logits_behind_the_answer(others: bool) -> np.ndarray:
        loop = make_loop(model)
        first, second = overtaken(loop, model)
        second.max_tokens = 5
        drive(loop, {})
        if others:  # they go on in the second one's own cache
            third = make_row(joined(said(second), tokens(20, seed=3)), 5)
            run(loop, third)
            assert third.cached_tokens == 455
            check(model, third)
        row = ask(loop, joined(said(first), tokens(20, seed=4)), (70, 250))
        assert row.row.cached_tokens == 250
        return row.logits

    assert np.array_equal(logits_behind_the_answer(False), logits_behind_the_answer(True))
