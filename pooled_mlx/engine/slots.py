"""What a running row holds and how it is given back: reserved bytes, a lease on its path, its cache, its consumer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.engine.finish import HotCache, NotFinite, data_of, finish_row
from pooled_mlx.engine.pool import Lease, Match, Pool
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.segments import Backing

_log = logging.getLogger("pooled.engine")


class Observer(Protocol):
    """What the loop tells about its work; called on the engine thread, must be quick and must not raise."""

    def started(self, row: Row) -> None:
        """The row left the queue."""

    def token(self, row: Row, count: int) -> None:
        """The row reported `count` tokens."""

    def prefilled(self, row: Row, tokens: int, seconds: float) -> None:
        """A piece was read."""

    def ended(self, row: Row, error: ApiError | None) -> None:
        """The row is over."""


class Slots:
    """The resources of all running rows, and the cache of the one that ended last. Owned by the engine thread."""

    def __init__(self, pool: Pool, observer: Observer, remember: Callable[[Row], None]) -> None:
        self.pool, self._observer, self._remember = pool, observer, remember
        self.hot: HotCache | None = None
        self._rows: set[Row] = set()

    # --- bytes

    def admit(self, row: Row, *, alone: bool) -> bool:
        """Lease what the pool has of the row's prompt and set bytes aside for the rest.

        False, with nothing changed, when there is no room; a row that runs `alone` is admitted in any case.
        """
        match = self.pool.lookup(row.ids)
        row.lease = Lease(self.pool, match.tips)
        row.parent = match.parent or self.pool.root
        if not self._takes_hot(match) and not self.pool.make_room(self._needed(row)):
            self.drop_hot()
        if not (alone or self.pool.make_room(self._needed(row))):
            self._release(row)
            return False
        self._rows.add(row)
        self.settle()
        return True

    def settle(self) -> None:
        """Set aside what running rows and the hot cache need beyond the pool's segments. Call it when that changed.

        Running rows' bytes are real whatever the budget says: the pool makes room as far as it can, and at last the hot cache
        goes.
        """
        for row in self._rows:
            self._reserve(row, self._needed(row))
        self.pool.spare_bytes = self.hot.spare_bytes if self.hot is not None else 0
        fits = self.pool.make_room(0)
        if self.hot is not None and not (fits and self.hot.usable):
            self.drop_hot()

    def _reserve(self, row: Row, size_bytes: int) -> None:
        self.pool.reserved_bytes += size_bytes - row.reserved_bytes
        row.reserved_bytes = size_bytes

    def make_room_for_batch(self, rows: Sequence[Row]) -> bool:
        """Room for what these rows take more in a batch, where their segments can be no windows on their caches."""
        return self.pool.make_room(sum(self._window_bytes(row) for row in rows if row.backing is not None))

    def _needed(self, row: Row) -> int:
        """A row's projected bytes without those that its segments count already."""
        return max(0, row.projected_bytes - self._window_bytes(row))

    def _window_bytes(self, row: Row) -> int:
        """Bytes of the row's path that are, or will be once it is restored, windows on its own working cache.

        Of a segment that is a window on another row's cache, or on a kept one that this row cannot take, there will be two.
        """
        path = [data_of(segment) for segment in row.parent.path() if segment.held] if row.parent is not None else []
        if row.caches is not None:
            return sum(data.delta_bytes for data in path if row.backing is not None and data.reads(row.backing))
        hot = self.hot.backing if self.hot is not None and self.hot.usable and self.hot.leaf is row.parent else None
        return sum(data.delta_bytes for data in path if data.owned or (hot is not None and data.reads(hot)))

    # --- caches

    def take_hot(self, match: Match) -> Backing | None:
        """The hot cache, if it holds exactly what `match` found: from now on it is the caller's."""
        hot = self.hot
        if hot is None or not self._takes_hot(match):
            return None
        self.hot = None
        return hot.backing

    def _takes_hot(self, match: Match) -> bool:
        return self.hot is not None and self.hot.usable and match.partial is None and match.parent is self.hot.leaf

    def drop_hot(self) -> None:
        """Give the hot cache's segments arrays of their own and free the rest of it."""
        hot, self.hot = self.hot, None
        if hot is not None:
            self._dissolve(hot.backing)
        self.settle()

    def own_copies(self, row: Row) -> None:
        """The row's caches go into a batch: segments that read from them get arrays of their own."""
        if row.backing is not None:
            row.backing.flush()
            row.backing = None

    def _dissolve(self, backing: Backing) -> None:
        try:
            backing.dissolve()
        except Exception:  # out of memory: the segments go on reading from the old cache
            _log.exception("segments could not be given arrays of their own")

    # --- endings

    def finish(self, row: Row, caches: list[Any]) -> None:
        """Keep what the row computed, then close it. A cancelled row keeps its finished tokens as well."""
        try:
            hot = finish_row(self.pool, row, caches)
            if hot is not None:
                old, self.hot = self.hot, hot
                row.backing = None
                if old is not None:
                    self._dissolve(old.backing)
            if row.out and not row.ended:
                self.remember(row)
        except NotFinite:
            _log.warning("request %s: its state is not finite and was not kept", row.id)
        except Exception:
            _log.exception("request %s: its answer could not be kept", row.id)
        self.close(row, None)

    def remember(self, row: Row) -> None:
        """Keep the answer's exact ids. A failure costs a later cache hit, never the answer."""
        try:
            self._remember(row)
        except Exception:
            _log.exception("request %s: the ids of its answer could not be kept", row.id)

    def discard(self, row: Row) -> None:
        """A step failed: drop the segments that read from this row's caches, which cannot be trusted any more."""
        self._release(row)
        if row.backing is not None and row.parent is not None:
            for segment in row.parent.path():
                if data_of(segment).reads(row.backing):
                    self.pool.drop(segment, "failed")
                    break
        row.backing = None

    def drop_source(self, row: Row) -> None:
        """Drop the stored path that the row resumed from, with everything that hangs on it."""
        self._release(row)
        if row.source is not None:
            self.pool.drop(row.source.path()[0], "not finite")

    def drop_own(self, row: Row) -> None:
        """Drop what the row added to the pool."""
        self._release(row)
        if row.own is not None:
            self.pool.drop(row.own, "not finite")

    def close(self, row: Row, error: ApiError | None) -> None:
        """Free everything the row holds and tell its consumer."""
        try:
            self._free(row)
        except Exception:
            _log.exception("request %s: not everything that it held could be freed", row.id)
        try:
            if row.finish is not None and error is None:
                row.end(self.remember)
        except Exception as failure:
            _log.exception("request %s: its answer could not be ended", row.id)
            error = engine_failed(f"The answer could not be ended: {failure}")
        row.fail(error or engine_failed("The request was cancelled."))
        self._observer.ended(row, error)

    def abort(self, rows: Iterable[Row], error: ApiError) -> None:
        """End all these requests and give up everything stored: the engine will not go on."""
        self.hot, self.pool.spare_bytes = None, 0
        for row in rows:
            row.backing = None
            try:
                self.close(row, error)
            except Exception:
                _log.exception("request %s could not be ended", row.id)
        self.pool.clear()

    def _free(self, row: Row) -> None:
        backing, row.backing = row.backing, None
        row.caches, row.pending, row.parts = None, None, []
        self._rows.discard(row)
        self._reserve(row, 0)
        self._release(row)
        if backing is not None:
            self._dissolve(backing)
        self.settle()

    @staticmethod
    def _release(row: Row) -> None:
        if row.lease is not None:
            row.lease.release()
            row.lease = None
