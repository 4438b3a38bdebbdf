"""Reading a prompt: restore what the pool holds, run the canonical pieces, cut a segment at every checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pooled_mlx.engine.cuts import CutRule, Piece, checkpoints, pieces
from pooled_mlx.engine.mlx_backend import LoadedModel, mx
from pooled_mlx.engine.pool import Kind, Match, Pool, Segment
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.segments import Backing, SegmentData, is_divisible, materialise, reserve

_TAIL_TOKENS = 32
"""A longer last piece is read without its last token first: the output layer is then computed for one row, not for all."""


class NotFinite(Exception):
    """The model produced NaN or infinity while a prompt was read."""


@dataclass(slots=True)
class HotCache:
    """The working cache of the row that ended last: whoever extends exactly its tokens takes it over without a copy."""

    leaf: Segment
    backing: Backing


class Prefill:
    """One row on its way to its first token. `logits` `[1, vocab]` is set by the last piece."""

    def __init__(self, model: LoadedModel, pool: Pool, rule: CutRule, row: Row) -> None:
        self._model, self._pool, self._rule = model, pool, rule
        self.row = row
        self._ids = row.ids
        self._pieces: list[Piece] = []
        self.logits: mx.array | None = None
        self.match = Match()
        self.seconds = 0.0

    @property
    def started(self) -> bool:
        """True once the pool was asked."""
        return self.row.caches is not None

    @property
    def remaining(self) -> int:
        """Tokens that are still to be read."""
        return len(self._ids) - self.row.position

    @property
    def ids(self) -> Any:
        """All ids that this prefill reads."""
        return self._ids

    @property
    def checkpoints_ahead(self) -> list[int]:
        """Where this prefill will still cut segments."""
        return [piece.end for piece in self._pieces if piece.checkpoint]

    def restore(self, hot: HotCache | None) -> HotCache | None:
        """Find the longest stored prefix and make it the row's working cache. Returns the hot cache unless it was taken."""
        row = self.row
        caches = self._model.make_cache()
        match = Match()
        if not row.cold:
            match = self._pool.lookup(self._ids)
            if not self._usable(match):
                match = Match()
        row.lease = self._pool.lease(match, row.prepared.request.client)
        row.parent = match.parent or self._pool.root
        row.lower, row.position = row.parent.end, match.tokens
        if hot is not None and match.path and match.partial is None and match.path[-1] is hot.leaf:
            caches, row.backing, hot = hot.backing.caches, hot.backing, None
        else:
            row.backing = Backing(caches)
            path = [data_of(segment) for segment in match.path]
            partial = (data_of(match.partial[0]), match.partial[1]) if match.partial is not None else None
            materialise(caches, path, partial, reserve_tokens=len(self._ids) - match.tokens)
            for data in path:
                data.lend(row.backing)
        row.caches = caches
        if not row.out:
            row.cached_tokens = match.tokens
        marks = checkpoints(row.prompt.boundaries, len(row.prompt.ids), self._rule)
        self._pieces = _with_short_tail(pieces(match.tokens, marks, len(self._ids), self._rule))
        self.match = match
        return hot

    def _usable(self, match: Match) -> bool:
        """False when a state that would be restored is not finite; it is dropped from the pool with all behind it."""
        if match.parent is None or match.partial is not None or data_of(match.parent).finite(delta=False):
            return True
        self._pool.drop(match.parent, "not finite")
        return False

    def piece(self) -> bool:
        """Read the next piece; True when the prompt is complete. Raises `NotFinite`."""
        row = self.row
        assert row.caches is not None
        began = time.perf_counter()
        piece = self._pieces.pop(0)
        chunk = mx.array(self._ids[piece.start : piece.end])[None]
        output = self._model.forward(chunk, row.caches)
        states = [cache.state for cache in row.caches]
        if self._pieces:
            mx.eval(states)
        else:
            self.logits = output[:, -1]
            mx.eval(self.logits, states)
        row.position = piece.end
        row.prefilled_tokens += piece.end - piece.start
        if piece.start == 0 or row.position - (piece.end - piece.start) == row.cached_tokens:
            reserve(row.caches, len(self._ids))
        if piece.checkpoint:
            store_segment(self._pool, row, self._ids, "prompt", piece.end)
        self.seconds = time.perf_counter() - began
        return not self._pieces


def data_of(segment: Segment) -> SegmentData:
    """The arrays of a pool segment: this engine stores no other payload."""
    data = segment.data
    assert isinstance(data, SegmentData)
    return data


def store_segment(pool: Pool, row: Row, ids: Any, kind: Kind, end: int) -> None:
    """Insert the segment `row.lower..end` of the row's working cache and make it the row's new parent.

    Raises `NotFinite` and stores nothing when a state or the delta is not finite.
    """
    if end <= row.lower:
        return
    assert row.backing is not None
    data = SegmentData(row.backing, row.lower, end)
    if not data.finite(delta=True):
        data.release()
        raise NotFinite(f"the state after token {end} is not finite")
    segment = pool.insert(
        row.parent,
        ids[row.lower : end],
        data,
        kind="side" if row.is_side else kind,
        boundary=row.boundary_at(end),
        label=row.prepared.request.client,
        lease=row.lease,
    )
    if segment is None:
        return
    data_of(segment).lend(row.backing)
    row.parent, row.lower = segment, end


def _with_short_tail(plan: Sequence[Piece]) -> list[Piece]:
    result = list(plan)
    last = result[-1]
    if last.end - last.start > _TAIL_TOKENS:
        result[-1:] = [Piece(last.start, last.end - 1, False), Piece(last.end - 1, last.end, last.checkpoint)]
    return result


def divisible(model: LoadedModel) -> bool:
    """True when this model's prefixes may end at any token."""
    return is_divisible(model.make_cache())
