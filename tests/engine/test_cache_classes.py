"""What each cache class keeps at a checkpoint, and which of them can share a batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from pooled_mlx.engine.ledger import stored_of
from pooled_mlx.runner.buffers import Buffer
from pooled_mlx.runner.layers import bytes_of, kind_of, layers_of
from pooled_mlx.runner.model import ArraysCache, KVCache, RotatingKVCache, mx
from tests.engine.harness import ModelProxy, assert_idle, drop_slack, make_loop, make_row, reopenable, run, solo_greedy
from tests.tiny_models import gemma3, llama, tokens


def filled(cache: RotatingKVCache, pieces: list[int], seed: int = 0) -> RotatingKVCache:
    """`cache` after pieces of so many tokens of random K/V."""
    numbers = np.random.default_rng(seed)
    for count in pieces:
        array = mx.array(numbers.normal(size=(1, 2, count, 4)).astype(np.float32))
        cache.update_and_fetch(array, array + 1)
    return cache


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("after", [[1], [1, 1, 1], [7], [40], [7, 1, 9]], ids=str)
@pytest.mark.parametrize("before", [[3], [16], [17], [50], [9, 30], [50, 1], [50, 1, 20], [1, 1]], ids=str)
def test_a_trimmed_window_goes_on_as_the_whole_one(keep: int, before: list[int], after: list[int]) -> None:
    whole = filled(RotatingKVCache(16, keep=keep), before)
    cut = copy.deepcopy(whole)
    Buffer([cut]).freeze()
    assert cut.keys.shape[2] <= 16
    assert cut.offset == whole.offset
    numbers = np.random.default_rng(1)
    for count in after:
        array = mx.array(numbers.normal(size=(1, 2, count, 4)).astype(np.float32))
        for mine, their in zip(cut.update_and_fetch(array, array + 1), whole.update_and_fetch(array, array + 1), strict=True):
            assert mx.array_equal(mine, their)


def test_windows_at_checkpoints_take_no_more_than_their_size() -> None:
    model = gemma3()
    loop = make_loop(model)
    row = make_row(tokens(400, seed=3), 5, (100, 230, 399))
    run(loop, row)
    assert row.out == solo_greedy(model, row.prompt.ids, 5)
    windows = [layer for layer in layers_of(model.make_cache()) if type(layer) is RotatingKVCache]
    assert windows
    stored = [segment for segment in loop.pool.segments() if segment.has_state and segment.state_bytes]
    assert len(stored) > 3
    for segment in stored:
        runner: Any = loop.runner
        for state in runner._states[stored_of(segment).state].layers:
            if isinstance(state, dict) and "max_size" in state:
                assert state["keys"].shape[2] <= state["max_size"]
    assert_idle(loop)


def some(layer: KVCache | RotatingKVCache) -> Any:
    layer.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    return layer


@pytest.mark.parametrize(
    ("layers", "together"),
    [
        (lambda: [some(KVCache()), some(KVCache())], True),
        (lambda: [some(KVCache()), KVCache()], False),
        (lambda: [some(RotatingKVCache(8)), some(KVCache())], True),
        (lambda: [RotatingKVCache(8), some(KVCache())], False),
        (lambda: [some(RotatingKVCache(8, keep=2))], False),
        (lambda: [ArraysCache(2), some(KVCache())], False),
    ],
    ids=["attention", "unused attention", "window", "unused window", "window that keeps", "unused state"],
)
def test_only_layers_with_a_batch_form_share_a_batch(layers: Any, together: bool) -> None:
    assert all(kind_of(layer).joins(layer) for layer in layers()) is together


class WithUnusedLayer(ModelProxy):
    """A model with one more attention layer in its cache than it uses."""

    def make_cache(self) -> list[Any]:
        return [*self._model.make_cache(), KVCache()]

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        return self._model.forward(ids, cache[:-1])


def test_a_model_with_an_unused_layer_serves_several_rows_and_warm_turns() -> None:
    plain = llama()
    model: Any = WithUnusedLayer(plain)
    loop = make_loop(model)
    rows = [make_row(tokens(length, seed=length), 20, (20,)) for length in (150, 31, 77)]
    run(loop, *rows)
    assert [row.out for row in rows] == [solo_greedy(plain, row.prompt.ids, 20) for row in rows]
    longer = np.concatenate([rows[0].ids[: rows[0].position], tokens(30, seed=1)])
    warm = make_row(longer, 10, (20,))
    run(loop, warm)
    assert warm.cached_tokens > 100
    assert warm.out == solo_greedy(plain, longer, 10)
    assert_idle(loop)


def test_what_a_kept_cache_has_to_spare_is_counted_apart() -> None:
    model = llama()
    loop = make_loop(model)
    run(loop, make_row(tokens(150, seed=3), 20, (100,)))
    (kept,) = reopenable(loop)
    runner: Any = loop.runner
    assert loop.ledger.live_bytes == 0
    assert loop.pool.used_bytes == loop.pool.segment_bytes + loop.ledger.slack_bytes
    held = sum(segment.data.delta_bytes for segment in loop.pool.segments())
    assert loop.ledger.slack_bytes == bytes_of(runner._buffers[kept].caches) - held > 0
    drop_slack(loop)
    assert loop.ledger.slack_bytes == 0
