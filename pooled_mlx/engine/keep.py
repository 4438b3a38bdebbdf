"""What a row takes from the pool and gives to it: admission, restoring, the pieces of its prompt, segments, its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pooled_mlx.core.cuts import Piece, checkpoints, pieces
from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.core.runner import Runner
from pooled_mlx.engine.ledger import Ledger, stored_of
from pooled_mlx.engine.pool import Kind, Lease, Match, Pool, Segment
from pooled_mlx.engine.row import Hold, Row, Stage

_log = logging.getLogger("pooled.engine")

_TAIL_TOKENS = 32
"""Where the output layer cannot be computed apart, a longer last piece is read without its last token first."""


class NotFinite(Exception):
    """The model produced NaN or infinity."""


class Keeper:
    """Every row's way through pool and ledger. Owned by the engine thread.

    `remember` keeps the ids of an answer, `closed` is told that a row is over.
    """

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        runner: Runner,
        remember: Callable[[Row], None],
        closed: Callable[[Row, ApiError | None], None],
    ) -> None:
        self.pool, self.ledger, self._runner = pool, ledger, runner
        self._remember, self._closed = remember, closed
        self._refused: tuple[str, int] | None = None

    # --- the prompt

    def admit(self, row: Row, now: float, *, alone: bool) -> bool:
        """Lease what the pool has of the row's prompt, and claim the buffer that ends there.

        False, with nothing changed, when there is no room for the rest; a row that runs `alone` is admitted in any case.
        """
        ledger = self.ledger
        if self._refused == (row.id, ledger.changes) and not alone:
            return False
        match = self.pool.lookup(row.ids)
        row.hold = Hold(Lease(self.pool, match.tips), match.parent or self.pool.root, claim=ledger.claim(match))
        ledger.rows[row] = None
        if not (ledger.fits() or alone):
            self._let_go(row)
            self._refused = (row.id, ledger.changes)
            return False
        row.to(Stage.READING, now)
        ledger.settle()
        return True

    def read_again(self, row: Row, now: float) -> None:
        """The row's cache is lost: prompt and answer are to be read once more."""
        before = row.hold
        self._let_go(row)
        row.to(Stage.READING, now)
        row.hold = Hold(None, self.pool.root, suspect=before.suspect if before is not None else None)
        self.ledger.rows[row] = None

    def restore(self, row: Row) -> Match:
        """Find the longest stored prefix and make it the row's cache."""
        hold, rule = _held(row), self.pool.rule
        moves = self.ledger.evict_for(row)
        match = Match() if row.cold else self._lookup(row)
        before, hold.lease = hold.lease, self.pool.lease(match, row.prepared.request.client)
        if before is not None:
            before.release()
        hold.parent = match.parent or self.pool.root
        row.position, hold.at_cut = match.tokens, False
        claim, hold.claim = hold.claim, None
        ids = row.ids
        room = len(ids) + hold.spare_tokens
        row.cache, hold.copies = self.ledger.open(match, claim, room, moves=moves)
        if not row.out:
            row.cached_tokens = match.tokens
        marks = checkpoints(row.prompt.boundaries, len(row.prompt.ids), rule)
        plan = pieces(match.tokens, marks, len(ids), rule)
        hold.parted_at = match.parted_at(len(ids))
        hold.fork = self.pool.learn_fork(match, plan, len(ids), row.opening_tokens)
        hold.pieces = _with_short_tail(plan) if self._runner.facts.short_tail else list(plan)
        hold.match = match
        return match

    def _lookup(self, row: Row) -> Match:
        """The longest prefix whose state is finite; any other is dropped from the pool with all behind it."""
        while True:
            match = self.pool.lookup(row.ids)
            if match.parent is None or match.partial is not None or self._runner.finite([], stored_of(match.parent).state):
                return match
            self.pool.drop(match.parent, "not finite")

    def read(self, row: Row) -> bool:
        """Read the next piece; True when the prompt is complete. Raises `NotFinite`."""
        hold, ids = _held(row), row.ids
        assert row.cache is not None
        assert hold.match is not None
        first = row.position == hold.match.tokens
        piece = hold.pieces.pop(0)
        if first:  # a cache that goes on grows at once, before the model would make it grow by itself
            self.ledger.grow(row.cache, len(ids), hold.spare_tokens)
        self._runner.read(row.cache, ids[piece.start : piece.end], last=not hold.pieces)
        row.position = piece.end
        hold.at_cut = piece.checkpoint or len(piece) == self.pool.rule.step_at(piece.start)
        if not row.out:
            row.prefilled_tokens += len(piece)
        if first:  # one that was empty has arrays now
            self.ledger.grow(row.cache, len(ids), hold.spare_tokens)
        self.ledger.measure(row.cache)
        if piece.checkpoint or piece.end == hold.fork:
            self._store(row, "prompt", piece.end, fork=piece.end == hold.fork)
        return not hold.pieces

    def _store(self, row: Row, kind: Kind, end: int, *, fork: bool = False) -> None:
        """Put the row's tokens from its last segment to `end` into the pool. Raises `NotFinite` and stores nothing then."""
        hold = _held(row)
        if end <= hold.parent.end:
            return
        assert row.cache is not None
        stored = self.ledger.mark(row.cache, hold.parent.end, end)
        if stored is None:
            raise NotFinite(f"the state after token {end} is not finite")
        try:
            segment = self.pool.insert(
                hold.parent,
                row.ids[hold.parent.end : end],
                stored,
                kind="side" if row.is_side else kind,
                boundary=row.boundary_at(end, fork=fork),
                label=row.prepared.request.client,
                lease=hold.lease,
            )
        except Exception:
            stored.release()
            raise
        if segment is None:
            return
        if segment.data is stored:
            # Otherwise the pool had these tokens; they may have been computed another way, in one piece or token by token.
            hold.copies.append(stored)
            hold.own = hold.own or segment
        hold.parent = segment

    # --- the end

    def finish(self, row: Row, error: ApiError | None = None) -> None:
        """Keep what the row computed, then close it, with `error` if it has not ended. Tokens that were said are kept too."""
        try:
            if row.cache is not None and row.hold is not None:
                self._keep(row, row.cache, row.hold)
            if row.out and not row.ended:
                self.remember(row)
        except NotFinite:
            _log.warning("request %s: its state is not finite and was not kept", row.id)
        except Exception:
            _log.exception("request %s: its answer could not be kept", row.id)
        self.close(row, error)

    def _keep(self, row: Row, cache: int, hold: Hold) -> None:
        """Store the tokens since the last checkpoint, and leave the cache to whoever goes on from its end.

        A row that was cancelled while its prompt was read keeps the pieces read so far if a cold prompt would stop at the same
        place; a side request that was cancelled keeps only what it has in common with others, if it has that.
        """
        decoded = hold.match is not None and not hold.pieces and row.stage is not Stage.READING
        if decoded and (unread := row.unread):
            self._runner.read(cache, np.asarray(unread, np.uint32), last=False)
            row.position += len(unread)
        complete = bool(row.out) if decoded else hold.at_cut
        if row.is_side and row.cancelled and hold.parted_at is not None and hold.parted_at >= self.pool.rule.minimum:
            self._forget_own_tail(hold, hold.parted_at)
        elif complete:
            self._store(row, "answer" if row.out else "prompt", row.position)
        parent = hold.parent
        if parent.parent is None or parent.end != row.position or not parent.held or not parent.has_state:
            return
        if stored_of(parent).span.buffer == cache or stored_of(parent) in hold.copies:
            self.ledger.adopt(hold.copies, cache)
            if not row.is_side:  # a title or a summary is not what goes on
                self.ledger.close(cache, row.position, hold.copies)

    def _forget_own_tail(self, hold: Hold, parted_at: int) -> None:
        """Drop what the row stored behind the token at which it parted from others: a side request that was given up comes back
        with another end, if at all, and dozens of them would each leave a state.
        """
        hold.release()
        while hold.parent.end > parted_at and any(hold.parent.data is stored for stored in hold.copies):
            tail, above = hold.parent, hold.parent.parent
            if not tail.is_leaf or tail.leases or not tail.held or above is None:
                return
            self.pool.drop(tail, "abandoned")
            hold.parent = above

    def remember(self, row: Row) -> None:
        """Keep the answer's exact ids. A failure costs a later cache hit, never the answer."""
        try:
            self._remember(row)
        except Exception:
            _log.exception("request %s: the ids of its answer could not be kept", row.id)

    def close(self, row: Row, error: ApiError | None) -> None:
        """Free everything the row holds and tell its consumer."""
        try:
            self._let_go(row)
            self.ledger.settle()
        except Exception:
            _log.exception("request %s: not everything that it held could be freed", row.id)
        try:
            if row.finish is not None and error is None:
                row.end(self.remember)
        except Exception as failure:
            _log.exception("request %s: its answer could not be ended", row.id)
            error = engine_failed(f"The answer could not be ended: {failure}")
        row.fail(error or engine_failed("The request was cancelled."))
        self._closed(row, error)

    def abort(self, rows: Iterable[Row], error: ApiError) -> None:
        """End all these requests and give up everything stored: the engine will not go on."""
        for row in rows:
            try:
                self.close(row, error)
            except Exception:
                _log.exception("request %s could not be ended", row.id)
        self.pool.clear()
        self.ledger.clear()

    def _let_go(self, row: Row) -> None:
        hold, row.hold = row.hold, None
        cache, row.cache = row.cache, None
        self.ledger.rows.pop(row, None)
        if hold is not None:
            self.ledger.unclaim(hold.claim)
            hold.release()
        if cache is not None:
            self.ledger.close(cache)

    # --- what cannot be trusted

    def discard(self, row: Row) -> None:
        """A step failed: drop what this row stored, which cannot be trusted any more.

        What it resumed from was computed by others and lies in its cache alone: that goes if it cannot be read from there.
        """
        hold = row.hold
        if hold is None:
            return
        hold.release()
        lent = [segment for segment in hold.parent.path() if segment.held and stored_of(segment).span.buffer == row.cache]
        if hold.own is not None:
            self.pool.drop(hold.own, "failed")
        if row.cache is not None:
            self.ledger.close(row.cache)
        for segment in lent:
            if segment.held and not self._readable(segment):
                self.pool.drop(segment, "failed")
        row.cache = None

    def drop_source(self, row: Row) -> None:
        """Drop what is not finite of the stored path that the row resumed from, with everything that hangs on it.

        Where all of it is finite, it is only suspected until the row was read anew: the prompt itself may be the cause, and
        others stand on that path as well.
        """
        hold = _held(row)
        hold.release()
        path = hold.source.path() if hold.source is not None else ()
        bad = next((segment for segment in path if segment.held and not self._readable(segment)), None)
        if bad is not None:
            self.pool.drop(bad, "not finite")
        else:
            hold.suspect = hold.source

    def _readable(self, segment: Segment) -> bool:
        stored = stored_of(segment)
        try:
            return self._runner.finite([stored.span], stored.state)
        except Exception:
            _log.exception("a stored segment cannot be read any more")
            return False

    def drop_suspect(self, row: Row) -> None:
        """The row said something: if it was read anew for that, drop the stored path that led to nothing."""
        hold = _held(row)
        suspect, hold.suspect = hold.suspect, None
        if suspect is not None:
            self.pool.drop(suspect.path()[0], "not finite")

    def drop_own(self, row: Row) -> None:
        """Drop what the row added to the pool."""
        hold = _held(row)
        hold.release()
        if hold.own is not None:
            self.pool.drop(hold.own, "not finite")


def _held(row: Row) -> Hold:
    assert row.hold is not None, f"request {row.id} holds nothing"
    return row.hold


def _with_short_tail(plan: Sequence[Piece]) -> list[Piece]:
    """`plan`, a long last piece cut before its last token. A longer prompt is not cut there: its end is then no checkpoint."""
    last = plan[-1]
    if len(last) <= _TAIL_TOKENS:
        return list(plan)
    return [*plan[:-1], Piece(last.start, last.end - 1, False), Piece(last.end - 1, last.end, False)]
