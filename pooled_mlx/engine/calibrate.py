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

from pooled_mlx.engine.mlx_backend import LoadedModel, mx

_log = logging.getLogger("pooled.engine")

SMALLEST_STEP = 128
LARGEST_STEP = 2048
MOST_SECONDS = 0.5
SPACING_STEPS = 4
"""Checkpoints inside long messages stand this many steps apart, at least `SMALLEST_SPACING` tokens."""
SMALLEST_SPACING = 1024


def spacing_for(step: int) -> int:
    """Tokens between checkpoints inside a long message: a multiple of the step."""
    return max(SPACING_STEPS * step, -(-SMALLEST_SPACING // step) * step)


def measure_step(
    model: LoadedModel,
    clock: Callable[[], float] = time.perf_counter,
    run: Callable[[int], None] | None = None,
) -> int:
    """The largest power of two in 128..2048 whose piece takes at most half a second on this machine."""

    def piece(tokens: int) -> None:
        cache = model.make_cache()
        model.forward(mx.array([[1] * tokens]), cache)
        mx.eval([layer.state for layer in cache])

    run = run or piece
    run(SMALLEST_STEP)  # compiles kernels
    step, seconds = SMALLEST_STEP, _timed(run, SMALLEST_STEP, clock)
    while step < LARGEST_STEP and seconds * 2 <= MOST_SECONDS:
        seconds = _timed(run, step * 2, clock)
        if seconds > MOST_SECONDS:
            break
        step *= 2
    return model.largest_piece(step)


def _timed(run: Callable[[int], None], tokens: int, clock: Callable[[], float]) -> float:
    began = clock()
    run(tokens)
    return clock() - began


def stored_step(path: Path, model_key: str, measure: Callable[[], int]) -> int:
    """The step stored for this model and MLX version in `path`, measured and stored when there is none."""
    key = f"{model_key} mlx {version('mlx')} mlx-lm {version('mlx-lm')}"
    known: dict[str, int] = {}
    try:
        known = json.loads(path.read_text())
        if isinstance(known.get(key), int) and known[key] > 0:
            return known[key]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError) as error:
        _log.warning("%s cannot be read and is written anew: %s", path, error)
        known = {}
    step = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**known, key: step}, indent=1))
        temporary.replace(path)
    except OSError as error:
        _log.warning("the prefill step could not be stored in %s: %s", path, error)
    return step
