"""Choosing the prefill step: the largest piece that keeps other streams and cancellation waiting no longer than half a second.

The step is part of every cache key, so it is chosen once for a machine, model and MLX version, stored, and never changed
while the process runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.memory import largest_step
from pooled_mlx.runner.model import LoadedModel, mx

_log = logging.getLogger("pooled.engine")

SMALLEST_STEP = 128
LARGEST_STEP = 2048
MOST_SECONDS = 0.5
SPACING_STEPS = 4
"""Checkpoints inside long messages stand this many steps apart, at least `SMALLEST_SPACING` tokens."""
SMALLEST_SPACING = 1024
SMALLEST_CUT = 64
"""Checkpoints closer together than this are merged: short pieces make a cold prompt slow."""


def spacing_for(step: int) -> int:
    """Tokens between checkpoints inside a long message: a multiple of the step."""
    return max(SPACING_STEPS * step, -(-SMALLEST_SPACING // step) * step)


def cut_rule(step: int) -> CutRule:
    """The cut rule of a machine whose prefill step is `step` tokens."""
    return CutRule(step, spacing_for(step), min(SMALLEST_CUT, step))


def safe_step(model: LoadedModel, step: int, context_tokens: int, largest_buffer_bytes: int | None) -> int:
    """`step`, or less where the model's experts or the device's largest buffer cannot take such a piece."""
    text = model.config.get("text_config")
    heads = (text if isinstance(text, dict) else model.config).get("num_attention_heads") or 0
    safe = largest_step(model.largest_piece(step), context_tokens, int(heads), largest_buffer_bytes)
    if safe < step:
        _log.warning("a prefill step of %d tokens is more than this model or machine can take; it is %d", step, safe)
    return safe


def measure_step(
    model: LoadedModel,
    clock: Callable[[], float] = time.perf_counter,
    run: Callable[[int], None] | None = None,
) -> int:
    """The largest power of two in 128..2048 whose piece takes at most half a second on this machine.

    Less where the model is not safe with such pieces (`LoadedModel.largest_piece`).
    """

    def piece(tokens: int) -> None:
        cache = model.make_cache()
        model.forward(mx.array([[1] * tokens]), cache)
        mx.eval([layer.state for layer in cache])

    run = run or piece
    most = model.largest_piece(LARGEST_STEP)
    step = min(SMALLEST_STEP, most)
    run(step)  # compiles kernels
    seconds = _timed(run, step, clock)
    while step * 2 <= most and seconds * 2 <= MOST_SECONDS:
        try:
            seconds = _timed(run, step * 2, clock)
        except RuntimeError as error:  # out of memory, or a buffer larger than the device allows
            _log.warning("a prefill piece of %d tokens cannot be run here: %s", step * 2, error)
            break
        if seconds > MOST_SECONDS:
            break
        step *= 2
    return step


def _timed(run: Callable[[int], None], tokens: int, clock: Callable[[], float]) -> float:
    began = clock()
    run(tokens)
    return clock() - began


def stored_step(path: Path, model_key: str, measure: Callable[[], int]) -> int:
    """The step stored for this model and MLX version in `path`, measured and stored when there is none."""
    key = f"{model_key} mlx {version('mlx')} mlx-lm {version('mlx-lm')}"
    known = _read_steps(path)
    stored = known.get(key)
    if type(stored) is int and 1 <= stored <= LARGEST_STEP:
        return stored
    step = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**known, key: step}, indent=1))
        temporary.replace(path)
    except OSError as error:
        _log.warning("the prefill step could not be stored in %s: %s", path, error)
    return step


def _read_steps(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return known
        _log.warning("%s does not hold a JSON object and is written anew", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read and is written anew: %s", path, error)
    return {}
