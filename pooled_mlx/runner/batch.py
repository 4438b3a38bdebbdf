"""Many rows in one pass: joining caches into a batch and taking rows out, and the choice of every row's next token.

A cache of one row keeps mlx-lm's plain classes, so that a single stream pays nothing for batching; the pass is the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pooled_mlx.core.runner import Ranges, Shape
from pooled_mlx.runner.buffers import Buffer, Evaluation
from pooled_mlx.runner.layers import arrays_in, kind_of, layers_of
from pooled_mlx.runner.model import mx
from pooled_mlx.runner.sampler import BatchSampler, usable_rows

Chosen = tuple[mx.array, mx.array]
"""Chosen tokens `[batch]` and whether the logits behind them were finite `[batch]`. Lazy."""

_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)
_MOST_WRITTEN = 4096
"""Tokens that are shut out one by one; for more, every token gets a flag."""


# --- joining and leaving


def join(sources: Sequence[tuple[Buffer, bool]], trims: Sequence[Ranges | None]) -> Buffer:
    """One batch of the rows of two buffers, given as (buffer, it is a batch already).

    A batch that went into it is emptied; a plain buffer keeps its ranges of `trims`. Layer by layer, so that little is in
    memory twice.
    """
    (first, first_is_batch), (second, second_is_batch) = sources
    caches: list[Any] = []
    evaluation = Evaluation()
    index = 0
    for mine, theirs in zip(first.caches, second.caches, strict=True):
        joined = mine if first_is_batch else mine.merge([mine])
        joined.extend(theirs if second_is_batch else theirs.merge([theirs]))
        evaluation.add(joined)
        caches.append(joined)
        count = len(layers_of([mine]))
        for (buffer, is_batch), ranges in zip(sources, trims, strict=True):
            for layer in range(index, index + count):
                if is_batch:
                    buffer.layers[layer] = None
                elif ranges is not None and buffer.kinds[layer].cuttable:
                    evaluation.add(buffer.keep(layer, ranges))
        index += count
    evaluation.finish()
    for buffer, is_batch in sources:
        if is_batch:
            buffer.caches, buffer.layers, buffer.kinds = [], [], []
        else:
            buffer.seal()
    return Buffer(caches, live=True)


def extract(batch: Buffer, place: int) -> Buffer:
    """The row at `place` of a batch in plain caches of its own."""
    caches = [cache.extract(place) for cache in batch.caches]
    for layer in layers_of(caches):
        kind_of(layer).left(layer)
    mx.eval(arrays_in(caches))
    return Buffer(caches, live=True)


def keep_rows(batch: Buffer, places: Sequence[int]) -> None:
    """Let go of all other rows of a batch."""
    for cache in batch.caches:
        cache.filter(list(places))
    mx.eval(arrays_in(batch.caches))


# --- the choice


def choose(
    logits: mx.array, shapes: Sequence[Shape], sampler: BatchSampler, unread: mx.array | None, known_tokens: int | None
) -> Chosen:
    """Next tokens and finite flags from logits `[batch, vocab]`, in the order that `Shape` tells.

    `unread` `[batch]` are tokens that were chosen before and that nobody has looked at. Ids from `known_tokens` on only pad
    the vocabulary: they stand for no text and are never chosen.
    """
    positions = [shape.position for shape in shapes]
    logits = _shaped(logits[:, :known_tokens], shapes, unread)
    finite = usable_rows(logits)
    masks = [shape.allowed for shape in shapes if shape.allowed is not None]
    if masks:
        everything = np.full_like(masks[0], _ALL) if len(masks) < len(shapes) else None
        words = np.array([everything if shape.allowed is None else shape.allowed for shape in shapes])
        chosen = sampler.draw_masked(logits, positions, _masked(logits, words))
    else:
        chosen = sampler.draw(logits, positions)
    told = [shape.token for shape in shapes]
    if told.count(None) < len(told):
        tokens = mx.array([token or 0 for token in told], chosen.dtype)
        chosen = mx.where(mx.array([token is not None for token in told]), tokens, chosen)
    return chosen, finite


def _shaped(logits: mx.array, shapes: Sequence[Shape], unread: mx.array | None) -> mx.array:
    for index, shape in enumerate(shapes):
        for token, bias in shape.biases:
            logits = logits.at[index, token].add(bias)
        if shape.poison:
            logits = logits.at[index, 0].add(float("nan"))
    for index, shape in enumerate(shapes):
        if shape.close is not None:
            logits = _close_before_end(logits, index, shape.close, shape.ends, None if unread is None else unread[index])
    return logits


def _masked(logits: mx.array, words: np.ndarray) -> mx.array:
    """Logits `[batch, vocab]` with -inf wherever the bit words `[batch, words]` have no bit.

    In free text nearly everything is allowed: then only the few others are written, instead of a flag for every token.
    """
    width = logits.shape[-1]
    rows, places = np.nonzero(words != _ALL)
    if len(rows) * _BITS <= _MOST_WRITTEN:
        shut = (words[rows, places][:, None] >> np.arange(_BITS, dtype=np.uint32)) & 1 == 0
        ids = (places[:, None] * _BITS + np.arange(_BITS))[shut]
        batch = np.repeat(rows, shut.sum(axis=1))
        inside = ids < width
        if not inside.any():
            return logits
        masked = mx.array(logits)
        masked[mx.array(batch[inside]), mx.array(ids[inside])] = -mx.inf
        return masked
    bits = (mx.array(words)[..., None] >> mx.arange(_BITS, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(words.shape[0], -1)[:, :width].astype(mx.bool_), logits, -mx.inf)


def _close_before_end(logits: mx.array, index: int, close: int, ends: Collection[int], pending: mx.array | None) -> mx.array:
    """Inside a thought give the end token's weight to the closing tag: an answer never ends as an unfinished thought.

    `pending` is the row's unread token: if that closes the thought, its logits stay as they are.
    """
    row = logits[index]
    end_ids = mx.array(sorted(ends))
    shaped = mx.array(row)
    shaped[end_ids] = mx.min(row) - 1e4
    shaped[close] = mx.maximum(mx.max(row[end_ids]), row[close])
    logits = mx.array(logits)
    logits[index] = shaped if pending is None else mx.where(pending == close, row, shaped)
    return logits
