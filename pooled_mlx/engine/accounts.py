"""Bytes of running rows beside the pool's segments: what is really there, and what there will be at most.

Who may start is decided by projections; what must go is decided by what is really in memory, so that a large `max_tokens` that
is never used evicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pooled_mlx.engine.finish import HotCache, data_of
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.batch import DecodeGroup
from pooled_mlx.runner.segments import SegmentData, bytes_of

_SPARE_PART, _MOST_SPARE = 8, 2048
"""A cache that must grow gets room for an eighth more, in tokens: growing copies it, and a turn adds a few hundred."""


class Accounts:
    """Keeps `Pool.reserved_bytes` and `Pool.spare_bytes` true. Owned by the engine thread.

    `hot` is the cache of the row that ended last, for whoever goes on from it; a row that was admitted to do so holds it
    itself (`Row.hot`). `changes` counts whatever may let a waiting row in. `token_bytes` is the K/V of one token.
    """

    def __init__(self, pool: Pool, groups: Callable[[], Sequence[DecodeGroup]], token_bytes: int) -> None:
        self.pool, self._groups, self._token_bytes = pool, groups, token_bytes
        self.rows: dict[Row, None] = {}
        self.hot: HotCache | None = None
        self.changes = 0

    # --- projections

    def has_room(self) -> bool:
        """True when all running rows can grow to their ends, whatever else may be evicted for them."""
        self.measure()
        taken: set[SegmentData] = set()
        growth = sum(max(0, self._most_bytes(row) - self.window_bytes(row, taken)) for row in self.rows)
        leased = self.pool.segment_bytes - self.pool.evictable_bytes()
        return leased + max(growth, self.pool.reserved_bytes) <= self.pool.budget_bytes

    def _most_bytes(self, row: Row) -> int:
        """What the row takes at its longest, the room included that an answer cannot fill."""
        return row.projected_bytes + self._token_bytes * max(0, row.spare_tokens - row.max_tokens)

    def window_bytes(self, row: Row, taken: set[SegmentData] | None = None) -> int:
        """Bytes of the row's path that are, or will be once it is restored, windows on its own working cache.

        Of a segment that is a window on another cache, or that a row before this one will `take`, there will be two.
        """
        path = [data_of(segment) for segment in row.parent.path() if segment.held] if row.parent is not None else []
        if row.caches is not None:
            return sum(data.delta_bytes for data in path if row.backing is not None and data.reads(row.backing))
        taken = set() if taken is None else taken
        hot = row.hot.backing if row.hot is not None else None
        free = [data for data in path if data not in taken and (data.owned or (hot is not None and data.reads(hot)))]
        taken.update(path)
        return sum(data.delta_bytes for data in free)

    # --- what is there

    def measure(self) -> None:
        """Set the pool's counts of what running rows and the hot cache hold beyond its segments."""
        total = sum(bytes_of(group.caches) for group in self._groups())
        for row in self.rows:
            backing = row.backing or (row.hot.backing if row.hot is not None else None)
            if row.caches:
                total += bytes_of(row.caches)
            elif row.caches is None and backing is not None:
                total += bytes_of(backing.caches)
            if backing is not None:
                total -= backing.held_bytes
        self.pool.reserved_bytes = max(0, total)
        self.pool.spare_bytes = self.hot.spare_bytes if self.hot is not None else 0

    def settle(self) -> None:
        """Measure, and bring what is there under the budget. Call it when rows, groups or segments changed.

        A kept cache that is a second copy of segments goes first, then what the pool values least, at last any kept cache.
        What is evicted while a cache has it too frees nothing, so it is measured again.
        """
        self.changes += 1
        for _ in range(4):
            self.measure()
            if self.hot is not None and not self.hot.usable:
                self._forget_hot()
                continue
            if self.pool.used_bytes <= self.pool.budget_bytes:
                return
            if self.hot is not None and self.hot.is_double:
                self._forget_hot()
            elif not self.pool.make_room(0):
                break
        self._forget_hot()
        self.measure()

    def make_way(self, row: Row) -> None:
        """Evict for the prompt of a row that is about to be restored: its cache gets room for all of it at once.

        Says as well how many tokens more than the prompt that room may be for. Nothing is evicted for those.
        """
        self.measure()
        if self.hot is not None and self.pool.used_bytes + self._prompt_bytes(row) > self.pool.budget_bytes:
            path = row.parent.path() if row.parent is not None else ()
            if self.hot.is_double or any(data_of(segment).reads(self.hot.backing) for segment in path if segment.held):
                self._forget_hot()  # it is a second copy, or becomes one as soon as this row has the path
                self.measure()
        if not self.pool.make_room(self._prompt_bytes(row)) and self.hot is not None:
            self._forget_hot()
            self.measure()
            self.pool.make_room(self._prompt_bytes(row))
        free = self.pool.budget_bytes - self.pool.used_bytes - self._prompt_bytes(row)
        wanted = min(len(row.ids) // _SPARE_PART, _MOST_SPARE)
        row.spare_tokens = wanted if wanted * self._token_bytes <= free else 0

    def _prompt_bytes(self, row: Row) -> int:
        """What the row needs before its answer begins."""
        return max(0, row.projected_bytes - self.window_bytes(row) - self._token_bytes * row.max_tokens)

    def make_room_for_batch(self, rows: Sequence[Row], padding_bytes: int) -> bool:
        """Room for what these rows take more in a batch: padding, and segments that are no longer windows on their caches."""
        more = padding_bytes + sum(self.window_bytes(row) for row in rows if row.backing is not None)
        if more <= 0:
            return True
        self.measure()
        if self.pool.used_bytes + more > self.pool.budget_bytes and self.hot is not None:
            self._forget_hot()
            self.measure()
        if not self.pool.make_room(more):
            return False
        self.measure()
        return self.pool.used_bytes + more <= self.pool.budget_bytes

    # --- the kept cache

    def leads_to_hot(self, match: Match, hot: HotCache | None) -> bool:
        """True when `hot` holds exactly what `match` found."""
        return hot is not None and hot.usable and match.partial is None and match.parent is hot.leaf

    def keep(self, hot: HotCache) -> None:
        """Keep this cache instead of the one kept so far."""
        self._forget_hot()
        self.hot = hot

    def _forget_hot(self) -> None:
        hot, self.hot = self.hot, None
        if hot is not None:
            hot.dissolve()
