"""Reading a prompt: restore what the pool holds, run the canonical pieces, cut a segment at every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pooled_mlx.core.cuts import CutRule, Piece, checkpoints, pieces
from pooled_mlx.engine.finish import HotCache, data_of, store_segment
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.segments import Backing, arrays_in, materialise, reserve

_TAIL_TOKENS = 32
"""Where the output layer cannot be computed apart, a longer last piece is read without its last token first."""


class Prefill:
    """One row on its way to its first token. `logits` `[1, vocab]` is set by the last piece."""

    def __init__(self, model: LoadedModel, pool: Pool, rule: CutRule, row: Row) -> None:
        self._model, self._pool, self._rule = model, pool, rule
        self.row = row
        self._ids = row.ids
        self._pieces: list[Piece] = []
        self._fork: int | None = None
        self.logits: mx.array | None = None
        self.match = Match()

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
        return [piece.end for piece in self._pieces if self._is_kept(piece)]

    def restore(self, take_hot: Callable[[Match], HotCache | None] = lambda match: None) -> None:
        """Find the longest stored prefix and make it the row's working cache.

        `take_hot` gives the kept cache that holds exactly a match, if there is one.
        """
        row = self.row
        match = Match() if row.cold else self._lookup()
        before, row.lease = row.lease, self._pool.lease(match, row.prepared.request.client)
        if before is not None:
            before.release()
        row.parent = match.parent or self._pool.root
        row.source = match.partial[0] if match.partial is not None else match.parent
        row.lower, row.position, row.at_cut = row.parent.end, match.tokens, False
        path = [data_of(segment) for segment in match.path]
        hot = take_hot(match)
        if hot is not None:
            hot.reclaim()
            row.backing = hot.backing
            path = [data for data in path if data in hot.parts]
        else:
            row.backing = Backing(self._model.make_cache())
            partial = (data_of(match.partial[0]), match.partial[1]) if match.partial is not None else None
            materialise(row.backing.caches, path, partial, reserve_tokens=len(self._ids) + row.spare_tokens - match.tokens)
            for data in path:
                data.lend(row.backing)
        row.parts = path
        if not row.out:
            row.cached_tokens = match.tokens
        marks = checkpoints(row.prompt.boundaries, len(row.prompt.ids), self._rule)
        plan = pieces(match.tokens, marks, len(self._ids), self._rule)
        row.parted_at = match.parted_at(len(self._ids))
        self._fork = self._pool.learn_fork(match, plan, len(self._ids), row.opening_tokens)
        self._pieces = list(plan) if self._model.parts is not None else _with_short_tail(plan)
        self.match = match
        row.caches = row.backing.caches

    def _is_kept(self, piece: Piece) -> bool:
        """True when a segment is cut at the end of `piece`."""
        return piece.checkpoint or piece.end == self._fork

    def _lookup(self) -> Match:
        """The longest prefix whose state is finite; any other is dropped from the pool with all behind it."""
        while True:
            match = self._pool.lookup(self._ids)
            if match.parent is None or match.partial is not None or data_of(match.parent).finite(delta=False):
                return match
            self._pool.drop(match.parent, "not finite")

    def piece(self) -> bool:
        """Read the next piece; True when the prompt is complete. Raises `NotFinite`."""
        row = self.row
        assert row.caches is not None
        first = row.position == self.match.tokens
        piece = self._pieces.pop(0)
        if first:  # a cache that goes on grows at once, before the model would make it grow by itself
            reserve(row.caches, len(self._ids), row.spare_tokens)
        chunk = mx.array(self._ids[piece.start : piece.end])[None]
        if self._pieces:
            self._model.forward(chunk, row.caches)
            mx.eval(arrays_in(row.caches))
        else:
            self.logits = self._model.last_logits(chunk, row.caches)
            mx.eval(self.logits, arrays_in(row.caches))
        row.position = piece.end
        row.at_cut = piece.checkpoint or len(piece) == self._rule.step
        if not row.out:
            row.prefilled_tokens += len(piece)
        if first:
            reserve(row.caches, len(self._ids), row.spare_tokens)
        if self._is_kept(piece):
            store_segment(self._pool, row, self._ids, "prompt", piece.end, fork=piece.end == self._fork)
        return not self._pieces


def _with_short_tail(plan: Sequence[Piece]) -> list[Piece]:
    """`plan`, a long last piece cut before its last token. A longer prompt is not cut there: its end is then no checkpoint."""
    last = plan[-1]
    if len(last) <= _TAIL_TOKENS:
        return list(plan)
    return [*plan[:-1], Piece(last.start, last.end - 1, False), Piece(last.end - 1, last.end, False)]
