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
from pooled_mlx.engine.endings import OWN_FAULTS, Counters, Endings
from pooled_mlx.engine.finish import NotFinite
from pooled_mlx.engine.group import DecodeGroup, padding_bytes
from pooled_mlx.engine.mlx_backend import LoadedModel, mx
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.prefill import Prefill
from pooled_mlx.engine.prefill_order import PrefillOrder
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.share import Share, pause
from pooled_mlx.engine.slots import Guarded, Observer, Slots

_log = logging.getLogger("pooled.engine")

_CLEAR_EVERY = 512
"""Pieces and steps between returns of MLX's unused buffers: the number of live Metal buffers is limited."""

_SETTLE_EVERY = 64  # decode steps between counts of what growing caches take


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`prefill_share`: part of its own speed that a running stream keeps while others prefill. Sizes in rows, events, bytes.

    `known_tokens` is the number of ids that the tokenizer knows; None: all that the model has logits for.
    """

    max_running: int = 4
    prefill_share: float = 0.33
    park_above: int = 512
    park_below: int = 64
    park_limit_seconds: float = 120.0
    padding_limit: float = 1.5
    token_bytes: int = 1
    state_bytes: int = 0
    known_tokens: int | None = None


class EngineDead(Exception):
    """The engine cannot go on; the process must end with an error so that its supervisor starts it again."""


class Loop:
    """The running rows and the order in which they get the machine. Owned by the engine thread.

    `hurried` may be set by any thread: scripted pauses end at once. `clock` gives seconds and never goes back; all that the
    loop decides by time is decided by it.
    """

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
        self._observer, self._explain, self._after_turn, self._clock = Guarded(observer), explain, after_turn, clock
        self.slots = Slots(pool, self._observer, remember, lambda: self.groups, settings.token_bytes)
        self.counters = Counters()
        self._endings = Endings(self.slots, self.counters)
        self.waiting: deque[Row] = deque()
        self.prefills: list[Prefill] = []
        self.groups: list[DecodeGroup] = []
        self.parked: list[Row] = []
        self.hurried = False
        self._order = PrefillOrder()
        self._share = Share(settings.prefill_share)
        self._next_group = 0
        self._since_clear = 0

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

    def set_pool_budget(self, budget_bytes: int) -> None:
        """Change what the pool may take and give back what is freed at once."""
        self.slots.set_budget(budget_bytes)
        mx.clear_cache()

    # --- one turn

    def turn(self) -> None:
        """At most one prefill piece and one decode step. Failures end rows; raises `EngineDead` when the reset fails."""
        self._drop_cancelled()
        self._admit()
        self._unpark()
        if self.prefills and self._share.piece_is_due(len(self.groups)):
            self._read_piece()
        if self.groups:
            self._decode()
        elif self.parked and not self.prefills:
            time.sleep(0.005)  # every row waits for its reader; the readers wake nobody
        if self._since_clear >= _CLEAR_EVERY:
            self._since_clear = 0
            mx.clear_cache()
        self._report()

    def _report(self) -> None:
        try:
            self._after_turn(not self.busy)
        except Exception:
            _log.exception("the report of the engine failed")

    def _drop_cancelled(self) -> None:
        gone = [row for row in self.waiting if row.cancelled]
        for row in gone:
            self.waiting.remove(row)
            self.slots.close(row, None)
        if gone:
            self._tell_the_queue()
        for prefill in [prefill for prefill in self.prefills if prefill.row.cancelled]:
            self.prefills.remove(prefill)
            if prefill.started:
                self.slots.finish(prefill.row, prefill.row.caches or [])
            else:
                self.slots.close(prefill.row, None)
        for row in [row for row in self.parked if row.cancelled]:
            self.parked.remove(row)
            self.slots.finish(row, row.caches or [])
        for group in list(self.groups):
            if cancelled := [row for row in group.rows if row.cancelled]:
                self._take_out(group, cancelled)

    def _admit(self) -> None:
        before = len(self.waiting)
        while self.waiting and len(self.running) < self.settings.max_running:
            row = self.waiting[0]
            if not self.slots.admit(row, alone=not self.running):
                break
            self.waiting.popleft()
            row.started_at = self._clock()
            self._observer.started(row)
            self.prefills.append(Prefill(self.model, self.pool, self.rule, row))
        if len(self.waiting) < before:
            self._tell_the_queue()

    def _tell_the_queue(self) -> None:
        for ahead, row in enumerate(self.waiting):
            row.channel.put(Queued(ahead))

    # --- prefill

    def _read_piece(self) -> None:
        prefill = self._order.next(self.prefills)
        if prefill is None:
            return
        row = prefill.row
        began = self._clock()
        try:
            if not prefill.started:
                self.slots.accounts.make_way(row)
                prefill.restore(lambda match: self.slots.take_hot(row, match))
                self._tell_why(prefill)
                self._tell_progress(prefill)
            before = row.position
            done = prefill.piece()
            self.slots.settle()
            self._pause([row], "prefill", row.position - before)
            self.counters.pieces += 1
            self.counters.prefilled_tokens += row.position - before
            self._tell_progress(prefill)
            self._observer.prefilled(row, row.position - before, self._clock() - began)
            if done:
                self.prefills.remove(prefill)
                row.plan_forced()
                self._start_decoding(row, prefill.logits)
        except EngineDead:
            raise
        except Exception as error:
            if prefill in self.prefills:
                self.prefills.remove(prefill)
            self._end_or_rebuild(row, error)
        self._since_clear += 1
        self._share.piece_read(self._clock() - began)

    def _tell_why(self, prefill: Prefill) -> None:
        """Explain the first reading of a prompt. What goes wrong there costs the explanation only."""
        if prefill.row.out:
            return
        try:
            self._explain(prefill.row, prefill.match)
        except Exception:
            _log.exception("request %s: its use of the pool could not be explained", prefill.row.id)

    def _tell_progress(self, prefill: Prefill) -> None:
        row = prefill.row
        if not row.out:  # a rebuilt row's client has part of its answer
            row.channel.put(PrefillEvent(row.position, len(prefill.ids), row.cached_tokens))

    def _start_decoding(self, row: Row, start: Any) -> None:
        """`start` is the logits after the row's last token, or the pending token that it was parked with."""
        assert row.caches is not None
        row.decoding = True
        caches, row.caches = row.caches, []  # the group's from now on
        new = DecodeGroup(self.model, row, caches, start, self.rule.step, self.settings.known_tokens)
        group = next((group for group in self.groups if self._fit_together(group, new)), None)
        if group is None:
            self.groups.append(new)
            return
        members = [*group.rows, row]
        try:
            for member in members:
                self.slots.own_copies(member)
            group.join(new)
            self.slots.settle()
        except Exception as error:
            self.groups.remove(group)
            self._rebuild(members, error)

    def _fit_together(self, group: DecodeGroup, new: DecodeGroup) -> bool:
        settings, rows = self.settings, [*group.rows, *new.rows]
        padding = padding_bytes(group, new, settings.token_bytes, settings.state_bytes, settings.padding_limit)
        return padding is not None and self.slots.accounts.make_room_for_batch(rows, padding)

    # --- decode

    def _decode(self) -> None:
        self._next_group %= len(self.groups)
        group = self.groups[self._next_group]
        self._next_group += 1
        began = self._clock()
        try:
            group.step(self._take_all)
            while run := self._planned(group):
                for row, token in run:
                    self._take_all([(row, token)])
        except Exception as error:
            self.groups.remove(group)
            self._rebuild(group.rows, error)
            return
        self.counters.steps += 1
        if self.counters.steps % _SETTLE_EVERY == 0:
            self.slots.settle()
        if leaving := [row for row in group.rows if row.broken is not None or row.finish is not None or self._must_leave(row)]:
            self._take_out(group, leaving)
        self._since_clear += 1
        self._share.step_taken(self._clock() - began)

    def _take_all(self, taken: Sequence[tuple[Row, int | None]]) -> None:
        for row, token in taken:
            self._take(row, token)
        self._pause([row for row, _ in taken], "token", 1)

    def _take(self, row: Row, token: int | None) -> None:
        """One token of one row. Whatever goes wrong here is this row's own."""
        if row.broken is not None or row.finish is not None:
            return
        try:
            if token is None:
                raise NotFinite("logits are not finite")
            if row.fault is not None:
                row.fault.raise_if_due(len(row.out))
            events = row.take(token)
            row.last_token_at = self._clock()
            row.first_token_at = row.first_token_at or row.last_token_at
            row.emit(events)
            self.counters.tokens += 1
            self._observer.token(row, 1)
            self.slots.drop_suspect(row)
            if row.finish is not None:
                row.end(self.slots.remember)
        except Exception as error:
            row.broken = error

    def _planned(self, group: DecodeGroup) -> Sequence[tuple[Row, int]]:
        """Ask every row what must come next, and let the group choose; returns what it read ahead."""
        for row in group.rows:
            if row.broken is None:
                try:
                    row.plan_forced()
                except Exception as error:
                    row.broken = error
        return group.settle()

    def _must_leave(self, row: Row) -> bool:
        stalled = row.fault is not None and row.fault.is_due("stall", len(row.out))
        return row.cancelled or stalled or row.channel.backlog > self.settings.park_above

    def _take_out(self, group: DecodeGroup, leaving: Sequence[Row]) -> None:
        members = list(group.rows)
        try:
            caches = group.remove(leaving)
        except Exception as error:
            self.groups.remove(group)
            self._rebuild(members, error)
            return
        if not group.rows:
            self.groups.remove(group)
        elif len(group.rows) == 1 and group.rows[0].backing is None:
            self.slots.own_cache(group.rows[0], group.caches)
        for row, (row_caches, pending) in caches.items():
            row.caches, row.pending = row_caches, pending
            if row.broken is not None:
                self._end_broken(row)
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
                try:
                    self._start_decoding(row, row.pending)
                except EngineDead:
                    raise
                except Exception as error:
                    self._rebuild([row], error)
            elif self._clock() - row.parked_at > self.settings.park_limit_seconds:
                self.parked.remove(row)
                stopped = engine_failed("The client did not read its answer for too long; it was stopped.")
                self.slots.finish(row, row.caches or [], stopped)

    def _pause(self, rows: Sequence[Row], what: Literal["token", "prefill"], tokens: int) -> None:
        """Make scripted answers as slow as their author asked."""
        seconds = max((row.fault.pause_seconds(what, tokens) for row in rows if row.fault is not None), default=0.0)
        if seconds > 0:
            pause(seconds, lambda: self.hurried or any(row.cancelled for row in rows))

    # --- endings

    def _end_or_rebuild(self, row: Row, error: Exception) -> None:
        """What stopped the reading of a prompt is the request's own fault, or the engine's."""
        if isinstance(error, OWN_FAULTS):
            row.broken = error
            self._end_broken(row)
        else:
            self._rebuild([row], error)

    def _end_broken(self, row: Row) -> None:
        if self._endings.broken(row):
            self._read_again(row)

    def _rebuild(self, rows: Sequence[Row], error: Exception) -> None:
        """A step failed for all these rows: read each one's tokens again, once; then give up on it."""
        for row in self._endings.failed(rows, error):
            self._read_again(row)
        self._reset()

    def _read_again(self, row: Row) -> None:
        row.restart()
        self.prefills.append(Prefill(self.model, self.pool, self.rule, row))

    def _reset(self) -> None:
        """Clean up after a failed step and check that the model still runs. Raises `EngineDead` when it does not."""
        try:
            mx.clear_cache()
            mx.eval(self.model.forward(mx.array([[0]]), self.model.make_cache()))
        except Exception as error:
            raise EngineDead(f"the model no longer runs: {error}") from error

    def abort(self, error: ApiError) -> None:
        """End every request, waiting ones included, and forget everything stored."""
        rows = [*self.waiting, *self.running]
        self.waiting, self.prefills, self.groups, self.parked = deque(), [], [], []
        self.slots.abort(rows, error)
