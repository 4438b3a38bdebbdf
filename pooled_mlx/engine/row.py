"""One running request, as the engine thread sees it. The only mutable value of the engine's data flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import Event, Failed, Finished, Usage
from pooled_mlx.core.ports import Prepared
from pooled_mlx.engine.channel import Channel
from pooled_mlx.engine.pool import Boundary, Lease, Segment
from pooled_mlx.grammar.match import Constraint
from pooled_mlx.prompt.prompt import Prompt
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.sampler import SamplingParameters
from pooled_mlx.runner.segments import Backing, SegmentData
from pooled_mlx.text.answer_stream import AnswerStream

if TYPE_CHECKING:
    from pooled_mlx.engine.finish import HotCache

EndReason = Literal["stop", "length", "context_full"]
"""Why the engine stopped a row; what the client reads is decided by the answer (it may have ended with calls)."""


class Script(Protocol):
    """Scripted logits of a replayed answer."""

    def next_token(self, ahead: int) -> int | None:
        """The token the script wants after the consumed ones and `ahead` more scripted ones; None past its end."""
        ...

    def consume(self, token: int) -> None:
        """The row really took `token`."""
        ...


@dataclass(slots=True, eq=False)
class Row:
    """Everything about one running request. Owned by the engine thread from submission on.

    `out` are the tokens reported so far. `position` counts the tokens in the row's caches: when the row ends, the prompt and
    `out`, unless its answer ended inside a forced run. `lower` is the token at which the next segment starts, `parent` the
    segment that ends there.

    `projected_bytes` is what it takes at its longest, alone. Its cache, should it have to grow for the prompt, gets room for
    `spare_tokens` more. `hot` is the kept cache that it was admitted to go on from.

    `at_cut`: a cold prompt would stop at `position` as well. `source` is the segment that the row resumed from or in, `own`
    the first one that it added to the pool, `parts` the payloads whose very bits its caches hold. `suspect` is where it had
    resumed when its output was not finite, until it is known whether that was the cause. `parted_at` is
    the token at which its prompt left every stored one, None where it goes on from the end of one.
    """

    prepared: Prepared
    prompt: Prompt
    channel: Channel
    answer: AnswerStream
    sampling: SamplingParameters
    max_tokens: int
    context_limited: bool
    eos_ids: frozenset[int]
    close_thinking_id: int | None = None
    thinking_budget: int | None = None
    constraint: Constraint | None = None
    script: Script | None = None
    fault: Faults | None = None
    submitted_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    out: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    caches: list[Any] | None = None
    pending: Any = None
    backing: Backing | None = None
    lease: Lease | None = None
    parent: Segment | None = None
    source: Segment | None = None
    own: Segment | None = None
    suspect: Segment | None = None
    parts: list[SegmentData] = field(default_factory=list)
    lower: int = 0
    position: int = 0
    at_cut: bool = False
    cached_tokens: int = 0
    parted_at: int | None = None
    prefilled_tokens: int = 0
    cache_note: str = ""
    decoding: bool = False
    retried: bool = False
    cold: bool = False
    parked_at: float | None = None
    broken: Exception | None = None
    ended: bool = False
    finish: EndReason | None = None
    projected_bytes: int = 0
    spare_tokens: int = 0
    hot: HotCache | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.prepared.request.id

    @property
    def ids(self) -> np.ndarray:
        """What prefill must read: the prompt, and after a rebuild the tokens reported so far as well."""
        if not self.out:
            return self.prompt.ids
        return np.concatenate([self.prompt.ids, np.asarray(self.out, np.uint32)])

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
    def needs_sync(self) -> bool:
        """True when the next token cannot be chosen before the last one is read."""
        if self.constraint is not None:
            return True
        return self._thought_is_spent(unread=1)

    def take(self, token: int) -> list[Event]:
        """Report `token`: constraint, script, text. Returns its events and sets `finish` when the answer is over.

        Raises `GrammarFailed` when the constraint cannot go on, `ScriptedFault` when a script says something else.
        """
        self.out.append(token)
        if self.script is not None:
            self.script.consume(token)
        if token in self.eos_ids:
            self.finish = "stop"
            return []
        if self.constraint is not None:
            self.constraint.consume(token)
        events = self.answer.feed(token)
        if self.answer.stop is not None:
            self.finish = "stop"
        elif len(self.out) >= self.max_tokens:
            self.finish = "context_full" if self.context_limited else "length"
        return events

    def plan_forced(self) -> None:
        """Queue what must come next whatever the model says: grammar's forced tokens, or the end of a spent thought.

        Raises `GrammarFailed`.
        """
        if self.forced or self.finish is not None:
            return
        if self.constraint is not None:
            if self.constraint.stopped():
                if not self.eos_ids:
                    self.finish = "stop"
                    return
                self.forced = [min(self.eos_ids)]
            else:
                self.forced = [token for token in self.constraint.forced() if token not in self.eos_ids]
        if not self.forced and self._thought_is_spent():
            assert self.close_thinking_id is not None
            self.forced = [self.close_thinking_id]

    def _thought_is_spent(self, unread: int = 0) -> bool:
        """True when the thinking budget is used up, `unread` chosen tokens included, and the thought can be closed."""
        budget = self.thinking_budget
        if budget is None or self.close_thinking_id is None or not self.answer.in_reasoning:
            return False
        return self.answer.reasoning_tokens + unread >= budget

    def restart(self) -> None:
        """Forget what the caches held: prompt and `out` are read again. The counts of a prompt that was read once stay."""
        self.backing = self.caches = self.pending = self.parent = self.source = self.own = None
        self.parts, self.forced = [], []
        self.lower = self.position = 0
        self.at_cut = self.decoding = False
        if not self.out:
            self.cached_tokens = self.prefilled_tokens = 0

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.prompt.ids),
            completion_tokens=len(self.out),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.answer.reasoning_tokens,
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
        self.ended = True
        self.emit([*rest, last])

    def fail(self, error: ApiError) -> None:
        """Send `Failed`."""
        if not self.ended:
            self.ended = True
            self.channel.put(Failed(error))
