"""The promises of the other files here on weights, caches and logits of 16 bits, as Macs run them, where the CPU can too.

Mixture-of-experts models are not among them: the CPU backend gathers experts in float32 only. In 16 bits its matrix products
depend on the number of rows, so that an answer of two rows together, or a prompt that is read in other pieces, as mlx-lm's own
generator does, differs by rounding: what is compared bit for bit was read in the same pieces, alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.layers import arrays_in
from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine import test_exactness as exactness
from tests.engine import test_forks as forks
from tests.engine import test_not_finite as not_finite
from tests.engine.harness import assert_idle, drive, first_logits, make_loop, make_row, run
from tests.tiny_models import gemma3, in_16_bits, llama, qwen3_5, tokens

MODELS: dict[str, Callable[[], LoadedModel]] = {
    "llama": lambda: in_16_bits(llama(layers=2), mx.bfloat16),
    "gemma3": lambda: in_16_bits(gemma3(layers=2, pattern=2), mx.bfloat16),
    "qwen3_5": lambda: in_16_bits(qwen3_5(layers=2, interval=2), mx.bfloat16),
    "llama 4-bit": lambda: in_16_bits(llama(layers=2), mx.float16, bits=4),
}
LENGTHS = [30, 32, 33, 47, 95, 96, 97, 112, 191, 192, 193, 208]
"""Some of the lengths around the borders that the float32 models are asked at."""
ROUNDING = 0.05
"""Tokens whose logits are closer than this part of the largest one may change places in 16 bits."""
_models: dict[str, LoadedModel] = {}


def loaded(name: str) -> LoadedModel:
    if name not in _models:
        _models[name] = MODELS[name]()
    return _models[name]


@pytest.fixture(params=["llama", "gemma3", "qwen3_5"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(request.param)


def read_alone(model: LoadedModel, row: Row) -> list[int]:
    """What a new engine answers: the same pieces, nothing stored, nobody beside."""
    alone = make_row(row.prompt.ids, row.max_tokens, row.prompt.boundaries)
    run(make_loop(model), alone)
    return alone.out


@pytest.fixture(autouse=True)
def as_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "LENGTHS", LENGTHS)
    monkeypatch.setattr(not_finite, "solo", read_alone)


no_log = not_finite.no_log

test_warm_equals_cold = exactness.test_warm_equals_cold_at_every_length_around_the_borders
test_a_wrong_prefix_would_show = exactness.test_a_wrong_prefix_would_show
test_edits_branches_and_repeats = exactness.test_edits_branches_and_repeats_are_exact
test_parallel_conversations = exactness.test_parallel_conversations_do_not_mix
test_learned_forks = forks.test_what_a_learned_fork_gives_is_exact
test_stored_numbers_that_went_bad = not_finite.test_stored_numbers_that_went_bad_are_dropped_and_read_anew
test_a_hot_cache_that_went_bad = not_finite.test_a_hot_cache_that_went_bad_is_dropped_and_read_anew
test_bad_numbers_of_its_own = not_finite.test_a_request_whose_own_numbers_are_bad_costs_others_nothing
test_nothing_is_kept_after_bad_numbers = not_finite.test_nothing_is_kept_of_an_answer_after_its_numbers_went_bad


def test_everything_is_in_16_bits(model: LoadedModel) -> None:
    cache = model.make_cache()
    logits = model.last_logits(mx.array(tokens(40, seed=1))[None], cache)
    assert logits.dtype == mx.bfloat16
    kept = {array.dtype for array in arrays_in(cache) if mx.issubdtype(array.dtype, mx.floating)}
    assert mx.bfloat16 in kept
    assert kept <= {mx.bfloat16, mx.float32}  # recurrent states are float32 in any case


def test_quantized_weights_give_the_same_warm_and_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "LENGTHS", [97, 193])
    exactness.test_warm_equals_cold_at_every_length_around_the_borders(loaded("llama 4-bit"))


def test_the_last_logits_are_those_of_the_whole_piece(model: LoadedModel) -> None:
    ids = mx.array(tokens(40, seed=1))[None]
    whole, apart = model.make_cache(), model.make_cache()
    expected = np.array(model.forward(ids, whole)[0, -1].astype(mx.float32))
    logits = np.array(model.last_logits(ids, apart)[0].astype(mx.float32))
    assert np.abs(logits - expected).max() <= 0.01 * np.abs(expected).max()
    for mine, their in zip(arrays_in(apart), arrays_in(whole), strict=True):
        assert mx.array_equal(mine, their)


@pytest.mark.parametrize("arrival", [{0: (0, 1, 2)}, {0: (0,), 3: (1,), 9: (2,)}], ids=["together", "staggered"])
@pytest.mark.parametrize("name", list(MODELS))
def test_rows_of_a_batch_part_from_each_alone_by_rounding_only(name: str, arrival: dict[int, tuple[int, ...]]) -> None:
    """Prompts are read alone in any case: their logits are the same. Answers part at most where two tokens are near."""
    model = loaded(name)
    prompts = [tokens(length, seed=length) for length in (70, 77, 60)]
    loop = make_loop(model)
    rows = [make_row(ids, 16, (20,)) for ids in prompts]
    widths: list[int] = []

    def watch() -> bool:
        widths.append(max((len(batch.rows) for batch in loop.batches), default=0))
        return False

    drive(loop, {turn: [rows[index] for index in places] for turn, places in arrival.items()}, until=watch)
    assert max(widths) == 3
    for row in rows:
        alone = read_alone(model, row)
        place = next((place for place, (one, other) in enumerate(zip(alone, row.out, strict=True)) if one != other), None)
        if place is None:
            continue
        assert place > 0, "the first token is chosen from logits of the prompt, read alone"
        again = make_row(np.concatenate([row.prompt.ids, np.array(alone[:place], np.uint32)]), 1)
        other_loop = make_loop(model)
        kept = first_logits(other_loop, again)
        run(other_loop, again)
        gap = abs(float(kept[0][alone[place]] - kept[0][row.out[place]]))
        assert gap <= ROUNDING * float(np.abs(kept[0]).max()), f"token {place}: {gap} apart"
    assert_idle(loop)


def test_a_row_at_a_time_is_deterministic(model: LoadedModel) -> None:
    prompts = [tokens(length, seed=length) for length in (70, 77, 60)]
    rows = [make_row(ids, 16, (20,)) for ids in prompts]
    run(make_loop(model, max_running=1), *rows)
    assert [row.out for row in rows] == [read_alone(model, row) for row in rows]


def test_draws_from_16_bit_logits_are_the_same_warm_and_cold(model: LoadedModel) -> None:
    rule = SamplingParameters(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=11)
    ids = tokens(160, seed=8)

    def asked(loop: Any) -> Row:
        row = make_row(ids, 25, (100,), sampling=rule)
        run(loop, row)
        return row

    loop = make_loop(model)
    cold, warm = asked(loop), asked(loop)
    assert warm.cached_tokens >= 100
    assert cold.out == warm.out == asked(make_loop(model)).out
    assert len(set(cold.out)) > 5
