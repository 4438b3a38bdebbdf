"""The books of cache memory: each buffer and state counted once, who may start, and what makes room.

Two columns. What is there: a buffer's bytes are those of the segments whose spans lie in it, and the rest. The rest of an open
buffer is live; the rest of a sealed one is slack (room to grow, and second copies of what another buffer holds), which goes
before anything is evicted. What there will be: projections of running rows decide who is admitted, so that a large `max_tokens`
that is never used evicts nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pooled_mlx.core.runner import Ranges, Runner, Span
from pooled_mlx.engine.pool import Match, Pool, Segment
from pooled_mlx.engine.row import Row

_log = logging.getLogger("pooled.engine")

_SPARE_PART, _MOST_SPARE = 8, 2048
"""A cache that must grow gets room for an eighth more, in tokens: growing copies it, and a turn adds a few hundred."""


class Stored:
    """A segment's part of the books: a span and the state at its end. Satisfies the pool's payload protocol."""

    __slots__ = ("_ledger", "_released", "_state_bytes", "delta_bytes", "span", "state")

    def __init__(self, ledger: Ledger, span: Span, delta_bytes: int, state: int | None, state_bytes: int) -> None:
        self._ledger, self.span, self.delta_bytes = ledger, span, delta_bytes
        self.state, self._state_bytes = state, state_bytes
        self._released = False

    @property
    def state_bytes(self) -> int:
        """Bytes of the state, 0 once dropped."""
        return self._state_bytes if self.state is not None else 0

    @property
    def has_state(self) -> bool:
        """True when a request may resume at the end."""
        return not self._released and (self._ledger.runner.facts.divisible or self.state is not None)

    @property
    def held(self) -> bool:
        """True until it is released."""
        return not self._released

    def drop_state(self) -> None:
        """Free the state and keep the span for descendants."""
        state, self.state = self.state, None
        if state is not None:
            self._ledger.runner.drop(state)
            self._ledger.ends_no_more(self)

    def release(self) -> None:
        """Free everything."""
        if not self._released:
            self._released = True
            self.drop_state()
            self._ledger.unname(self)


@dataclass(slots=True, eq=False)
class _Book:
    """One buffer. `end` is the token at which it can be reopened, None where it cannot; `copies` are the segments whose very
    bits it holds. `claimed`: a row that was admitted will reopen it. `sealed` counts up, 0 while it is open.
    """

    bytes: int = 0
    named: dict[Stored, None] = field(default_factory=dict)
    named_bytes: int = 0
    sealed: int = 0
    end: int | None = None
    claimed: bool = False
    copies: list[Stored] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Nobody writes to it or is about to."""
        return self.sealed > 0 and not self.claimed

    @property
    def rest_bytes(self) -> int:
        return self.bytes - self.named_bytes

    @property
    def ranges(self) -> Ranges:
        """What the segments need of it, neighbours joined."""
        ranges: list[tuple[int, int]] = []
        for span in sorted((stored.span for stored in self.named), key=lambda span: span.lo):
            if ranges and ranges[-1][1] == span.lo:
                ranges[-1] = (ranges[-1][0], span.hi)
            else:
                ranges.append((span.lo, span.hi))
        return tuple(ranges)


def stored_of(segment: Segment) -> Stored:
    """The books' entry of a segment: this engine stores no other payload."""
    data = segment.data
    assert isinstance(data, Stored)
    return data


class Ledger:
    """Owns the numbers of all caches and states; every command that makes, moves or frees one goes through it.

    `changes` counts whatever may let a waiting row in. `token_bytes` is the K/V of one token.
    """

    def __init__(self, runner: Runner, pool: Pool, token_bytes: int) -> None:
        self.runner, self.pool, self._token_bytes = runner, pool, token_bytes
        self.rows: dict[Row, None] = {}
        self.changes = 0
        self._books: dict[int, _Book] = {}
        self._lost: set[int] = set()
        self._seals = itertools.count(1)
        pool.beside = self

    # --- what is there

    @property
    def live_bytes(self) -> int:
        """What running rows hold beside the segments."""
        return sum(book.rest_bytes for book in tuple(self._books.values()) if not book.is_free)

    @property
    def slack_bytes(self) -> int:
        """What could be freed without forgetting anything."""
        return sum(book.rest_bytes for book in tuple(self._books.values()) if book.is_free)

    @property
    def caches(self) -> set[int]:
        """The numbers of all caches and buffers."""
        return set(self._books)

    def measure(self, cache: int) -> None:
        """Count the bytes of a cache that was written to."""
        self._books[cache].bytes = self.runner.bytes_of(cache)

    def settle(self) -> None:
        """Count what grows, and bring what is there under the budget. Call it when rows, batches or segments changed."""
        self.changes += 1
        self._close_lost()
        for number, book in self._books.items():
            if not book.sealed:
                book.bytes = self.runner.bytes_of(number)
        self.pool.make_room(0)

    def _close_lost(self) -> None:
        """A cache that nobody writes to any more and that could not be closed is tried again."""
        lost, self._lost = self._lost, set()
        for number in lost:
            self.close(number)

    def trim(self, target_bytes: int) -> None:
        """Free slack until the pool uses at most `target_bytes`: what nothing can reopen first, then by age."""
        books = [item for item in self._books.items() if item[1].is_free and item[1].rest_bytes > 0]
        for number, book in sorted(books, key=lambda item: (item[1].end is not None, item[1].sealed)):
            if self.pool.used_bytes <= target_bytes:
                return
            self._trim(number, book)

    def _trim(self, number: int, book: _Book) -> None:
        ranges = book.ranges
        try:
            self.runner.trim(number, ranges)
        except Exception:  # out of memory: the segments go on reading from the old arrays
            _log.exception("a buffer could not be copied to its right size")
        if ranges != ((0, book.end),):
            book.end, book.copies = None, []
        self.measure(number)

    # --- projections

    def fits(self) -> bool:
        """True when all running rows can grow to their ends, whatever else may be evicted for them."""
        taken: set[Stored] = set()
        growth = sum(max(0, self._most_bytes(row) - self._own_bytes(row, taken)) for row in self.rows)
        leased = self.pool.segment_bytes - self.pool.evictable_bytes()
        return leased + max(growth, self.live_bytes) <= self.pool.budget_bytes

    def _most_bytes(self, row: Row) -> int:
        """What the row takes at its longest, the room included that an answer cannot fill."""
        assert row.hold is not None
        return row.projected_bytes + self._token_bytes * max(0, row.hold.spare_tokens - row.max_tokens)

    def _own_bytes(self, row: Row, taken: set[Stored]) -> int:
        """Bytes of the row's path that lie, or will lie once it is restored, in its own cache.

        Of what lies in another open cache, or what a row before this one will take, there will be two.
        """
        assert row.hold is not None
        path = [stored_of(segment) for segment in row.hold.parent.path() if segment.held]
        if row.cache is not None:
            return sum(stored.delta_bytes for stored in path if stored.span.buffer == row.cache)
        free = [stored for stored in path if stored not in taken and self._can_move(stored, row.hold.claim)]
        taken.update(path)
        return sum(stored.delta_bytes for stored in free)

    def _can_move(self, stored: Stored, claim: int | None) -> bool:
        return stored.held and (stored.span.buffer == claim or self._books[stored.span.buffer].is_free)

    def evict_for(self, row: Row) -> bool:
        """Make room for the prompt of a row that is about to be restored: its cache gets room for all of it at once.

        True where slack alone does not give it, so that the row's path must move into its cache instead of being copied. Notes
        as well how many tokens more than the prompt that room may be for. Nothing is evicted for those.
        """
        hold, pool = row.hold, self.pool
        assert hold is not None
        needed = max(0, row.projected_bytes - self._token_bytes * row.max_tokens)
        if hold.claim is not None:
            needed = max(0, needed - self._books[hold.claim].bytes)
        moves = pool.used_bytes - self.slack_bytes + needed > pool.budget_bytes
        if moves and hold.claim is None:
            needed = max(0, needed - self._own_bytes(row, set()))
        pool.make_room(needed)
        wanted = min(len(row.ids) // _SPARE_PART, _MOST_SPARE)
        free = pool.budget_bytes - pool.used_bytes - needed
        hold.spare_tokens = wanted if wanted * self._token_bytes <= free else 0
        return moves

    def room_for_batch(self, rows: Sequence[Row], padded_bytes: int) -> bool:
        """Make room for a batch that takes `padded_bytes` in place of these rows' caches, which keep only their segments."""
        caches = {row.cache for row in rows if row.cache is not None}
        more = padded_bytes - sum(self._books[cache].rest_bytes for cache in caches)
        return more <= 0 or (self.pool.make_room(more) and self.pool.used_bytes + more <= self.pool.budget_bytes)

    # --- caches

    def claim(self, match: Match) -> int | None:
        """The sealed buffer that ends exactly at a match, set aside for whoever asks; None where there is none."""
        if match.partial is not None or match.parent is None:
            return None
        span = stored_of(match.parent).span
        book = self._books[span.buffer]
        if not book.is_free or book.end != span.hi or not match.parent.has_state:
            return None
        book.claimed = True
        return span.buffer

    def unclaim(self, buffer: int | None) -> None:
        """Give a claimed buffer back."""
        if buffer is not None and buffer in self._books:
            self._books[buffer].claimed = False
            self._free_unnamed(buffer)

    def open(self, match: Match, claim: int | None, room: int, *, moves: bool) -> tuple[int, list[Stored]]:
        """A cache at the end of a match, with room for `room` tokens, and the segments whose very bits it holds.

        The claimed buffer is reopened if it still ends there. Else the path is copied; what lies in buffers that nothing can
        reopen moves, and with `moves` whatever can.
        """
        path = [stored_of(segment) for segment in match.path]
        state = path[-1].state if path and match.partial is None else None
        if claim is not None and path and path[-1].span == Span(claim, path[-1].span.lo, self._books[claim].end or -1):
            try:
                self.runner.reopen(claim, state)
            except Exception:
                self.unclaim(claim)
                raise
            book = self._books[claim]
            copies = [stored for stored in book.copies if stored.held]
            book.claimed, book.sealed, book.end, book.copies = False, 0, None, []
            self.measure(claim)
            self.adopt(copies, claim)
            return claim, copies
        self.unclaim(claim)
        spans = [stored.span for stored in path]
        if match.partial is not None:
            segment, tokens = match.partial
            whole = stored_of(segment).span
            spans.append(Span(whole.buffer, whole.lo, whole.lo + tokens))
        movable = [stored for stored in path if self._can_move(stored, None)]
        moved = [stored for stored in movable if moves or self._books[stored.span.buffer].end is None]
        sources = {stored.span.buffer for stored in moved}
        for stored in moved:
            self._rename(stored, None)
        try:
            cache = self.runner.open(spans, state, room, {number: self._books[number].ranges for number in sources})
        except Exception:
            for stored in moved:
                self._rename(stored, stored.span.buffer)
            raise
        self._books[cache] = _Book()
        for stored in moved:
            stored.span = Span(cache, stored.span.lo, stored.span.hi)
            self._rename(stored, cache)
        self.measure(cache)
        for number in sources:
            self._books[number].end = None
            self.measure(number)
            self._free_unnamed(number)
        return cache, path

    def grow(self, cache: int, tokens: int, spare_tokens: int) -> None:
        """Give a cache that has not room for `tokens` room for those and `spare_tokens` more."""
        room = self.runner.room_of(cache)
        if 0 < room < tokens:
            self.runner.grow(cache, tokens + spare_tokens)

    def mark(self, cache: int, lo: int, hi: int) -> Stored | None:
        """An entry for what a cache holds of `lo..hi`, to be put into the pool or released; None if that is not finite."""
        mark = self.runner.mark(cache, lo, hi)
        if not mark.finite:
            if mark.state is not None:
                self.runner.drop(mark.state)
            return None
        stored = Stored(self, Span(cache, lo, hi), mark.delta_bytes, mark.state, mark.state_bytes)
        self.measure(cache)
        self._rename(stored, cache)
        return stored

    def adopt(self, copies: Iterable[Stored], cache: int) -> None:
        """Read segments from a cache that holds their very bits, where they lie in buffers that nothing can reopen."""
        for stored in copies:
            number = stored.span.buffer
            if stored.held and number != cache and self._books[number].is_free and self._books[number].end is None:
                self._rename(stored, None)
                stored.span = Span(cache, stored.span.lo, stored.span.hi)
                self._rename(stored, cache)
                self._free_unnamed(number)

    def join(self, cache: int, other: int) -> int:
        """Both in one batch. What segments need of plain caches stays, in buffers of the right size."""
        trims = {number: self._books[number].ranges for number in (cache, other)}
        joined = self.runner.join(cache, other, trims)
        for number in (cache, other):
            if trims[number]:
                self._seal(number)
            else:
                self.free(number)
        self._books[joined] = _Book()
        self.measure(joined)
        return joined

    def leave(self, cache: int, places: Sequence[int]) -> tuple[list[int], int | None]:
        """See `Runner.leave`."""
        gone, rest = self.runner.leave(cache, places)
        for number in (*gone, *(() if rest is None else (rest,))):
            self._books.setdefault(number, _Book())
            self.measure(number)
        if cache not in gone and cache != rest:
            del self._books[cache]
        return gone, rest

    def close(self, cache: int, end: int | None = None, copies: Sequence[Stored] = ()) -> None:
        """Nothing writes to a cache any more. It can be reopened at `end`, if one is given, while that is the end of a segment
        of it; without segments it is freed."""
        book = self._books.get(cache)
        if book is None or book.sealed:
            return
        if not book.named:
            self.free(cache)
            return
        try:
            self._seal(cache)
        except Exception:  # what the segments need of it stays readable; the next count tries again
            _log.exception("a cache could not be closed")
            self._lost.add(cache)
            return
        if end is not None and any(stored.span.hi == end for stored in book.named):
            book.end, book.copies = end, list(copies)
        elif book.rest_bytes > book.named_bytes:  # nothing can reopen it, and little is copied to free much
            self._trim(cache, book)

    def free(self, cache: int) -> None:
        """Give up a cache or buffer with whatever is in it."""
        self.runner.free(cache)
        self._books.pop(cache, None)

    def clear(self) -> None:
        """Give up everything."""
        for number in list(self._books):
            self.free(number)

    def unname(self, stored: Stored) -> None:
        """A segment does not need its span any more."""
        number = stored.span.buffer
        if number in self._books and stored in self._books[number].named:
            self._rename(stored, None)
            self.ends_no_more(stored)
            self._free_unnamed(number)

    def ends_no_more(self, stored: Stored) -> None:
        """Nothing can resume at the end of a segment any more: what was kept to go on from there is slack like any other."""
        book = self._books.get(stored.span.buffer)
        if book is not None and book.end == stored.span.hi:
            book.end, book.copies = None, []

    def sweep(self, in_use: Collection[int | None]) -> None:
        """A command failed in the middle: close what nobody knows of."""
        for number in [number for number, book in self._books.items() if not book.sealed and number not in in_use]:
            self.close(number)

    def _seal(self, number: int) -> None:
        self.runner.seal(number)
        self._books[number].sealed = next(self._seals)
        self.measure(number)

    def _rename(self, stored: Stored, number: int | None) -> None:
        """Move an entry into book `number`, None for none."""
        book = self._books.get(stored.span.buffer)
        if book is not None and stored in book.named:
            del book.named[stored]
            book.named_bytes -= stored.delta_bytes
        if number is not None:
            self._books[number].named[stored] = None
            self._books[number].named_bytes += stored.delta_bytes

    def _free_unnamed(self, number: int) -> None:
        book = self._books[number]
        if book.is_free and not book.named:
            self.free(number)
