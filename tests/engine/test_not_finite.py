"""NaN in what is stored and in what a warm request computes: dropped, read anew, and the answer is right."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.errors import ErrorKind
from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.engine.ledger import stored_of
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.pool import Segment
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.layers import arrays_in, pieces_of
from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine.harness import ModelProxy, assert_idle, drive, drop_slack, make_loop, make_row, reopenable, run
from tests.engine.test_recovery import SHARED, end_of, prompt, solo
from tests.tiny_models import ARCHITECTURES, tokens

_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=["qwen3_5_moe", "llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that were asked for."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def arrays_of(loop: Loop, segment: Segment, part: str) -> list[mx.array]:
    """The arrays of a segment's state, or of the buffer that its K/V lies in."""
    runner: Any = loop.runner
    stored = stored_of(segment)
    if part == "states":
        return arrays_in(runner._states[stored.state].layers) if stored.state is not None else []
    return arrays_in(runner._buffers[stored.span.buffer].caches)


def poison(loop: Loop, part: str) -> int:
    """Make NaN of stored `part`s; returns how many arrays."""
    count = 0
    for segment in loop.pool.segments():
        for array in arrays_of(loop, segment, part):
            if mx.issubdtype(array.dtype, mx.floating):
                array[...] = float("nan")
                count += 1
    return count


@pytest.mark.parametrize("part", ["states", "deltas"])
def test_stored_numbers_that_went_bad_are_dropped_and_read_anew(model: LoadedModel, part: str) -> None:
    loop = make_loop(model)
    first = make_row(prompt(60, 1), 5, (60, 130))
    run(loop, first)
    drop_slack(loop)
    if not poison(loop, part):
        assert part == "states"
        assert loop.pool.divisible
        return
    rows = [make_row(prompt(60, seed), 10, (60, 130)) for seed in (1, 2, 3)]
    drive(loop, {0: rows[:1], 1: rows[1:]})
    for row in rows:
        assert row.out == solo(model, row)
    assert any("not finite" in name for name in loop.pool.counters)
    assert loop.counters.failures == 0
    healed = make_row(prompt(60, 4), 10, (60, 130))
    run(loop, healed)
    assert healed.cached_tokens >= 130
    assert healed.out == solo(model, healed)
    assert_idle(loop)


def test_a_hot_cache_that_went_bad_is_dropped_and_read_anew(model: LoadedModel) -> None:
    loop = make_loop(model)
    first = make_row(prompt(60, 1), 5, (60, 130))
    run(loop, first)
    (kept,) = reopenable(loop)
    runner: Any = loop.runner
    for array in arrays_in([runner._buffers[kept].layers, [state.layers for state in runner._states.values()]]):
        if mx.issubdtype(array.dtype, mx.floating):
            array[...] = float("nan")
    longer = np.concatenate([first.ids[: first.position], tokens(30, seed=3)])
    warm = make_row(longer, 10, (60, 130, len(first.ids)))
    run(loop, warm)
    assert isinstance(end_of(warm), Finished)
    assert warm.out == solo(model, warm)
    assert_idle(loop)


def test_only_what_went_bad_is_dropped(model: LoadedModel) -> None:
    loop = make_loop(model)
    for seed in (1, 2):
        run(loop, make_row(prompt(90, seed), 5, (130, 217)))
    drop_slack(loop)
    tail = max(loop.pool.segments(), key=lambda segment: (segment.end == 217, segment.last_use))
    runner: Any = loop.runner
    buffer, span = runner._buffers[stored_of(tail).span.buffer], stored_of(tail).span
    for index in buffer.attention_layers:
        ((lo, hi),) = pieces_of(buffer._ranges[index] or ((0, span.hi),), span.lo, span.hi)
        for array in (buffer.layers[index].keys, buffer.layers[index].values):
            array[..., lo:hi, :] = float("nan")
    warm = make_row(prompt(90, 2), 5, (130, 217))
    run(loop, warm)
    assert warm.out == solo(model, warm)
    assert not tail.held
    other = make_row(prompt(90, 1), 5, (130, 217))
    run(loop, other)
    assert other.cached_tokens == 217
    assert other.out == solo(model, other)
    assert_idle(loop)


def test_a_request_whose_own_numbers_are_bad_costs_others_nothing(model: LoadedModel) -> None:
    loop = make_loop(model)
    run(loop, make_row(prompt(90, 1), 5, (130, 217)))
    sick = make_row(prompt(40, 3), 5, (130,), fault=Faults("nan", 0))
    run(loop, sick)
    assert isinstance(end_of(sick), Failed)
    assert loop.counters.not_finite == 2
    other = make_row(prompt(90, 1), 5, (130, 217))
    run(loop, other)
    assert other.cached_tokens == 217
    assert other.out == solo(model, other)
    assert_idle(loop)


class BadAt(ModelProxy):
    """A model whose logits are no numbers when it reads one token, `times` times."""

    def __init__(self, model: LoadedModel, token: int, times: int) -> None:
        super().__init__(model)
        self._token, self.times = token, times

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model.forward(ids, cache)
        if self.times and bool((ids == self._token).any().item()):
            self.times -= 1
            return logits + float("nan")
        return logits


def test_a_number_that_is_none_only_warm_is_read_anew_once(model: LoadedModel) -> None:
    for times, finished in ((1, True), (2, False)):
        ids = np.concatenate([SHARED, np.array([300], np.uint32)])
        bad: Any = BadAt(model, 300, 0)
        loop = make_loop(bad)
        run(loop, make_row(SHARED, 2, (60, 129)))
        stored = list(loop.pool.segments())
        bad.times = times
        warm, other = make_row(ids, 8, (60, 129)), make_row(tokens(40, vocab=300, seed=9), 8)
        run(loop, warm, other)
        assert loop.counters.not_finite == times
        assert loop.counters.failures == 0
        assert other.out == solo(model, other)
        if finished:
            assert warm.out == solo(model, warm)
            assert warm.cached_tokens == 0
            assert not any(segment.held for segment in stored)
        else:
            end = end_of(warm)
            assert isinstance(end, Failed)
            assert end.error.kind is ErrorKind.ENGINE_FAILED
            assert "not a number" in end.error.message
            assert warm.out == []
            assert all(segment.held for segment in stored)
        assert_idle(loop)


def test_nothing_is_kept_of_an_answer_after_its_numbers_went_bad(model: LoadedModel) -> None:
    loop = make_loop(model)
    run(loop, make_row(SHARED, 2, (60, 129)))
    known = {segment.key for segment in loop.pool.segments()}
    sick = make_row(prompt(60, 1), 20, (60, 130, 185), fault=Faults("nan", 6))
    run(loop, sick)
    assert isinstance(end_of(sick), Failed)
    assert {segment.key for segment in loop.pool.segments()} <= known
    assert_idle(loop)
