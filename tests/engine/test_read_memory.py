"""What reading a long prompt takes at its peak is what the memory plan says."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.memory import MIB, DeviceFacts, plan_memory, scores_of, step_table
from pooled_mlx.runner.calibrate import cut_rule
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.runner import MlxRunner, measure_shape
from tests.engine.harness import loop_on, make_row, run
from tests.tiny_models import ARCHITECTURES, tokens

LENGTH = 5_000


def peak_bytes(model: LoadedModel, rule: CutRule, ids: np.ndarray) -> int:
    """The most that MLX held while a prompt was read, weights included."""
    gc.collect()
    mx.clear_cache()
    loop = loop_on(MlxRunner(model), rule)
    mx.reset_peak_memory()
    run(loop, make_row(ids, 1))
    return mx.get_peak_memory()


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "gemma3"])
@pytest.mark.parametrize("step", [256, 1024])
def test_the_peak_of_a_long_prompt_is_within_the_plan(name: str, step: int) -> None:
    model = ARCHITECTURES[name]()
    cell = model.score_cell_bytes(has_metal=False)
    assert cell == 4 * 4
    shape = measure_shape(model)
    facts = DeviceFacts("test", 700 * MIB)
    plan = plan_memory(facts, model.weights_bytes, shape, context_max=16_384, cell_bytes=cell, step=step)
    table = step_table(step, LENGTH, cell, plan.most_scores_bytes)
    assert scores_of(table, LENGTH, cell) > 15 * MIB, "the scores are what counts here"
    peak = peak_bytes(model, cut_rule(table), tokens(LENGTH, seed=3))
    assert peak <= plan.weights_bytes + plan.pool_bytes + plan.working_bytes
    if name == "llama":  # the plan's term is no invention
        assert peak - model.weights_bytes - shape.kv_bytes_per_token * LENGTH > 0.5 * scores_of(table, LENGTH, cell)


def test_a_table_of_steps_bounds_the_peak() -> None:
    model = ARCHITECTURES["llama"]()
    cell, ids = model.score_cell_bytes(has_metal=False), tokens(LENGTH, seed=3)
    whole = peak_bytes(model, CutRule(1024, 4096, 64), ids)
    shrinking = peak_bytes(model, CutRule(1024, 4096, 64, ((2048, 512), (4096, 256))), ids)
    saved = cell * (1024 - 256) * LENGTH
    assert whole - shrinking > 0.6 * saved
