"""A decode group: rows that take their steps together in one batch.

A group of one row runs on mlx-lm's plain cache classes, a larger one on their batch forms; the step is the same code. One
forward pass is queued ahead of the token that is being read, but for an answer's first token. Rows that must be asked before
the next token can be chosen (grammar, the end of a thinking budget) make the group read first and sample then; the forward pass
itself is already running by that time, so the group loses no overlap but that of the sampling kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

import numpy as np

from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import ArraysCache, LoadedModel, RotatingKVCache, mx
from pooled_mlx.runner.sampler import BatchSampler, usable_rows
from pooled_mlx.runner.segments import Evaluation, arrays_in, layers_of

Pending = tuple[mx.array, mx.array]
"""The chosen, unread tokens `[batch]` of some rows and whether the logits behind them were finite `[batch]`."""

_SCRIPT_BIAS = 1e4
_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)
_MOST_WRITTEN = 4096
"""Tokens that are shut out one by one; for more, every token gets a flag."""


def batchable(caches: Sequence[Any]) -> bool:
    """True when every layer has a batch form that holds the same. mlx-lm's batch of rotating windows keeps no first tokens,
    and no batch can be made of a layer without arrays."""
    for layer in layers_of(caches):
        if not hasattr(layer, "merge") or (type(layer) is RotatingKVCache and layer.keep):
            return False
        if isinstance(layer, ArraysCache) and any(array is None for array in layer.cache):
            return False
        if getattr(layer, "keys", layer) is None:  # a layer that the model has and never uses
            return False
    return True


class DecodeGroup:
    """Rows, their shared caches and their pending tokens. Owned by the engine thread.

    `pending` `[batch]` is the lazy next token of each row: chosen, not yet read, not yet in the caches. `finite` `[batch]`
    says whether the logits that chose it were finite.
    """

    def __init__(
        self,
        model: LoadedModel,
        row: Row,
        caches: list[Any],
        start: mx.array | Pending,
        longest_run: int,
        known_tokens: int | None = None,
    ) -> None:
        """A group of one. `start` is the logits `[1, vocab]` after the last token, or the token it was parked with.

        `longest_run` is the number of forced tokens that are read in one forward pass. Ids from `known_tokens` on only pad
        the vocabulary: they stand for no text and are never chosen.
        """
        self._model, self._longest_run, self._known_tokens = model, max(1, longest_run), known_tokens
        self.rows = [row]
        self.caches = caches
        self._sampler = BatchSampler([row.sampling])
        self._logits: mx.array | None = None
        self._chosen: Pending | None = None
        self._ran_ahead = False
        self.pending, self.finite = start if isinstance(start, tuple) else self._choose(start, [row], after_pending=False)
        mx.async_eval(self.pending, self.finite)

    # --- joining and leaving

    def join(self, other: DecodeGroup) -> None:
        """Take the rows of `other` in. The caches of both are copied into one batch; `other` must not be used again."""
        mine, theirs = self.caches, other.caches
        self.caches, other.caches = [], []
        evaluation = Evaluation()
        for index in range(len(mine)):  # so that little is in memory twice
            joined = mine[index].merge([mine[index]]) if len(self.rows) == 1 else mine[index]
            joined.extend(theirs[index].merge([theirs[index]]) if len(other.rows) == 1 else theirs[index])
            mine[index], theirs[index] = None, None
            evaluation.add(arrays_in(joined))
            self.caches.append(joined)
        evaluation.finish()
        self.rows = [*self.rows, *other.rows]
        self.pending = mx.concatenate([self.pending, other.pending])
        self.finite = mx.concatenate([self.finite, other.finite])
        self._sampler = BatchSampler([row.sampling for row in self.rows])
        mx.eval(self.pending, self.finite)

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
            mx.eval(arrays_in(self.caches))
        chosen = mx.array(keep)
        self.pending, self.finite = self.pending[chosen], self.finite[chosen]
        self.rows = [self.rows[index] for index in keep]
        self._sampler = BatchSampler([row.sampling for row in self.rows])
        return caches

    def _extract(self, index: int) -> list[Any]:
        caches = [cache.extract(index) for cache in self.caches]
        for layer in layers_of(caches):
            if isinstance(layer, ArraysCache):  # extract gives slices, which would keep the whole batch alive
                layer.cache = [None if array is None else mx.contiguous(array) for array in layer.cache]
        mx.eval(arrays_in(caches))
        return caches

    # --- the step

    def step(self, take: Callable[[Sequence[tuple[Row, int | None]]], None]) -> None:
        """Run one forward pass and give `take` each row's token, None where its logits were not finite.

        `take` passes every token to `Row.take`; after it the caller calls `settle` and removes finished rows. For a group
        that needs no synchronisation the token after next is already being sampled when this returns.
        """
        # A first token does not wait until the pass after it is queued: where queues are short, that takes as long as the pass.
        taken = not all(row.out for row in self.rows)
        if taken:
            take(self._tokens())
        self._logits = self._model.forward(self.pending[:, None], self.caches)[:, -1]
        for row in self.rows:
            row.position += 1
        self._chosen = None
        self._ran_ahead = False
        if taken or any(row.needs_sync or row.forced for row in self.rows):
            mx.async_eval(self._logits)
        else:
            self._chosen = self._choose(self._logits, self.rows, after_pending=True)
            mx.async_eval(*self._chosen)
        if not taken:
            take(self._tokens())

    def _tokens(self) -> list[tuple[Row, int | None]]:
        tokens: Any = self.pending.tolist()
        finite: Any = self.finite.tolist()
        return [(row, int(tokens[i]) if finite[i] else None) for i, row in enumerate(self.rows)]

    def settle(self) -> list[tuple[Row, int]]:
        """Choose the next pending tokens, after every row took its last one. Call before rows are removed.

        Returns tokens that were taken ahead for a row alone in its group: a forced run is read in one forward pass.
        """
        if self._chosen is None:
            run = self._forced_run()
            if run:
                row = self.rows[0]
                self._logits = self._model.last_logits(mx.array([run]), self.caches)
                self._ran_ahead = True
                row.position += len(run)
                return [(row, token) for token in run]
            assert self._logits is not None, "settle follows step"
            self._chosen = self._choose(self._logits, self.rows, after_pending=False)
            mx.async_eval(*self._chosen)
        self.pending, self.finite = self._chosen
        self._logits = self._chosen = None
        return []

    def _forced_run(self) -> list[int]:
        """What a row alone in its group must say next, taken out of `Row.forced`: one run a step, as long as a piece."""
        row = self.rows[0]
        if len(self.rows) > 1 or self._ran_ahead or row.finish is not None or row.broken is not None or len(row.forced) < 2:
            return []
        length = min(self._longest_run, row.max_tokens - len(row.out))
        run, row.forced = row.forced[:length], row.forced[length:]
        return run

    def _choose(self, logits: mx.array, rows: Sequence[Row], *, after_pending: bool) -> Pending:
        """Next tokens and finite flags from `logits` `[batch, vocab]`.

        With `after_pending` one chosen token per row is still unread.
        """
        positions = [len(row.out) + after_pending for row in rows]
        vocab = logits.shape[-1]
        logits = logits[:, : self._known_tokens]
        logits = self._shape_logits(logits, rows, positions, after_pending=after_pending)
        finite = usable_rows(logits)
        forced = {index: row.forced.pop(0) for index, row in enumerate(rows) if row.forced and not after_pending}
        words = self._masks(vocab, rows, forced) if not after_pending else None
        if words is not None:
            chosen = self._sampler.draw_masked(logits, positions, _masked(logits, words))
        else:
            chosen = self._sampler.draw(logits, positions)
        if forced:
            values = mx.array([forced.get(index, 0) for index in range(len(rows))], chosen.dtype)
            chosen = mx.where(mx.array([index in forced for index in range(len(rows))]), values, chosen)
        return chosen, finite

    def _masks(self, width: int, rows: Sequence[Row], forced: Container[int]) -> np.ndarray | None:
        """Bit words `[batch, words]` of what each row may say next; None where nobody is restricted."""
        words: np.ndarray | None = None
        for index, row in enumerate(rows):
            if row.constraint is None or index in forced or row.finish is not None or row.broken is not None:
                continue
            if words is None:
                words = np.full((len(rows), -(-width // _BITS)), 0xFFFFFFFF, np.uint32)
            try:
                row.constraint.fill_mask(words[index])
            except Exception as failure:  # only this row ends; its batch mates go on
                row.broken = failure
                words[index] = 0xFFFFFFFF
        return words

    def _shape_logits(
        self, logits: mx.array, rows: Sequence[Row], positions: Sequence[int], *, after_pending: bool
    ) -> mx.array:
        """Apply scripts, faults and the rule that a thought is closed before the answer ends."""
        for index, row in enumerate(rows):
            try:
                token = row.script.next_token(int(after_pending)) if row.script is not None else None
            except Exception as failure:
                row.broken = failure
                continue
            if token is not None:
                logits = _add_at(logits, index, [token], _SCRIPT_BIAS)
            if row.fault is not None and row.fault.is_due("nan", positions[index]):
                logits = _add_at(logits, index, [0], float("nan"))
        for index, row in enumerate(rows):
            if row.answer.in_reasoning and row.close_thinking_id is not None and row.eos_ids:
                pending = self.pending[index] if after_pending else None
                logits = _close_before_end(logits, index, row.close_thinking_id, row.eos_ids, pending)
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


def _add_at(logits: mx.array, row: int, tokens: Sequence[int], value: float) -> mx.array:
    return logits.at[row, mx.array(list(tokens))].add(value)


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


def useful_and_padded_bytes(rows: Sequence[tuple[int, int]], token_bytes: int) -> tuple[int, int]:
    """Useful and allocated bytes of a batch of rows given as (tokens, state bytes)."""
    useful = sum(tokens * token_bytes + state for tokens, state in rows)
    longest = max(tokens for tokens, _ in rows)
    return useful, sum(longest * token_bytes + state for _, state in rows)


def padding_bytes(group: DecodeGroup, other: DecodeGroup, token_bytes: int, state_bytes: int, limit: float) -> int | None:
    """What padding takes when these share a batch; None when they cannot, or when useful bytes x `limit` would be exceeded.

    A row that is read again after a failed step goes on alone: it may have been its fault, and another one ends it.
    """
    rows = [*group.rows, *other.rows]
    if any(row.retried for row in rows) or not batchable(group.caches) or not batchable(other.caches):
        return None
    sizes = [(row.position, state_bytes) for row in rows]
    useful, padded = useful_and_padded_bytes(sizes, token_bytes)
    return padded - useful if padded <= limit * useful else None
