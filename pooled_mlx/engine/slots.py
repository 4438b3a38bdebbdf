"""What a running row holds and how it is given back: reserved bytes, a lease on its path, its cache, its consumer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.engine.accounts import Accounts
from pooled_mlx.engine.finish import HotCache, NotFinite, data_of, finish_row
from pooled_mlx.engine.pool import Lease, Match, Pool
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.batch import DecodeGroup
from pooled_mlx.runner.segments import Backing

_log = logging.getLogger("pooled.engine")


class Observer(Protocol):
    """What the loop tells about its work; called on the engine thread, must be quick. What it raises is logged."""

    def started(self, row: Row) -> None:
        """The row left the queue."""

    def token(self, row: Row, count: int) -> None:
        """The row reported `count` tokens."""

    def prefilled(self, row: Row, tokens: int, seconds: float) -> None:
        """A piece was read."""

    def ended(self, row: Row, error: ApiError | None) -> None:
        """The row is over."""


class Guarded:
    """Tells an observer everything. What goes wrong there costs nobody an answer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def started(self, row: Row) -> None:
        """The row left the queue."""
        self._tell(self._observer.started, row)

    def token(self, row: Row, count: int) -> None:
        """The row reported `count` tokens."""
        self._tell(self._observer.token, row, count)

    def prefilled(self, row: Row, tokens: int, seconds: float) -> None:
        """A piece was read."""
        self._tell(self._observer.prefilled, row, tokens, seconds)

    def ended(self, row: Row, error: ApiError | None) -> None:
        """The row is over."""
        self._tell(self._observer.ended, row, error)

    @staticmethod
    def _tell(note: Callable[..., None], *facts: Any) -> None:
        try:
            note(*facts)
        except Exception:
            _log.exception("what the engine did could not be noted")


class Slots:
    """The resources of all running rows, and the cache of the one that ended last. Owned by the engine thread.

    `groups` tells which decode groups there are, `token_bytes` is the K/V of one token.
    """

    def __init__(
        self,
        pool: Pool,
        observer: Observer,
        remember: Callable[[Row], None],
        groups: Callable[[], Sequence[DecodeGroup]] = lambda: (),
        token_bytes: int = 0,
    ) -> None:
        self.pool, self._observer, self._remember = pool, observer, remember
        self.accounts = Accounts(pool, groups, token_bytes)
        self._refused: tuple[str, int] | None = None

    @property
    def hot(self) -> HotCache | None:
        """The kept cache of the row that ended last."""
        return self.accounts.hot

    # --- room

    def admit(self, row: Row, *, alone: bool) -> bool:
        """Lease what the pool has of the row's prompt, with the kept cache that holds it.

        False, with nothing changed, when there is no room for the rest; a row that runs `alone` is admitted in any case.
        """
        accounts = self.accounts
        if self._refused == (row.id, accounts.changes) and not alone:
            return False
        match = self.pool.lookup(row.ids)
        row.lease = Lease(self.pool, match.tips)
        row.parent = match.parent or self.pool.root
        if accounts.leads_to_hot(match, accounts.hot):
            row.hot, accounts.hot = accounts.hot, None
        accounts.rows[row] = None
        if not (accounts.has_room() or alone):
            del accounts.rows[row]
            if row.hot is not None:
                row.hot, accounts.hot = None, row.hot
            self._release(row)
            self._refused = (row.id, accounts.changes)
            return False
        accounts.settle()
        return True

    def settle(self) -> None:
        """Count what is there and bring it under the budget. Call it when that changed."""
        self.accounts.settle()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the pool's budget. A kept cache goes before anything that is stored."""
        self.pool.budget_bytes = budget_bytes
        self.accounts.measure()
        if self.pool.used_bytes > budget_bytes:
            self.drop_hot()
        self.pool.set_budget(budget_bytes)
        self.settle()

    # --- caches

    def take_hot(self, row: Row, match: Match) -> HotCache | None:
        """The kept cache, if it holds exactly what `match` found: from now on it is the row's."""
        accounts = self.accounts
        hot, row.hot = row.hot, None
        if hot is not None:
            if accounts.leads_to_hot(match, hot):
                return hot
            hot.dissolve()  # what it held was dropped in the meantime
        if not accounts.leads_to_hot(match, accounts.hot):
            return None
        hot, accounts.hot = accounts.hot, None
        return hot

    def drop_hot(self) -> None:
        """Give the kept cache's segments arrays of their own and free the rest of it."""
        hot, self.accounts.hot = self.accounts.hot, None
        if hot is not None:
            hot.dissolve()
        self.settle()

    def own_copies(self, row: Row) -> None:
        """The row's caches go into a batch: segments that read from them get arrays of their own."""
        if row.backing is not None:
            row.backing.flush()
            row.backing = None

    def own_cache(self, row: Row, caches: list[Any]) -> None:
        """The row is alone again: segments become windows on its caches where those hold the same bits."""
        row.backing = Backing(caches)
        for data in row.parts:
            if data.owned:
                data.lend(row.backing)

    # --- endings

    def finish(self, row: Row, caches: list[Any], error: ApiError | None = None) -> None:
        """Keep what the row computed, then close it, with `error` if it has not ended. Tokens that were said are kept too."""
        try:
            self.accounts.measure()
            hot = finish_row(self.pool, row, caches, self.hot)
            if hot is not None:
                row.backing = None
                self.accounts.keep(hot)
            if row.out and not row.ended:
                self.remember(row)
        except NotFinite:
            _log.warning("request %s: its state is not finite and was not kept", row.id)
        except Exception:
            _log.exception("request %s: its answer could not be kept", row.id)
        self.close(row, error)

    def remember(self, row: Row) -> None:
        """Keep the answer's exact ids. A failure costs a later cache hit, never the answer."""
        try:
            self._remember(row)
        except Exception:
            _log.exception("request %s: the ids of its answer could not be kept", row.id)

    def discard(self, row: Row) -> None:
        """A step failed: drop what this row stored, which cannot be trusted any more.

        What it resumed from was computed by others and is only kept in its caches: that goes if it cannot be read from there.
        """
        self._release(row)
        if row.backing is not None and row.parent is not None:
            lent = [segment for segment in row.parent.path() if segment.held and data_of(segment).reads(row.backing)]
            if row.own is not None:
                self.pool.drop(row.own, "failed")
            try:
                row.backing.flush()
            except Exception:
                _log.exception("request %s: what it resumed from cannot be read any more", row.id)
            for segment in lent:
                if segment.held and (data_of(segment).reads(row.backing) or not data_of(segment).finite(delta=True)):
                    self.pool.drop(segment, "failed")
        row.backing = None

    def drop_source(self, row: Row) -> None:
        """Drop what is not finite of the stored path that the row resumed from, with everything that hangs on it.

        Where all of it is finite, it is only suspected until the row was read anew: the prompt itself may be the cause, and
        others stand on that path as well.
        """
        self._release(row)
        path = row.source.path() if row.source is not None else ()
        bad = next((segment for segment in path if segment.held and not data_of(segment).finite(delta=True)), None)
        if bad is not None:
            self.pool.drop(bad, "not finite")
        else:
            row.suspect = row.source
        self._dissolve(row)

    def drop_suspect(self, row: Row) -> None:
        """The row said something: if it was read anew for that, drop the stored path that led to nothing."""
        suspect, row.suspect = row.suspect, None
        if suspect is not None:
            self.pool.drop(suspect.path()[0], "not finite")

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
        self.accounts.hot = None
        for row in rows:
            row.backing = row.hot = None
            try:
                self.close(row, error)
            except Exception:
                _log.exception("request %s could not be ended", row.id)
        self.pool.clear()
        self.settle()

    def _free(self, row: Row) -> None:
        hot, row.hot = row.hot, None
        row.caches, row.pending, row.parts = None, None, []
        self.accounts.rows.pop(row, None)
        self._release(row)
        self._dissolve(row)
        if hot is not None and self.hot is None:
            self.accounts.hot = hot
        elif hot is not None:
            hot.dissolve()
        if self.hot is not None:
            self.hot.reclaim()
        self.settle()

    @staticmethod
    def _dissolve(row: Row) -> None:
        """Give segments that read from the row's cache arrays of their own and free the rest of it."""
        backing, row.backing = row.backing, None
        if backing is not None:
            try:
                backing.dissolve()
            except Exception:  # out of memory: the segments go on reading from the old cache
                _log.exception("segments could not be given arrays of their own")

    @staticmethod
    def _release(row: Row) -> None:
        if row.lease is not None:
            row.lease.release()
            row.lease = None
