"""The engine's loop: one prefill piece, then decode steps, then the next piece; rows join and leave at any time.

A turn is: `schedule` says what is due, the runner computes it, the rows take it. `Loop.turn` is synchronous; `engine/thread.py`
calls it. Nothing here knows HTTP, asyncio or MLX.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.core.events import Prefill, Queued
from pooled_mlx.core.runner import Runner
from pooled_mlx.engine.drafts import Draft, Index, PassCosts
from pooled_mlx.engine.failures import OWN_FAULTS, Counters, Failures
from pooled_mlx.engine.keep import Keeper, NotFinite
from pooled_mlx.engine.ledger import Ledger
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.row import Pace, Row, Stage
from pooled_mlx.engine.schedule import Share, View, padding, schedule
from pooled_mlx.grammar.match import GrammarFailed
from pooled_mlx.prompt.exact_ids import agreement

_log = logging.getLogger("pooled.engine")

_CLEAR_EVERY = 512
"""Pieces and steps between returns of unused memory: the number of live Metal buffers is limited."""
_SETTLE_EVERY = 64  # decode steps between counts of what growing caches take
_WORD_BITS = 32
_MOST_UNREAD = 24
"""Tokens that may wait to be read together with the next draft; more are read in a pass of their own."""
_DEVICE_FAILURES, _DEVICE_SECONDS = 2, 60.0
"""So many failures of the device within so many seconds halve the pieces of prompts."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`prefill_share`: part of its own speed that a running stream keeps while others prefill. Sizes in rows, events, bytes:
    `token_bytes` is the K/V of one token, `state_bytes` what a row takes whatever its length.
    """

    max_running: int = 4
    prefill_share: float = 0.33
    park_above: int = 512
    park_below: int = 64
    park_limit_seconds: float = 120.0
    padding_limit: float = 1.5
    drafts: bool = True
    token_bytes: int = 1
    state_bytes: int = 0


class EngineDead(Exception):
    """The engine cannot go on; the process must end with an error so that its supervisor starts it again."""


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


class Batch:
    """Rows that take their steps together, and the number of the cache they share."""

    def __init__(self, rows: list[Row], cache: int) -> None:
        self.rows, self.cache = rows, cache


class Loop:
    """The running rows and the order in which they get the machine. Owned by the engine thread.

    `clock` gives seconds and never goes back; all that the loop decides by time is decided by it.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        settings: LoopSettings,
        observer: Observer,
        remember: Callable[[Row], None],
        explain: Callable[[Row, Match], None] = lambda row, match: None,
        after_turn: Callable[[bool], None] = lambda idle: None,
        pace: Pace = lambda rows, what, tokens: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.pool, self.settings, self._clock = runner, pool, settings, clock
        self._observer, self._explain, self._after_turn, self._pace = observer, explain, after_turn, pace
        self.ledger = Ledger(runner, pool, settings.token_bytes)
        self.keeper = Keeper(pool, self.ledger, runner, remember, self._closed)
        self.counters = Counters()
        self.share = Share(settings.prefill_share)
        self.costs = PassCosts()
        self._failures = Failures(self.keeper, self.counters)
        self._words = -(-runner.facts.vocab_size // _WORD_BITS)
        self.waiting: deque[Row] = deque()
        self.reading: list[Row] = []
        self.batches: list[Batch] = []
        self.parked: list[Row] = []
        self._skipped = 0
        self._next_batch = 0
        self._since_clear = 0
        self._device_failed: list[float] = []

    # --- what others ask

    @property
    def running(self) -> list[Row]:
        """Rows that hold a slot."""
        return [*self.reading, *(row for batch in self.batches for row in batch.rows), *self.parked]

    @property
    def busy(self) -> bool:
        """True when `turn` has something to do now."""
        return bool(self.waiting or self.reading or self.batches or self.parked)

    def submit(self, row: Row) -> None:
        """Put a row at the end of the queue."""
        row.times.submitted = row.times.submitted or self._clock()
        self.waiting.append(row)
        ahead = len(self.waiting) - 1
        if ahead or len(self.running) >= self.settings.max_running:
            row.channel.put(Queued(ahead))

    def forget(self, client: str) -> None:
        """End the requests of this client, and drop what is stored of them and nobody else goes on from."""
        for row in (*self.waiting, *self.running):
            if row.prepared.request.client == client:
                row.channel.cancel()
        self._drop_cancelled()
        self.pool.forget(client)
        self.ledger.settle()

    def set_pool_budget(self, budget_bytes: int, *, keep_pins: bool = False) -> None:
        """Change what the pool may take and give back what is freed at once; see `Pool.set_budget`."""
        self.pool.set_budget(budget_bytes, keep_pins=keep_pins)
        self.ledger.settle()
        self.runner.clear_unused()

    # --- one turn

    def turn(self) -> None:
        """At most one prefill piece and one decode step. Failures end rows; raises `EngineDead` when the reset fails."""
        self._drop_cancelled()
        self._admit()
        if self.parked or self.reading:
            self._carry_out([*self.parked, *self.reading])
        if self.batches:
            self._decode()
        elif self.parked and not self.reading:
            time.sleep(0.005)  # every row waits for its reader; the readers wake nobody
        if self._since_clear >= _CLEAR_EVERY:
            self._since_clear = 0
            self.runner.clear_unused()
        self._tell(self._after_turn, not self.busy)

    def _carry_out(self, rows: Sequence[Row]) -> None:
        """What is due of rows that write nothing now."""
        settings = self.settings
        plan = schedule(
            [self._view(row) for row in rows],
            piece_is_due=self.share.piece_is_due(len(self.batches)),
            skipped=self._skipped,
            below=settings.park_below,
            limit_seconds=settings.park_limit_seconds,
        )
        self._skipped = plan.skipped
        for place in plan.late:
            self.parked.remove(rows[place])
            late = engine_failed("The client did not read its answer for too long; it was stopped.")
            self.keeper.finish(rows[place], late)
        for place in plan.resume:
            self.parked.remove(rows[place])
            self._resume(rows[place])
        if plan.read is not None:
            self._read_piece(rows[plan.read])

    def _view(self, row: Row) -> View:
        """A row as the schedule sees it."""
        if row.stage is Stage.PARKED:
            stalled = row.hook is not None and row.hook.stalled(len(row.out))
            return View(row.stage, backlog=row.channel.backlog, idle_seconds=self._clock() - row.times.parked, stalled=stalled)
        length, begun = len(row.prompt.ids) + len(row.out), row.cache is not None
        return View(row.stage, length - row.position, begun, not begun and self._waits_for_twin(row))

    def _waits_for_twin(self, row: Row) -> bool:
        """True while another prompt that is being read will soon have stored more of this one than the pool holds."""
        for other in self.reading:
            if other is not row and other.cache is not None and other.hold is not None:
                ids = row.ids
                shared = min(agreement(ids, other.ids), len(ids) - 1)
                ahead = (piece.end for piece in other.hold.pieces if piece.checkpoint or piece.end == other.hold.fork)
                if any(end <= shared for end in ahead):
                    return True
        return False

    def _drop_cancelled(self) -> None:
        gone = [row for row in self.waiting if row.cancelled]
        for row in gone:
            self.waiting.remove(row)
            self.keeper.close(row, None)
        if gone:
            self._tell_the_queue()
        for rows in (self.reading, self.parked):
            for row in [row for row in rows if row.cancelled]:
                rows.remove(row)
                self.keeper.finish(row)
        for batch in list(self.batches):
            if cancelled := [row for row in batch.rows if row.cancelled]:
                self._take_out(batch, cancelled)

    def _admit(self) -> None:
        before = len(self.waiting)
        while self.waiting and len(self.running) < self.settings.max_running:
            row = self.waiting[0]
            if not self.keeper.admit(row, self._clock(), alone=not self.running):
                break
            self.waiting.popleft()
            self.reading.append(row)
            self._tell(self._observer.started, row)
        if len(self.waiting) < before:
            self._tell_the_queue()

    def _tell_the_queue(self) -> None:
        for ahead, row in enumerate(self.waiting):
            row.channel.put(Queued(ahead))

    @staticmethod
    def _tell(note: Callable[..., None], *facts: object) -> None:
        """Tell somebody who only listens. What goes wrong there costs nobody an answer."""
        try:
            note(*facts)
        except Exception:
            _log.exception("what the engine did could not be noted")

    def _closed(self, row: Row, error: ApiError | None) -> None:
        self._tell(self._observer.ended, row, error)

    # --- reading prompts

    def _read_piece(self, row: Row) -> None:
        began = self._clock()
        try:
            if row.cache is None:
                match = self.keeper.restore(row)
                if not row.out:
                    self._tell(self._explain, row, match)
                self._tell_progress(row)
            before = row.position
            done = self.keeper.read(row)
            self.ledger.settle()
            tokens = row.position - before
            self._pace([row], "prefill", tokens)
            self.counters.pieces += 1
            self.counters.prefilled_tokens += tokens
            self._tell_progress(row)
            self._tell(self._observer.prefilled, row, tokens, self._clock() - began)
            if done:
                self.reading.remove(row)
                row.plan_forced()
                assert row.cache is not None
                if row.probe is not None and not row.out:
                    row.probe.logits = self.runner.logits(row.cache)
                self.runner.choose(row.cache, [row.shape(0, self._words)])
                self._start_writing(row)
        except EngineDead:
            raise
        except Exception as error:
            if row in self.reading:
                self.reading.remove(row)
            self._end_or_rebuild(row, error)
        self._since_clear += 1
        self.share.piece_read(self._clock() - began)

    def _tell_progress(self, row: Row) -> None:
        if not row.out:  # a rebuilt row's client has part of its answer
            row.channel.put(Prefill(row.position, len(row.prompt.ids), row.cached_tokens))

    # --- batches

    def _resume(self, row: Row) -> None:
        """A parked row goes on."""
        try:
            self._start_writing(row)
        except EngineDead:
            raise
        except Exception as error:
            self._rebuild([row], error)

    def _start_writing(self, row: Row) -> None:
        """The row's first token is chosen, or the one that it was parked with: let it write, with others where that fits."""
        assert row.cache is not None
        batch = next((batch for batch in self.batches if self._fit_together(batch, row)), None)
        row.to(Stage.WRITING)
        if batch is None:
            self.batches.append(Batch([row], row.cache))
            return
        members = [*batch.rows, row]
        try:
            for member in members:
                if member.unread and member.cache is not None:
                    self._go_on(member, member.cache)
            self._place(batch, members, self.ledger.join(batch.cache, row.cache))
            self.ledger.settle()
        except Exception as error:
            self.batches.remove(batch)
            self._lose(batch)
            self._rebuild(members, error)

    @staticmethod
    def _place(batch: Batch, rows: list[Row], cache: int) -> None:
        batch.rows, batch.cache = rows, cache
        for row in rows:
            row.cache = cache

    def _lose(self, batch: Batch) -> None:
        """Nothing can be done with the cache of a batch any more."""
        if len(batch.rows) > 1:
            self.ledger.free(batch.cache)
            for row in batch.rows:
                row.cache = None if row.cache == batch.cache else row.cache

    def _fit_together(self, batch: Batch, row: Row) -> bool:
        """True when a batch of these is possible, wastes little and finds room.

        A row that is read again after a failed step goes on alone: it may have been its fault, and another one ends it.
        """
        settings, rows = self.settings, [*batch.rows, row]
        assert row.cache is not None
        if any(member.retried for member in rows) or not self.runner.can_join(batch.cache, row.cache):
            return False
        sizes = [member.position for member in rows]
        bytes_ = padding(sizes, settings.token_bytes, settings.state_bytes, settings.padding_limit)
        return bytes_ is not None and self.ledger.room_for_batch(rows, bytes_[0])

    def _decode(self) -> None:
        self._next_batch %= len(self.batches)
        batch = self.batches[self._next_batch]
        self._next_batch += 1
        began = self._clock()
        try:
            self._step(batch)
        except Exception as error:
            self.batches.remove(batch)
            rows = batch.rows
            self._lose(batch)
            self._rebuild(rows, error)
            return
        self.counters.steps += 1
        if self.counters.steps % _SETTLE_EVERY == 0:
            self.ledger.settle()
        if leaving := [row for row in batch.rows if row.broken is not None or row.finish is not None or self._must_leave(row)]:
            self._take_out(batch, leaving)
        self._since_clear += 1
        self.share.step_taken(self._clock() - began)

    def _step(self, batch: Batch) -> None:
        """One pass for a batch, and its rows' next choices.

        Rows that need no synchronisation have the choice after next queued before a token is read. Others are read while the
        pass runs, and choose then: no overlap is lost but that of the choice itself. A first token does not wait until the
        pass after it is queued: where queues are short, that takes as long as the pass.
        """
        rows, runner = batch.rows, self.runner
        if len(rows) == 1 and (rows[0].unread or not rows[0].out or self._expects(rows[0])):
            self._step_alone(rows[0], batch.cache)
            return
        first = not all(row.out for row in rows)
        if first:
            self._take_all(rows, runner.take(batch.cache))
        runs = [None] * len(rows)
        if first or any(row.needs_sync or row.forced for row in rows):
            runner.step(batch.cache, runs)
            self._read(rows, 1)
            if not first:
                self._take_all(rows, runner.take(batch.cache))
            self._plan(rows)
            if len(rows) > 1 or not self._run_ahead(rows[0], batch.cache):
                runner.choose(batch.cache, [row.shape(0, self._words) for row in rows])
        else:
            began = self._clock()
            runner.step(batch.cache, runs, [row.shape(1, self._words) for row in rows])
            self._read(rows, 1)
            self._take_all(rows, runner.take(batch.cache))
            self._plan(rows)
            if len(rows) == 1:
                self.costs.seen(1, self._clock() - began)

    @staticmethod
    def _read(rows: Sequence[Row], tokens: int) -> None:
        for row in rows:
            row.position += tokens

    def _step_alone(self, row: Row, cache: int) -> None:
        """One pass for a row alone whose newest token must be known before it."""
        if not row.unread:
            self._take_all([row], self.runner.take(cache))
        self._plan([row])
        if not row.is_over and not self._run_ahead(row, cache):
            self._go_on(row, cache)

    def _go_on(self, row: Row, cache: int) -> None:
        """Read what the row said last, and choose its next token."""
        unread = row.unread
        self.runner.step(cache, [unread])
        row.position += len(unread)
        self.runner.choose(cache, [row.shape(0, self._words)])

    def _run_ahead(self, row: Row, cache: int) -> bool:
        """Read in one pass what a row alone must say next and what it probably will, and take what was right of it.

        False where there is nothing of it. Otherwise the row's last token is left unread, unless it is over.
        """
        unread, left = row.unread, row.max_tokens - len(row.out)
        if row.is_over or len(unread) > _MOST_UNREAD:
            return False
        forced = row.forced[: max(0, min(self.pool.rule.step_at(row.position) - len(unread), left))]
        draft = self._draft(row, forced, left - len(forced) - 1) if unread or forced else []
        ids = [*unread, *forced, *draft]
        if not (forced or draft) or len(ids) < 2:
            return False
        began = self._clock()
        self.runner.step(cache, [ids], places=len(draft) + 1)
        row.position += len(ids)
        del row.forced[: len(forced)]
        right = len(unread)
        for token in forced:
            if row.is_over:
                break
            self._take_all([row], [token])
            right += 1
        self._plan([row])
        if not row.is_over:
            right += self._judge(row, cache, draft)
            self.costs.seen(len(ids), self._clock() - began)
        row.position += self.runner.keep(cache, right) - len(ids)
        return True

    def _judge(self, row: Row, cache: int, draft: Sequence[int]) -> int:
        """Choose at every place of a draft that was read, and take the choices up to the first that is another token.

        Returns how many tokens of the draft were right and are followed by a token or the end of the answer.
        """
        bend, right, equal = row.bend, 0, 0
        try:
            shapes = row.shapes_along(draft, self._words)
        except Exception as error:  # this row's own, as in `Row.shape`
            row.broken = error
            return 0
        self.runner.choose(cache, [*shapes, *[shapes[-1]] * (len(draft) + 1 - len(shapes))])
        chosen = self.runner.take(cache)
        for place in range(len(shapes)):
            self._take_all([row], chosen[place : place + 1])
            del row.forced[:1]
            if place == len(draft) or chosen[place] != draft[place]:
                break
            equal += 1
            right += row.is_over or (place + 1 < len(shapes) and row.bend == bend)
            if right < equal or row.is_over:
                break
        if draft:
            self.counters.drafted += len(draft)
            self.counters.accepted += equal
            assert row.draft is not None
            row.draft.judged(len(draft), equal)
        return right

    def _expects(self, row: Row) -> bool:
        """True when the row probably goes on as it did before."""
        return self._may_draft(row) and self._caught_up(row).expects

    def _may_draft(self, row: Row) -> bool:
        return self.settings.drafts if row.probe is None else row.probe.drafts

    def _draft(self, row: Row, forced: Sequence[int], most: int) -> list[int]:
        """What the row will probably say after the tokens that it must say."""
        if not self._may_draft(row) or most < 1 or len(forced) < len(row.forced):
            return []
        draft = self._caught_up(row)
        for token in forced:
            draft.told(token)
        proposed = draft.propose(most, self.costs)
        try:
            return row.allowed(forced, proposed) if proposed else []
        except GrammarFailed:  # the tokens that lead there say so when they are taken
            return []

    @staticmethod
    def _caught_up(row: Row) -> Draft:
        draft = row.draft
        if draft is None:
            draft = row.draft = Draft(Index(row.prompt.ids))
        for token in row.out[len(draft.index) - len(row.prompt.ids) :]:
            draft.told(token)
        return draft

    @staticmethod
    def _plan(rows: Sequence[Row]) -> None:
        """Ask every row what must come next."""
        for row in rows:
            if row.broken is None:
                try:
                    row.plan_forced()
                except Exception as error:
                    row.broken = error

    def _take_all(self, rows: Sequence[Row], tokens: Sequence[int | None]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            self._take(row, token)
        self._pace(rows, "token", 1)

    def _take(self, row: Row, token: int | None) -> None:
        """One token of one row. Whatever goes wrong here is this row's own."""
        if row.broken is not None or row.finish is not None:
            return
        try:
            if token is None:
                raise NotFinite("logits are not finite")
            events = row.take(token)
            row.times.last_token = self._clock()
            row.times.first_token = row.times.first_token or row.times.last_token
            row.emit(events)
            self.counters.tokens += 1
            self._tell(self._observer.token, row, 1)
            self.keeper.drop_suspect(row)
            if row.finish is not None:
                row.end(self.keeper.remember)
        except Exception as error:
            row.broken = error

    def _must_leave(self, row: Row) -> bool:
        stalled = row.hook is not None and row.hook.stalled(len(row.out))
        return row.cancelled or stalled or row.channel.backlog > self.settings.park_above

    def _take_out(self, batch: Batch, leaving: Sequence[Row]) -> None:
        members = list(batch.rows)
        try:
            gone, rest = self.ledger.leave(batch.cache, [place for place, row in enumerate(members) if row in leaving])
            stay = [row for row in members if row not in leaving]
            if rest is not None and len(stay) == 1 and stay[0].hold is not None:
                self.ledger.adopt(stay[0].hold.copies, rest)
        except Exception as error:
            self.batches.remove(batch)
            self._lose(batch)
            self._rebuild(members, error)
            return
        for row, cache in zip([row for row in members if row in leaving], gone, strict=True):
            row.cache = cache
        if rest is None:
            self.batches.remove(batch)
        else:
            self._place(batch, stay, rest)
        for row in members:
            if row not in leaving:
                continue
            if row.broken is not None:
                self._end_broken(row)
            elif row.finish is not None or row.cancelled:
                self.keeper.finish(row)
            else:
                row.to(Stage.PARKED, self._clock())
                self.parked.append(row)

    # --- endings

    def _end_or_rebuild(self, row: Row, error: Exception) -> None:
        """What stopped the reading of a prompt is the request's own fault, or the engine's."""
        if isinstance(error, OWN_FAULTS):
            row.broken = error
            self._end_broken(row)
        else:
            self._rebuild([row], error)

    def _end_broken(self, row: Row) -> None:
        if self._failures.broken(row):
            self._read_again(row)

    def _rebuild(self, rows: Sequence[Row], error: Exception) -> None:
        """A step failed for all these rows: read each one's tokens again, once; then give up on it."""
        for row in self._failures.failed(rows, error):
            self._read_again(row)
        if self.runner.device_failed(error):
            self._count_device_failure()
        self.ledger.sweep({row.cache for row in self.running})
        try:
            self.runner.reset(self.ledger.caches)
        except Exception as failure:
            raise EngineDead(f"the model no longer runs: {failure}") from failure

    def _count_device_failure(self) -> None:
        """After two failures of the device within a minute, pieces are halved: shorter commands are what it may need."""
        now = self._clock()
        self.counters.device_failures += 1
        self._device_failed = [*(at for at in self._device_failed if now - at <= _DEVICE_SECONDS), now]
        rule = self.pool.rule.halved()
        if len(self._device_failed) < _DEVICE_FAILURES or rule == self.pool.rule:
            return
        _log.error("the device failed %d times within a minute: pieces have %d tokens now", _DEVICE_FAILURES, rule.step)
        self.counters.halved += 1
        self._device_failed = []
        # What the others read was cut by the old rule: nothing of it may meet what is cut by the new one.
        others = [row for row in self.running if row.cache is not None or row.stage is not Stage.READING]
        self.reading = [row for row in self.reading if row not in others]
        self.batches, self.parked = [], []
        for row in others:
            row.cache = None
            if row.finish is not None:
                self.keeper.close(row, None)
            else:
                self._read_again(row)
        self.pool.recut(rule)

    def _read_again(self, row: Row) -> None:
        self.keeper.read_again(row, self._clock())
        self.reading.append(row)

    def abort(self, error: ApiError) -> None:
        """End every request, waiting ones included, and forget everything stored."""
        rows = [*self.waiting, *self.running]
        self.waiting, self.reading, self.batches, self.parked = deque(), [], [], []
        for row in rows:
            row.cache = None
        self.keeper.abort(rows, error)
