"""The engine's loop: one prefill piece, then decode steps, then the next piece; rows join and leave at any time.

`Loop.turn` is synchronous and owns every MLX array; `engine/thread.py` calls it. Nothing here knows HTTP or asyncio.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.core.events import Prefill as PrefillEvent
from pooled_mlx.core.events import Queued
from pooled_mlx.engine.cuts import CutRule
from pooled_mlx.engine.group import DecodeGroup, batchable, useful_and_padded_bytes
from pooled_mlx.engine.mlx_backend import LoadedModel, mx
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.prefill import NotFinite, Prefill
from pooled_mlx.engine.prefill_order import PrefillOrder
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.slots import Observer, Slots
from pooled_mlx.grammar.match import GrammarFailed

_log = logging.getLogger("pooled.engine")

_CLEAR_EVERY = 512
"""Decode steps between returns of MLX's unused buffers: the number of live Metal buffers is limited."""

_NOT_FINITE = "The model's output was not a number at this step; the answer was stopped and nothing of it was kept."


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`prefill_share`: part of its own speed that a running stream keeps while others prefill. Sizes in rows, events, bytes."""

    max_running: int = 4
    prefill_share: float = 0.3
    park_above: int = 512
    park_below: int = 64
    park_limit_seconds: float = 120.0
    padding_limit: float = 1.5
    token_bytes: int = 1
    state_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """What the loop did since its start."""

    pieces: int = 0
    steps: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    not_finite: int = 0
    failures: int = 0
    rebuilds: int = 0
    grammar_failures: int = 0


@dataclass(slots=True)
class _Turn:
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps_since_clear: int = 0
    next_group: int = 0


class Loop:
    """The running rows and the order in which they get the machine. Owned by the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        pool: Pool,
        rule: CutRule,
        settings: LoopSettings,
        observer: Observer,
        remember: Callable[[Row], None],
        explain: Callable[[Row, Match], None] = lambda row, match: None,
        after_turn: Callable[[bool], None] = lambda idle: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.pool, self.rule, self.settings = model, pool, rule, settings
        self._observer, self._explain, self._after_turn, self._clock = observer, explain, after_turn, clock
        self.slots = Slots(pool, observer, remember)
        self.waiting: deque[Row] = deque()
        self.prefills: list[Prefill] = []
        self.groups: list[DecodeGroup] = []
        self.parked: list[Row] = []
        self.counters = Counters()
        self._turn = _Turn()
        self._order = PrefillOrder()

    # --- what others ask

    @property
    def running(self) -> list[Row]:
        """Rows that hold a slot."""
        rows = [prefill.row for prefill in self.prefills]
        return [*rows, *(row for group in self.groups for row in group.rows), *self.parked]

    @property
    def busy(self) -> bool:
        """True when `turn` has something to do now."""
        return bool(self.waiting or self.prefills or self.groups or self.parked)

    def submit(self, row: Row) -> None:
        """Put a row at the end of the queue."""
        row.submitted_at = row.submitted_at or self._clock()
        self.waiting.append(row)
        ahead = len(self.waiting) - 1
        if ahead or len(self.running) >= self.settings.max_running:
            row.channel.put(Queued(ahead))

    # --- one turn

    def turn(self) -> None:
        """At most one prefill piece and one decode step. Raises nothing: failures end rows; `EngineDead` when reset fails."""
        self._drop_cancelled()
        self._admit()
        self._unpark()
        if self.prefills and self._prefill_is_due():
            self._read_piece()
        if self.groups:
            self._decode()
        elif self.parked and not self.prefills:
            time.sleep(0.005)  # every row waits for its reader; the readers wake nobody
        self._after_turn(not self.busy)

    def _prefill_is_due(self) -> bool:
        if not self.groups:
            return True
        share = self.settings.prefill_share
        return self._turn.decode_seconds >= self._turn.prefill_seconds * share / (1.0 - share)

    def _drop_cancelled(self) -> None:
        for row in [row for row in self.waiting if row.cancelled]:
            self.waiting.remove(row)
            self.slots.close(row, None)
        for prefill in [prefill for prefill in self.prefills if prefill.row.cancelled]:
            self.prefills.remove(prefill)
            self.slots.finish(prefill.row, prefill.row.caches or [])
        for row in [row for row in self.parked if row.cancelled]:
            self.parked.remove(row)
            self.slots.finish(row, row.caches or [])
        for group in list(self.groups):
            cancelled = [row for row in group.rows if row.cancelled]
            if cancelled:
                self._take_out(group, cancelled)

    def _admit(self) -> None:
        changed = False
        while self.waiting and len(self.running) < self.settings.max_running:
            row = self.waiting[0]
            if not self.pool.make_room(row.projected_bytes) and self.running:
                break
            self.waiting.popleft()
            self.slots.reserve(row)
            row.started_at = self._clock()
            self._observer.started(row)
            self.prefills.append(Prefill(self.model, self.pool, self.rule, row))
            changed = True
        if changed:
            for ahead, row in enumerate(self.waiting):
                row.channel.put(Queued(ahead))

    # --- prefill

    def _read_piece(self) -> None:
        prefill = self._order.next(self.prefills)
        if prefill is None:
            return
        row = prefill.row
        began = time.perf_counter()
        try:
            if not prefill.started:
                self.slots.hot = prefill.restore(self.slots.hot)
                self._explain(row, prefill.match)
                row.channel.put(PrefillEvent(row.position, len(prefill.ids), row.cached_tokens))
            before = row.position
            done = prefill.piece()
            self.slots.reserve(row)
            self._pause(row, "prefill", row.position - before)
            self.counters.pieces += 1
            self.counters.prefilled_tokens += row.position - before
            if not row.out:
                row.channel.put(PrefillEvent(row.position, len(prefill.ids), row.cached_tokens))
            self._observer.prefilled(row, row.position - before, time.perf_counter() - began)
            if done:
                self.prefills.remove(prefill)
                assert prefill.logits is not None
                row.plan_forced()
                self._start_decoding(row, prefill.logits)
        except NotFinite:
            self._leave_prefill(prefill)
            self._not_finite(row)
        except GrammarFailed as failure:
            self._leave_prefill(prefill)
            self._fail_grammar(row, failure)
        except Exception as error:
            self._leave_prefill(prefill)
            self._rebuild([row], error)
        self._turn.prefill_seconds = time.perf_counter() - began
        self._turn.decode_seconds = 0.0

    def _leave_prefill(self, prefill: Prefill) -> None:
        if prefill in self.prefills:
            self.prefills.remove(prefill)

    def _start_decoding(self, row: Row, start: Any) -> None:
        assert row.caches is not None
        row.decoding = True
        group = DecodeGroup(self.model, row, row.caches, start)
        for other in self.groups:
            if self._fits_together(other, group):
                for member in [*other.rows, row]:
                    self.slots.own_copies(member)
                other.join(group)
                return
        self.groups.append(group)

    def _fits_together(self, group: DecodeGroup, new: DecodeGroup) -> bool:
        if not batchable(group.caches) or not batchable(new.caches):
            return False
        sizes = [(len(row.prompt.ids) + len(row.out), self.settings.state_bytes) for row in (*group.rows, *new.rows)]
        useful, padded = useful_and_padded_bytes(sizes, self.settings.token_bytes)
        return padded <= self.settings.padding_limit * useful

    # --- decode

    def _decode(self) -> None:
        self._turn.next_group %= len(self.groups)
        group = self.groups[self._turn.next_group]
        self._turn.next_group += 1
        began = time.perf_counter()
        leaving: set[Row] = set()
        try:
            results: Sequence[tuple[Row, int | None]] = group.step()
            while results:
                for row, token in results:
                    self._take(row, token)
                for row in group.rows:
                    self._plan(row)
                results = group.settle()
        except Exception as error:
            self.groups.remove(group)
            self._rebuild(group.rows, error)
            return
        self.counters.steps += 1
        for row in group.rows:
            if row.broken is not None or row.finish is not None or row.cancelled or self._must_park(row):
                leaving.add(row)
        if leaving:
            self._take_out(group, [row for row in group.rows if row in leaving])
        self._turn.decode_seconds += time.perf_counter() - began
        self._turn.steps_since_clear += 1
        if self._turn.steps_since_clear >= _CLEAR_EVERY:
            self._turn.steps_since_clear = 0
            mx.clear_cache()

    def _take(self, row: Row, token: int | None) -> None:
        """One token of one row. Whatever goes wrong here is this row's own."""
        if row.broken is not None or row.finish is not None:
            return
        try:
            if token is None:
                raise NotFinite(_NOT_FINITE)
            if row.fault is not None:
                row.fault.raise_if_due(len(row.out))
            events = row.take(token)
            now = self._clock()
            if not row.first_token_at:
                row.first_token_at = now
            row.last_token_at = now
            row.emit(events)
            self.counters.tokens += 1
            self._observer.token(row, 1)
            if row.finish is not None:
                row.end(self.slots.remember)
            self._pause(row, "token", 1)
        except Exception as error:
            row.broken = error

    def _plan(self, row: Row) -> None:
        """Ask what must come next, once the row took all its tokens of this step."""
        if row.broken is not None or row.finish is not None:
            return
        try:
            row.plan_forced()
        except Exception as error:
            row.broken = error

    def _must_park(self, row: Row) -> bool:
        stalled = row.fault is not None and row.fault.is_due("stall", len(row.out))
        return stalled or row.channel.backlog > self.settings.park_above

    def _take_out(self, group: DecodeGroup, leaving: Sequence[Row]) -> None:
        try:
            caches = group.remove(leaving)
        except Exception as error:
            self.groups.remove(group)
            self._rebuild(group.rows, error)
            return
        if not group.rows:
            self.groups.remove(group)
        for row, (row_caches, pending) in caches.items():
            row.caches, row.pending = row_caches, pending
            if row.broken is not None:
                self._fail_broken(row)
            elif row.finish is not None or row.cancelled:
                self.slots.finish(row, row_caches)
            else:
                row.parked_at = self._clock()
                self.parked.append(row)

    def _unpark(self) -> None:
        for row in list(self.parked):
            assert row.parked_at is not None
            if row.fault is not None and row.fault.is_due("stall", len(row.out)):
                continue
            if row.channel.backlog <= self.settings.park_below:
                self.parked.remove(row)
                row.parked_at = None
                self._start_decoding(row, row.pending)
            elif self._clock() - row.parked_at > self.settings.park_limit_seconds:
                self.parked.remove(row)
                self.slots.close(row, engine_failed("The client did not read its answer for too long; it was stopped."))

    def _pause(self, row: Row, what: Literal["token", "prefill"], tokens: int) -> None:
        """Make a scripted answer as slow as its author asked."""
        if row.fault is None:
            return
        seconds = row.fault.pause_seconds(what, tokens)
        if seconds > 0:
            time.sleep(seconds)

    # --- endings

    def _fail_broken(self, row: Row) -> None:
        error = row.broken
        if isinstance(error, NotFinite):
            self._not_finite(row)
        elif isinstance(error, GrammarFailed):
            self._fail_grammar(row, error)
        else:
            self.counters.failures += 1
            _log.error("request %s failed", row.id, exc_info=error)
            self.slots.close(
                row, error if isinstance(error, ApiError) else engine_failed(f"The answer could not be continued: {error}")
            )

    def _fail_grammar(self, row: Row, failure: GrammarFailed) -> None:
        self.counters.grammar_failures += 1
        _log.error("request %s: the grammar failed: %s", row.id, failure)
        self.slots.close(row, engine_failed(f"The answer's grammar cannot go on: {failure}"))

    def _not_finite(self, row: Row) -> None:
        """NaN: a poisoned stored state is dropped and the request read anew, once; else the request ends."""
        self.counters.not_finite += 1
        row.broken = None
        if row.cached_tokens and not row.out and not row.cold:
            _log.warning("request %s: a stored prefix gave output that is not finite; it is dropped and read again", row.id)
            self.slots.drop_path(row, "not finite")
            row.cold, row.cached_tokens = True, 0
            self._again(row)
            return
        _log.error("request %s: %s", row.id, _NOT_FINITE)
        self.slots.discard(row)
        self.slots.close(row, engine_failed(_NOT_FINITE))

    def _rebuild(self, rows: Sequence[Row], error: Exception) -> None:
        """A step failed for all these rows: read each one's tokens again, once; then give up on it."""
        self.counters.failures += 1
        _log.error("a step of %d request(s) failed", len(rows), exc_info=error)
        for row in list(rows):
            self.slots.discard(row)
            if row.finish is not None or row.cancelled or row.broken is not None:
                self.slots.close(row, None if row.finish is not None else engine_failed("The request was stopped."))
            elif row.retried:
                self.slots.close(row, engine_failed(f"The engine failed at this step: {error}"))
            else:
                row.retried = True
                self.counters.rebuilds += 1
                self._again(row)
        self.reset()

    def _again(self, row: Row) -> None:
        row.backing, row.caches, row.pending, row.parent = None, None, None, None
        row.lower = row.position = row.prefilled_tokens = 0
        row.forced = []
        row.decoding = False
        self.prefills.append(Prefill(self.model, self.pool, self.rule, row))

    def reset(self) -> None:
        """Clean up after a failed step and check that the model still runs. Raises `EngineDead` when it does not."""
        try:
            mx.clear_cache()
            probe = self.model.forward(mx.array([[0]]), self.model.make_cache())
            mx.eval(probe)
        except Exception as error:
            raise EngineDead(f"the model no longer runs: {error}") from error

    def abort(self, error: ApiError) -> None:
        """End every request, waiting ones included."""
        rows = [*self.waiting, *self.running]
        self.waiting.clear()
        self.prefills, self.groups, self.parked, self.slots.hot = [], [], [], None
        for row in rows:
            row.backing = None
            self.slots.close(row, error)


class EngineDead(Exception):
    """The engine cannot go on; the process must end with an error so that its supervisor starts it again."""
