"""The sampler: truncation, noise and masks, on rows wider and narrower than its blocks."""

from __future__ import annotations

import numpy as np
import pytest

from pooled_mlx.core.limits import MAX_TOP_K
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.runner.model import mx
from pooled_mlx.runner.sampler import BatchSampler, _in_blocks, _largest


@pytest.mark.parametrize("vocab", [40, 64, 65, 4096, 4097, 49152, 50001])
def test_the_largest_logits_are_found_in_rows_of_every_width(vocab: int) -> None:
    rows = np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32)
    width = min(MAX_TOP_K, vocab)
    found = np.array(_largest(_in_blocks(mx.array(rows)), width))
    for row, ids in zip(rows, found, strict=True):
        assert set(ids.tolist()) == set(np.argsort(-row)[:width].tolist())


def test_a_mask_that_leaves_less_than_the_candidates_gives_only_what_it_leaves() -> None:
    rows = mx.array(np.random.default_rng(1).normal(size=(1, 9000)).astype(np.float32))
    keep = np.zeros(9000, bool)
    keep[[17, 4400, 8999]] = True
    masked = mx.where(mx.array(keep)[None], rows, -mx.inf)
    drawn = set()
    for seed in range(60):
        sampler = BatchSampler([SamplingParameters(temperature=1.5, top_k=40, seed=seed)])
        drawn.add(int(sampler.draw_masked(rows, [seed], masked).item()))
    assert drawn == {17, 4400, 8999}


def test_draws_follow_the_truncated_distribution() -> None:
    logits = np.array([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0]], np.float32)
    count = 4000
    rule = SamplingParameters(temperature=1.0, top_k=3)
    samplers = BatchSampler([SamplingParameters(1.0, 3, seed=seed) for seed in range(count)])
    rows = mx.broadcast_to(mx.array(logits), (count, 6))
    drawn = np.bincount(np.array(samplers.draw(rows, [0] * count)), minlength=6) / count
    expected = np.exp(logits[0, : rule.top_k]) / np.exp(logits[0, : rule.top_k]).sum()
    assert np.abs(drawn[:3] - expected).max() < 0.03
    assert drawn[3:].sum() == 0


def test_an_allowed_draw_is_the_same_with_and_without_the_mask() -> None:
    rows = mx.array(np.random.default_rng(2).normal(size=(1, 5000)).astype(np.float32) * 3)
    keep = np.ones(5000, bool)
    keep[::3] = False
    masked = mx.where(mx.array(keep)[None], rows, -mx.inf)
    same = 0
    for seed in range(200):
        sampler = BatchSampler([SamplingParameters(temperature=1.0, top_k=40, seed=seed)])
        free = int(sampler.draw(rows, [3]).item())
        held = int(sampler.draw_masked(rows, [3], masked).item())
        assert keep[held]
        if keep[free]:
            assert held == free
            same += 1
    assert same > 50


@pytest.mark.parametrize("vocab", [4096, 4097, 4160, 5000, 9001])
@pytest.mark.parametrize("left", [1, 3, 40])
def test_a_masked_draw_stays_inside_what_is_left_whatever_the_width_of_the_vocabulary(vocab: int, left: int) -> None:
    numbers = np.random.default_rng(vocab + left)
    rows = [SamplingParameters(temperature=2.0, top_k=64, seed=seed) for seed in range(6)]
    sampler = BatchSampler(rows)
    for position in range(20):
        logits = numbers.normal(size=(len(rows), vocab)).astype(np.float32)
        # Every other row may begin with the first ids: they follow the end of the row before in memory.
        allowed = [numbers.choice(50 if row % 2 else vocab, left, replace=False) for row in range(len(rows))]
        masked = np.full_like(logits, -np.inf)
        for row, ids in enumerate(allowed):
            masked[row, ids] = logits[row, ids]
        positions = [position] * len(rows)
        # Rows cut out of wider ones, as where the vocabulary is padded: what lies behind them in memory is large.
        behind = np.full((len(rows), 64), 1e4, np.float32)
        free, held = (mx.array(np.concatenate([row, behind], axis=1))[:, :vocab] for row in (logits, masked))
        for drawn in (
            sampler.draw_masked(free, positions, held),
            sampler.draw_masked(held, positions, held),
            sampler.draw(held, positions),
        ):
            assert all(token in ids for token, ids in zip(np.array(drawn), allowed, strict=True))
