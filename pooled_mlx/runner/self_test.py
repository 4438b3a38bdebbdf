"""A test of the machine at load: does one long prefill piece give what short pieces give?

MLX's sorted expert kernel has left rows unwritten on some GPUs when a piece had too many of them; such a model answers
fluently and wrongly. The prefill step stays below the known limit, and this test looks for what is not known yet.
"""

from __future__ import annotations

import logging
import random
from typing import Any

from pooled_mlx.runner.layers import AttentionKind, arrays_in, kind_of, layers_of
from pooled_mlx.runner.model import MAX_EXPERT_ROWS, LoadedModel, ModelLoadError, mx

_log = logging.getLogger("pooled.engine")

SHORT_PIECE = 64
"""Tokens of a piece that is read without the sorted kernel's long runs."""
_LEAST_COSINE = 0.9
"""Final logits of the two readings: rounding in 16 bits through all layers leaves them above 0.99."""
_MOST_TOKENS_OFF = 0.05
"""Part of the tokens whose keys may differ much: rounding sends a few of them to other experts."""
_FAR_OFF = 0.5
"""Length of the difference over the length of the vector."""


def check_long_pieces(model: LoadedModel, step: int) -> None:
    """Read `step` tokens in one piece and in short ones and compare. Raises `ModelLoadError` when the long piece is wrong.

    Does nothing for models without experts. Takes about as long as two pieces.
    """
    if not model.active_experts:
        return
    rows = step * model.active_experts
    if rows > MAX_EXPERT_ROWS:
        raise ModelLoadError(
            f"a prefill step of {step} tokens means {rows} expert rows in one piece (limit {MAX_EXPERT_ROWS}): MLX may leave "
            f"some unwritten. Use --prefill-step {model.largest_piece(step)}"
        )
    if step <= SHORT_PIECE:
        return
    draw = random.Random(0)
    ids = [draw.randrange(model.vocab_size) for _ in range(step)]
    long_caches, long_logits = _read(model, ids, step)
    short_caches, short_logits = _read(model, ids, SHORT_PIECE)
    cosine = _cosine(long_logits, short_logits)
    off = _tokens_off(long_caches, short_caches)
    _log.debug("self-test of a piece of %d tokens: cosine %.4f, %.2f%% of the tokens differ", step, cosine, 100 * off)
    if not (cosine >= _LEAST_COSINE and off <= _MOST_TOKENS_OFF):
        raise ModelLoadError(
            f"this machine reads a piece of {step} tokens wrongly: compared with pieces of {SHORT_PIECE} its logits agree to "
            f"{cosine:.2f} (wanted: {_LEAST_COSINE} or more), and {off:.0%} of its tokens differ (wanted: at most "
            f"{_MOST_TOKENS_OFF:.0%}). Start with --prefill-step {max(SHORT_PIECE, step // 2)}, and report this with "
            "the output of pooled-mlx doctor"
        )


def _read(model: LoadedModel, ids: list[int], piece: int) -> tuple[list[Any], mx.array]:
    """The caches after `ids` in pieces, and the logits of one more token in float32."""
    caches = model.make_cache()
    for start in range(0, len(ids), piece):
        model.forward(mx.array([ids[start : start + piece]]), caches)
        mx.eval(arrays_in(caches))
    logits = model.forward(mx.array([ids[:1]]), caches)[0, -1].astype(mx.float32)
    mx.eval(logits)
    return caches, logits


def _cosine(a: mx.array, b: mx.array) -> float:
    """NaN where one of them is not finite."""
    cosine: Any = (mx.sum(a * b) / (mx.linalg.norm(a) * mx.linalg.norm(b))).item()
    return float(cosine)


def _tokens_off(a: list[Any], b: list[Any]) -> float:
    """The part of the tokens whose keys in the last attention layer are far apart; 0 for a model without such a layer."""
    for one, other in zip(reversed(layers_of(a)), reversed(layers_of(b)), strict=True):
        kind = kind_of(one)
        if isinstance(kind, AttentionKind) and isinstance(one.keys, mx.array):
            first, second = (kind.cut(layer, 0, layer.offset)[0][0].astype(mx.float32) for layer in (one, other))
            distance = mx.sqrt(mx.sum((first - second) ** 2, axis=(0, 2)) / mx.sum(second**2, axis=(0, 2)))
            near: Any = mx.sum(distance <= _FAR_OFF).item()
            return 1.0 - near / distance.size
    return 0.0
