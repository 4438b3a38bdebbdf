"""A decode group: rows that take their steps together in one batch.

A group of one row runs on mlx-lm's plain cache classes, a larger one on their batch forms; the step is the same code. One
forward pass is always queued ahead of the token that is being read. Rows that must be asked before the next token can be
chosen (grammar, the end of a thinking budget) make the group read first and sample then; the forward pass itself is
already running by that time, so the group loses no overlap but that of the sampling kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pooled_mlx.engine.mlx_backend import ArraysCache, LoadedModel, mx
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.sampler import BatchSampler
from pooled_mlx.grammar.match import GrammarFailed

Pending = tuple[mx.array, mx.array]
"""The chosen, unread tokens `[batch]` of some rows and whether the logits behind them were finite `[batch]`."""

_SCRIPT_BIAS = 1e4
_BITS = 32


def batchable(caches: Sequence[Any]) -> bool:
    """True when every layer's cache class has a batch form."""
    return all(hasattr(cache, "merge") for cache in caches)


class DecodeGroup:
    """Rows, their shared caches and their pending tokens. Owned by the engine thread.

    `pending` `[batch]` is the lazy next token of each row: chosen, not yet read, not yet in the caches. `finite` `[batch]`
    says whether the logits that chose it were finite.
    """

    def __init__(self, model: LoadedModel, row: Row, caches: list[Any], start: mx.array | Pending) -> None:
        """A group of one. `start` is the logits `[1, vocab]` after the last token, or the token it was parked with."""
        self._model = model
        self.rows = [row]
        self.caches = caches
        self._sampler = BatchSampler([row.sampling])
        self._logits: mx.array | None = None
        self._chosen: Pending | None = None
        self.pending, self.finite = start if isinstance(start, tuple) else self._choose(start, [row], after_pending=False)
        mx.async_eval(self.pending, self.finite)

    # --- joining and leaving

    def join(self, other: DecodeGroup) -> None:
        """Take the rows of `other` in. The caches of both are copied into one batch; `other` must not be used again."""
        if len(self.rows) == 1:
            self.caches = [cache.merge([cache]) for cache in self.caches]
        theirs = other.caches if len(other.rows) > 1 else [cache.merge([cache]) for cache in other.caches]
        for mine, their in zip(self.caches, theirs, strict=True):
            mine.extend(their)
        self.rows = [*self.rows, *other.rows]
        self.pending = mx.concatenate([self.pending, other.pending])
        self.finite = mx.concatenate([self.finite, other.finite])
        self._sampler = BatchSampler([row.sampling for row in self.rows])
        mx.eval(self.pending, self.finite, [cache.state for cache in self.caches])

    def remove(self, leaving: Sequence[Row]) -> dict[Row, tuple[list[Any], Pending]]:
        """Take rows out and return each one's own plain caches and unread token; the group may be empty afterwards."""
        gone = [index for index, row in enumerate(self.rows) if row in leaving]
        keep = [index for index in range(len(self.rows)) if index not in gone]
        caches = {
            self.rows[index]: (
                self.caches if len(self.rows) == 1 else self._extract(index),
                (self.pending[index : index + 1], self.finite[index : index + 1]),
            )
            for index in gone
        }
        if not gone:
            return caches
        if not keep:
            self.rows, self.caches = [], []
            return caches
        if len(keep) == 1:
            self.caches = self._extract(keep[0])
        else:
            for cache in self.caches:
                cache.filter(keep)
            mx.eval([cache.state for cache in self.caches])
        chosen = mx.array(keep)
        self.pending, self.finite = self.pending[chosen], self.finite[chosen]
        self.rows = [self.rows[index] for index in keep]
        self._sampler = BatchSampler([row.sampling for row in self.rows])
        return caches

    def _extract(self, index: int) -> list[Any]:
        caches = [cache.extract(index) for cache in self.caches]
        for cache in caches:
            if isinstance(cache, ArraysCache):  # extract gives slices, which would keep the whole batch alive
                cache.cache = [None if array is None else mx.contiguous(array) for array in cache.cache]
        mx.eval([cache.state for cache in caches])
        return caches

    def drain(self) -> None:
        """Wait until nothing of this group is being computed."""
        mx.eval(self.pending, self.finite, [cache.state for cache in self.caches])

    # --- the step

    def step(self) -> list[tuple[Row, int | None]]:
        """Run one forward pass and report each row's token, None where its logits were not finite.

        The caller passes every token to `Row.take`, removes finished rows, and calls `settle`. For a group that needs no
        synchronisation the token after next is already being sampled when this returns.
        """
        logits = self._model.forward(self.pending[:, None], self.caches)[:, -1]
        self._logits = logits
        self._chosen = None
        if any(row.needs_sync or row.forced for row in self.rows):
            mx.async_eval(logits)
        else:
            self._chosen = self._choose(logits, self.rows, after_pending=True)
            mx.async_eval(*self._chosen)
        tokens: Any = self.pending.tolist()
        finite: Any = self.finite.tolist()
        return [(row, int(tokens[i]) if finite[i] else None) for i, row in enumerate(self.rows)]

    def settle(self) -> list[tuple[Row, int]]:
        """Choose the next pending tokens, after every row took its last one. Call before rows are removed.

        Returns tokens that were taken ahead for a row alone in its group: a forced run is read in one forward pass.
        """
        ahead: list[tuple[Row, int]] = []
        if self._chosen is None:
            row = self.rows[0]
            if len(self.rows) == 1 and row.finish is None and len(row.forced) > 1:
                run, row.forced = row.forced[: row.max_tokens - len(row.out)], []
                ahead = [(row, token) for token in run]
                self._logits = self._model.forward(mx.array([run]), self.caches)[:, -1]
                return ahead
            assert self._logits is not None, "settle follows step"
            self._chosen = self._choose(self._logits, self.rows, after_pending=False)
            mx.async_eval(*self._chosen)
        self.pending, self.finite = self._chosen
        self._logits = self._chosen = None
        return ahead

    def _choose(self, logits: mx.array, rows: Sequence[Row], *, after_pending: bool) -> Pending:
        """Next tokens and finite flags from `logits` `[batch, vocab]`.

        With `after_pending` one chosen token per row is still unread.
        """
        unread = 1 if after_pending else 0
        positions = [len(row.out) + unread for row in rows]
        logits = self._shape_logits(logits, rows, positions, unread)
        finite = mx.isfinite(mx.sum(logits.astype(mx.float32), axis=-1))
        masks = [row.constraint if not after_pending and row.finish is None else None for row in rows]
        if any(mask is not None for mask, row in zip(masks, rows, strict=True) if not row.forced):
            words = np.full((len(rows), -(-logits.shape[-1] // _BITS)), 0xFFFFFFFF, np.uint32)
            for index, (mask, row) in enumerate(zip(masks, rows, strict=True)):
                if mask is not None and not row.forced:
                    try:
                        mask.fill_mask(words[index])
                    except GrammarFailed as failure:  # only this row ends; its batch mates go on
                        row.broken = failure
            chosen = self._sampler.draw_masked(logits, positions, _allowed(words, logits.shape[-1]))
        else:
            chosen = self._sampler.draw(logits, positions)
        forced = {index: row.forced.pop(0) for index, row in enumerate(rows) if row.forced and not after_pending}
        if forced:
            values = mx.array([forced.get(index, 0) for index in range(len(rows))], chosen.dtype)
            chosen = mx.where(mx.array([index in forced for index in range(len(rows))]), values, chosen)
        return chosen, finite

    def _shape_logits(self, logits: mx.array, rows: Sequence[Row], positions: Sequence[int], unread: int) -> mx.array:
        """Apply scripts, faults and the rule that a thought is closed before the answer ends."""
        for index, row in enumerate(rows):
            if row.script is not None:
                token = row.script.next_token(unread)
                if token is not None:
                    logits = _add_at(logits, index, [token], _SCRIPT_BIAS)
            if row.fault is not None and row.fault.is_due("nan", positions[index]):
                logits = _add_at(logits, index, [0], float("nan"))
        thinking = [row.answer.in_reasoning and row.close_thinking_id is not None for row in rows]
        if any(thinking):
            logits = _close_before_end(logits, rows, thinking)
        return logits


def _allowed(words: np.ndarray, width: int) -> mx.array:
    """Unpack bit words `[batch, words]` into flags `[batch, width]`."""
    bits = (mx.array(words)[..., None] >> mx.arange(_BITS, dtype=mx.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :width].astype(mx.bool_)


def _add_at(logits: mx.array, row: int, tokens: Sequence[int], value: float) -> mx.array:
    return logits.at[row, mx.array(list(tokens))].add(value)


def _close_before_end(logits: mx.array, rows: Sequence[Row], thinking: Sequence[bool]) -> mx.array:
    """Inside a thought give the end token's weight to the closing tag: an answer never ends as an unfinished thought."""
    for index, row in enumerate(rows):
        if thinking[index]:
            ends = mx.array(sorted(row.eos_ids))
            close = row.close_thinking_id
            best = mx.maximum(mx.max(logits[index, ends]), logits[index, close])
            lowest = mx.min(logits[index]) - 1e4
            logits = mx.array(logits)
            logits[index, ends] = lowest
            logits[index, close] = best
    return logits


def useful_and_padded_bytes(rows: Sequence[tuple[int, int]], token_bytes: int) -> tuple[int, int]:
    """Useful and allocated bytes of a batch of rows given as (tokens, state bytes)."""
    useful = sum(tokens * token_bytes + state for tokens, state in rows)
    longest = max(tokens for tokens, _ in rows)
    return useful, sum(longest * token_bytes + state for _, state in rows)
