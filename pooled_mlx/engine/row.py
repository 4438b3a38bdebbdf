"""One running request, as the engine thread sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np

from pooled_mlx.core.cuts import Piece
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import Event, Failed, Finished, Usage
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.runner import SamplingParameters, Shape
from pooled_mlx.engine.channel import Channel
from pooled_mlx.engine.drafts import Draft
from pooled_mlx.engine.pool import Boundary, Lease, Match, Segment
from pooled_mlx.grammar.match import Constraint
from pooled_mlx.prompt.prompt import Prompt
from pooled_mlx.text.answer_stream import AnswerStream

_log = logging.getLogger("pooled.engine")

EndReason = Literal["stop", "length", "context_full"]
"""Why the engine stopped a row; what the client reads is decided by the answer (it may have ended with calls)."""


_HOOK_BIAS = 1e4


class Stage(IntEnum):
    """Where a row is on its way. It goes back to READING from any stage but OVER, when its cache was lost."""

    WAITING = 0
    READING = 1
    WRITING = 2
    PARKED = 3
    OVER = 4


_NEXT = {
    Stage.WAITING: {Stage.READING, Stage.OVER},
    Stage.READING: {Stage.READING, Stage.WRITING, Stage.OVER},
    Stage.WRITING: {Stage.READING, Stage.PARKED, Stage.OVER},
    Stage.PARKED: {Stage.READING, Stage.WRITING, Stage.OVER},
    Stage.OVER: set[Stage](),
}


class Hook(Protocol):
    """What bends the answer of one row from outside: scripted answers, and faults that tests ask for."""

    def shape(self, position: int, ahead: int) -> tuple[int | None, bool]:
        """The token to prefer at answer token `position`, `ahead` of those before it not taken yet, and whether the logits
        are to be NaN. May raise: that ends the row."""
        ...

    def take(self, token: int, position: int) -> None:
        """The row takes `token` as answer token `position`. May raise: that ends the row."""
        ...

    def stalled(self, position: int) -> bool:
        """True when the row is to stop as if nobody read it."""
        ...


@dataclass(slots=True)
class Times:
    """Seconds of the loop's clock, 0 for what has not happened."""

    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    parked: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a row may say: how it draws, what ends it, when its thought is closed, and whether its length is the context's."""

    sampling: SamplingParameters
    eos_ids: frozenset[int] = frozenset()
    close_thinking_id: int | None = None
    thinking_budget: int | None = None
    context_limited: bool = False


@dataclass(slots=True, eq=False)
class Hold:
    """What a running row stands on, and how far it is with its prompt.

    `parent` is the stored segment at whose end its next one begins; `match` what it resumed from, None until it was restored;
    `own` the first segment that it added; `copies` the entries of those whose very bits its cache has. `claim` is the buffer
    set aside for it, `spare_tokens` the room beyond its prompt. `pieces` are still to be read; at `fork` a state is kept for
    others; `parted_at` is the token at which it left every stored prompt. `at_cut`: a cold prompt would stop where it is as
    well. `suspect` is where it resumed when its output was not finite, until it is known whether that was the cause.
    """

    lease: Lease | None
    parent: Segment
    match: Match | None = None
    own: Segment | None = None
    suspect: Segment | None = None
    copies: list[Any] = field(default_factory=list)
    claim: int | None = None
    spare_tokens: int = 0
    pieces: list[Piece] = field(default_factory=list)
    fork: int | None = None
    parted_at: int | None = None
    at_cut: bool = False

    @property
    def source(self) -> Segment | None:
        """The segment that it resumed from or in."""
        match = self.match or Match()
        return match.partial[0] if match.partial is not None else match.parent

    def release(self) -> None:
        """Give the path back to the pool."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


@dataclass(slots=True, eq=False)
class Probe:
    """What a check sees of its row: the logits after the prompt, float32 `[vocab]`, and the tokens of the answer. With `drafts`
    its answer is drafted whatever the settings say, without them it never is.

    A row with a probe is nobody's request: it is counted and reported nowhere, and nothing of it is remembered but its
    segments, until `Loop.forget`.
    """

    logits: np.ndarray[Any, Any] | None = None
    tokens: list[int] = field(default_factory=list)
    drafts: bool = False


@dataclass(slots=True, eq=False)
class Row:
    """Everything about one running request. Owned by the engine thread from submission on.

    `out` are the tokens reported so far. `position` counts the tokens in the row's cache: prompt and `out`, but for those that
    are `unread`. `cache` is the number of the cache it is in, which other rows may
    share, `hold` what it stands on in the pool. `projected_bytes` is what it takes at its longest, alone. `broken` is what
    went wrong with it in this turn. `retried`: a step failed for it before; `cold`: it must not resume from anything.
    """

    prepared: Prepared
    prompt: Prompt
    channel: Channel
    answer: AnswerStream
    bounds: Bounds
    max_tokens: int
    projected_bytes: int = 0
    constraint: Constraint | None = None
    hook: Hook | None = None
    forced: list[int] = field(default_factory=list)
    probe: Probe | None = None

    stage: Stage = Stage.WAITING
    times: Times = field(default_factory=Times)
    out: list[int] = field(default_factory=list)
    cache: int | None = None
    hold: Hold | None = None
    draft: Draft | None = None
    position: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    cache_note: str = ""
    broken: Exception | None = None
    finish: EndReason | None = None
    retried: bool = False
    cold: bool = False

    @property
    def id(self) -> str:
        """The request's id."""
        return self.prepared.request.id

    @property
    def ids(self) -> np.ndarray:
        """What must be read: the prompt, and the tokens reported so far as well."""
        if not self.out:
            return self.prompt.ids
        return np.concatenate([self.prompt.ids, np.asarray(self.out, np.uint32)])

    @property
    def unread(self) -> list[int]:
        """The last of `out`, which its cache does not hold yet. Where there are none, the next token is chosen already."""
        count = len(self.prompt.ids) + len(self.out) - self.position
        return self.out[-count:] if count else []

    @property
    def is_over(self) -> bool:
        """True when it says nothing more."""
        return self.finish is not None or self.broken is not None

    @property
    def is_side(self) -> bool:
        """True for what looks like a one-off request (a title, a summary): no tools, and no turn of the model yet."""
        request = self.prepared.request
        return not request.tools and all(turn.role != "assistant" for turn in request.turns)

    @property
    def opening_tokens(self) -> int:
        """The tokens before the model's first turn: what other conversations may begin with as well."""
        turns, prompt = self.prepared.request.turns, self.prompt
        if all(turn.role != "assistant" for turn in turns):
            return len(prompt.ids)
        answers = [start for start, index in prompt.turns if turns[index].role == "assistant"]
        return min(answers, default=prompt.system_end)

    def boundary_at(self, end: int, *, fork: bool = False) -> Boundary:
        """What ends at token `end` of the prompt; `fork` says that others part from it there, if nothing else ends."""
        prompt = self.prompt
        if end > len(prompt.ids):
            # What follows an answer: a tool result where it made calls, else the user's next turn.
            return "turn" if self.answer.parsed()[2] else "user"
        if end == prompt.system_end:
            return "system"
        turns = self.prepared.request.turns
        for start, index in prompt.turns:
            if start == end:
                return "user" if turns[index].role == "user" else "turn"
        if end in prompt.boundaries or end >= len(prompt.ids):
            return "turn"
        return "fork" if fork else "inside"

    @property
    def cancelled(self) -> bool:
        """True once the consumer has gone."""
        return self.channel.cancelled

    @property
    def ended(self) -> bool:
        """True once the consumer has its last event."""
        return self.stage is Stage.OVER

    @property
    def needs_sync(self) -> bool:
        """True when the next token cannot be chosen before the last one is read."""
        return self.constraint is not None or self._thought_is_spent(unread=1)

    def to(self, stage: Stage, now: float = 0.0) -> None:
        """The one place where a row's stage changes. Going back to READING forgets what its cache held: prompt and `out` are
        read again; the counts of a prompt that was read once stay.
        """
        assert stage in _NEXT[self.stage], f"a row cannot go from {self.stage.name} to {stage.name}"
        if stage is Stage.READING:
            self.times.started = self.times.started or now
            self.cache, self.position = None, 0
            if self.stage is not Stage.WAITING:
                self.forced, self.draft = [], None
            if not self.out:
                self.cached_tokens = self.prefilled_tokens = 0
        elif stage is Stage.PARKED:
            self.times.parked = now
        self.stage = stage

    def take(self, token: int) -> list[Event]:
        """Report `token`: constraint, hook, text. Returns its events and sets `finish` when the answer is over.

        Raises `GrammarFailed` when the constraint cannot go on, and what the hook raises.
        """
        if self.hook is not None:
            self.hook.take(token, len(self.out))
        self.out.append(token)
        if token in self.bounds.eos_ids:
            self.finish = "stop"
            return []
        if self.constraint is not None:
            self.constraint.consume(token)
        events = self.answer.feed(token)
        if self.answer.stop is not None:
            self.finish = "stop"
        elif len(self.out) >= self.max_tokens:
            self.finish = "context_full" if self.bounds.context_limited else "length"
        return events

    def plan_forced(self) -> None:
        """Queue what must come next whatever the model says: grammar's forced tokens, or the end of a spent thought.

        Raises `GrammarFailed`.
        """
        if self.forced or self.finish is not None:
            return
        if self.constraint is not None:
            if self.constraint.stopped() and not self.bounds.eos_ids:
                self.finish = "stop"
                return
            self.forced = self._due(self.constraint)
        if not self.forced and self._thought_is_spent():
            assert self.bounds.close_thinking_id is not None
            self.forced = [self.bounds.close_thinking_id]

    def _due(self, constraint: Constraint) -> list[int]:
        """What must come next under a constraint. Raises `GrammarFailed`."""
        eos_ids = self.bounds.eos_ids
        if constraint.stopped():
            return [min(eos_ids)] if eos_ids else []
        return [token for token in constraint.forced() if token not in eos_ids]

    def shape(self, ahead: int, words: int) -> Shape:
        """What decides the row's next token, `ahead` (0 or 1) chosen ones not taken yet; masks have `words` words.

        What goes wrong ends this row only: `broken` says it. A chosen token that was not taken leaves no room for a mask or a
        forced token: a row that needs one `needs_sync`.
        """
        token = self.forced.pop(0) if not ahead and self.forced else None
        try:
            return self._shape(ahead, words, token, self.constraint if not ahead and token is None else None)
        except Exception as failure:
            self.broken = failure
            return Shape(self.bounds.sampling, len(self.out) + ahead, token=token)

    def shapes_along(self, draft: Sequence[int], words: int) -> list[Shape]:
        """What decides the next token, and the one after each of `draft`, none of them taken yet; fewer where the draft cannot
        go on.
        """
        constraint = self.constraint.copy() if self.constraint is not None and draft else self.constraint
        shapes: list[Shape] = []
        due = list(self.forced)
        try:
            for place in range(len(draft) + 1):
                if constraint is not None and not due:
                    due = self._due(constraint)
                token = due.pop(0) if due else None
                shapes.append(self._shape(place, words, token, constraint if token is None else None))
                if place == len(draft) or token not in (None, draft[place]):
                    break
                if constraint is not None:
                    constraint.consume(draft[place])
        except Exception as failure:
            if not shapes:
                raise
            _log.debug("request %s: its draft cannot go on: %s", self.id, failure)
        return shapes

    def allowed(self, forced: Sequence[int], draft: Sequence[int]) -> list[int]:
        """The first of the `draft` tokens, after `forced` ones, that the row may say."""
        bounds = self.bounds
        stops = bounds.eos_ids | ({bounds.close_thinking_id} if bounds.close_thinking_id is not None else set())
        most = next((place for place, token in enumerate(draft) if token in stops), len(draft))
        constraint = self._ahead(forced)
        if constraint is not None and most:
            most = constraint.taken(draft[:most])
        return list(draft[:most])

    def _ahead(self, forced: Sequence[int]) -> Constraint | None:
        """A copy of the constraint as it will be after these tokens."""
        if self.constraint is None:
            return None
        constraint = self.constraint.copy()
        for token in forced:
            constraint.consume(token)
        return constraint

    @property
    def bend(self) -> tuple[bool, bool]:
        """What of a shape may change with any token beside its mask: whether a thought is open, and whether it must end."""
        return self.answer.in_reasoning, self._thought_is_spent()

    def _shape(self, ahead: int, words: int, token: int | None, constraint: Constraint | None) -> Shape:
        """See `shape`; `constraint` as it is there, None without one. May raise."""
        bounds, position = self.bounds, len(self.out) + ahead
        bias: tuple[tuple[int, float], ...] = ()
        poison, allowed = False, None
        if self.hook is not None and self.finish is None:
            wanted, poison = self.hook.shape(position, ahead)
            bias = ((wanted, _HOOK_BIAS),) if wanted is not None else ()
        if constraint is not None and not self.is_over:
            allowed = np.zeros(words, np.uint32)
            constraint.fill_mask(allowed)
        close = bounds.close_thinking_id if self.answer.in_reasoning and bounds.eos_ids else None
        ends = tuple(sorted(bounds.eos_ids)) if close is not None else ()
        return Shape(bounds.sampling, position, bias, poison, close, ends, allowed, token)

    def _thought_is_spent(self, unread: int = 0) -> bool:
        """True when the thinking budget is used up, `unread` chosen tokens included, and the thought can be closed."""
        budget = self.bounds.thinking_budget
        if budget is None or self.bounds.close_thinking_id is None or not self.answer.in_reasoning:
            return False
        return self.answer.reasoning_tokens + unread >= budget

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.prompt.ids),
            completion_tokens=len(self.out),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.answer.reasoning_tokens,
            drafted_tokens=self.draft.drafted if self.draft is not None else 0,
            accepted_tokens=self.draft.accepted if self.draft is not None else 0,
        )

    def emit(self, events: list[Event]) -> None:
        """Send events to the consumer."""
        for event in events:
            self.channel.put(event)

    def end(self, remember: Callable[[Row], None]) -> None:
        """Send the rest of the answer and `Finished`.

        `remember` is called before that: a client may send the answer back at once.
        """
        if self.ended:
            return
        assert self.finish is not None
        rest = self.answer.finish(self.finish)
        last = Finished(self.answer.finish_reason(self.finish), self.usage(), self.answer.stop, self.cache_note)
        remember(self)
        self.to(Stage.OVER)
        self.emit([*rest, last])

    def fail(self, error: ApiError) -> None:
        """Send `Failed`."""
        if not self.ended:
            self.to(Stage.OVER)
            self.channel.put(Failed(error))


Pace = Callable[[Sequence[Row], Literal["token", "prefill"], int], None]
"""Told that rows took so many tokens, or read so many of a prompt; may take its time (scripted answers)."""
