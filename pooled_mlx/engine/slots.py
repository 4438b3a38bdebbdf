"""What a running row holds and how it is given back: reserved bytes, a lease on its path, its cache, its consumer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.engine.finish import finish_row
from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.prefill import HotCache, NotFinite, data_of
from pooled_mlx.engine.rows import Row

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
    """The resources of all running rows. Owned by the engine thread."""

    def __init__(self, pool: Pool, observer: Observer, remember: Callable[[Row], None]) -> None:
        self.pool, self._observer, self._remember = pool, observer, remember
        self.hot: HotCache | None = None
        self._reserved: dict[Row, int] = {}

    def reserve(self, row: Row) -> None:
        """Set aside what the row will need beyond what the pool counts as segments that read from its caches.

        Call again whenever the row's share of those changed. A running row's bytes are real whatever the budget says: the
        pool makes room as far as it can.
        """
        held = row.backing.held_bytes if row.backing is not None else 0
        size = max(0, row.projected_bytes - held)
        self.pool.reserved_bytes += size - self._reserved.get(row, 0)
        self._reserved[row] = size
        self.pool.make_room(0)

    def own_copies(self, row: Row) -> None:
        """The row's caches go into a batch: segments that read from them get arrays of their own."""
        if row.backing is not None:
            row.backing.flush()
            row.backing = None
            self.reserve(row)

    def finish(self, row: Row, caches: list[Any]) -> None:
        """Keep what the row computed, then close it. A cancelled row keeps its finished tokens as well."""
        try:
            if caches:
                hot = finish_row(self.pool, row, caches)
                if hot is not None:
                    self._make_hot(hot)
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

    def _make_hot(self, hot: HotCache) -> None:
        old, self.hot = self.hot, hot
        if old is not None and old.backing is not hot.backing:
            old.backing.flush()

    def drop_hot(self) -> None:
        """Give the hot cache's segments arrays of their own and free the rest of it."""
        if self.hot is not None:
            self.hot.backing.flush()
            self.hot = None

    def discard(self, row: Row) -> None:
        """Drop the segments that read from this row's caches: what they hold cannot be trusted."""
        self._release(row)
        if row.backing is not None and row.parent is not None:
            for segment in row.parent.path():
                if data_of(segment).reads(row.backing):
                    self.pool.drop(segment, "failed")
                    break
        row.backing = None

    def drop_path(self, row: Row, why: str) -> None:
        """Drop the whole stored path that the row resumed from."""
        path = row.parent.path()
        self._release(row)
        if path:
            self.pool.drop(path[0], why)

    def close(self, row: Row, error: ApiError | None) -> None:
        """Free everything the row holds and tell its consumer."""
        self.pool.unreserve(self._reserved.pop(row, 0))
        self._release(row)
        if row.backing is not None and (self.hot is None or self.hot.backing is not row.backing):
            row.backing.flush()
        row.backing = None
        row.caches = row.pending = None
        if row.finish is not None and error is None:
            row.end(self.remember)
        else:
            row.fail(error or engine_failed("The request was cancelled."))
        self._observer.ended(row, error)

    @staticmethod
    def _release(row: Row) -> None:
        if row.lease is not None:
            row.lease.release()
            row.lease = None
