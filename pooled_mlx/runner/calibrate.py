"""Choosing the prefill step: the largest piece that keeps other streams and cancellation waiting no longer than half a second.

The step is part of every cache key, so it is chosen once for a machine, model and MLX version, stored, and never changed
while the process runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.memory import LARGEST_STEP, SMALLEST_STEP, Steps
from pooled_mlx.runner.layers import AttentionKind, arrays_in, kind_of, layers_of
from pooled_mlx.runner.model import LoadedModel, mx

_log = logging.getLogger("pooled.engine")

MOST_SECONDS = 0.5
MOST_CALIBRATION_SECONDS = 3.0
"""A start waits no longer for it, on a busy machine either."""
_FIRST_PIECE = 32
_PIECES_NEEDED, _PIECES_KEPT = 20, 200
SPACING_STEPS = 4
"""Checkpoints inside long messages stand this many steps apart, at least `SMALLEST_SPACING` tokens."""
SMALLEST_SPACING = 1024
SMALLEST_CUT = 64
"""Checkpoints closer together than this are merged: short pieces make a cold prompt slow."""


def spacing_for(step: int) -> int:
    """Tokens between checkpoints inside a long message: a multiple of the step."""
    return max(SPACING_STEPS * step, -(-SMALLEST_SPACING // step) * step)


def cut_rule(table: Steps) -> CutRule:
    """The cut rule of a machine whose prefill steps are those of `table`."""
    step = table[0][1]
    return CutRule(step, spacing_for(step), min(SMALLEST_CUT, step), table[1:])


def measure_step(
    model: LoadedModel,
    context_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    run: Callable[[int], None] | None = None,
) -> int:
    """The largest power of two in 128..2048 whose piece takes at most half a second behind a quarter of the context.

    Less where the model is not safe with such pieces (`LoadedModel.largest_piece`). No piece is begun that would probably end
    more than `MOST_CALIBRATION_SECONDS` after the start: then what the shorter ones took decides.
    """
    began = clock()
    most = model.largest_piece(LARGEST_STEP)
    tokens = min(_FIRST_PIECE, most)
    run = run or Behind(model, context_tokens // 4).read
    if clock() - began > MOST_CALIBRATION_SECONDS / 3:  # one token alone took that long
        _log.info("the machine is too busy to measure how long pieces of prompts may be; they are short until the next start")
        return min(SMALLEST_STEP, most)
    run(tokens)  # compiles kernels
    seconds = clock() - began
    longer, timed = tokens, False
    while not timed or seconds * longer / tokens <= MOST_SECONDS:
        if clock() - began + seconds * longer / tokens > MOST_CALIBRATION_SECONDS:
            _log.info("the machine is too busy to measure more; the longest piece is guessed")
            break
        try:
            seconds, tokens, timed = _timed(run, longer, clock), longer, True
        except RuntimeError as error:  # out of memory, or a buffer larger than the device allows
            _log.warning("a prefill piece of %d tokens cannot be run here: %s", longer, error)
            most = tokens
            break
        if tokens == most:
            break
        longer = min(max(2 * tokens, SMALLEST_STEP), most)
    return longest_step(seconds / tokens, most)


def longest_step(seconds_a_token: float, most: int) -> int:
    """The largest power of two from 128 on, at most `most`, whose piece takes no longer than `MOST_SECONDS`."""
    step = min(SMALLEST_STEP, most)
    while step * 2 <= most and step * 2 * seconds_a_token <= MOST_SECONDS:
        step *= 2
    return step


class Behind:
    """Pieces of random tokens behind a cache of `tokens` that was never read: its K/V are random numbers.

    Random, because the same token over and over would choose the same experts; not read, because that takes as long as it does.
    """

    def __init__(self, model: LoadedModel, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._cache = model.make_cache()
        self._ids = np.random.default_rng(0).integers(0, model.vocab_size, LARGEST_STEP)
        self.read(1)  # makes the layers' arrays, whose shapes say what to fill
        for layer in layers_of(self._cache):
            kind = kind_of(layer)
            if isinstance(kind, AttentionKind) and tokens:
                kind.fill(layer, [_random_like(kind.cut(layer, 0, 1), tokens)], tokens, tokens)
        mx.eval(arrays_in(self._cache))

    def read(self, tokens: int) -> None:
        """Read a piece, and forget it where the cache can be cut."""
        mx.eval(self._model.last_logits(mx.array(self._ids[:tokens])[None], self._cache), arrays_in(self._cache))
        for layer in layers_of(self._cache):
            if kind_of(layer).cuttable:
                layer.trim(tokens)


def _random_like(tree: Any, tokens: int) -> Any:
    """K/V like that of one token, of `tokens` random ones."""
    if isinstance(tree, tuple | list):
        return type(tree)(_random_like(item, tokens) for item in tree)
    *head, _, width = tree.shape
    if mx.issubdtype(tree.dtype, mx.floating):
        return mx.random.normal((*head, tokens, width), tree.dtype)
    return mx.random.randint(0, 2**31 - 1, (*head, tokens, width)).astype(tree.dtype)


class PieceTimes:
    """What real pieces of the longest kind take: whether another step would have been right, for the next start.

    The step of a running server never changes, because everything stored depends on it.
    """

    def __init__(self, step: int, most: int) -> None:
        self._step, self._most = step, most
        self._seconds: deque[float] = deque(maxlen=_PIECES_KEPT)

    def add(self, tokens: int, seconds: float) -> None:
        """A piece of `tokens` took so long."""
        if tokens == self._step:
            self._seconds.append(seconds)

    def better_step(self) -> int | None:
        """A step at least twice as long or half as long, if that is what the pieces show."""
        if len(self._seconds) < _PIECES_NEEDED:
            return None
        step = longest_step(median(self._seconds) / self._step, self._most)
        return step if step >= 2 * self._step or 2 * step <= self._step else None


def _timed(run: Callable[[int], None], tokens: int, clock: Callable[[], float]) -> float:
    began = clock()
    run(tokens)
    return clock() - began


def stored_step(path: Path, model_key: str, measure: Callable[[], int]) -> int:
    """The step stored for this model and MLX version in `path`, measured and stored when there is none."""
    stored = _read_steps(path).get(_key(model_key))
    if type(stored) is int and 1 <= stored <= LARGEST_STEP:
        return stored
    step = measure()
    store_step(path, model_key, step)
    return step


def store_step(path: Path, model_key: str, step: int) -> None:
    """Use `step` from the next start on. A failure is logged: it is measured again then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**_read_steps(path), _key(model_key): step}, indent=1))
        temporary.replace(path)
    except OSError as error:
        _log.warning("the prefill step could not be stored in %s: %s", path, error)


def _key(model_key: str) -> str:
    return f"{model_key} mlx {version('mlx')} mlx-lm {version('mlx-lm')}"


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
