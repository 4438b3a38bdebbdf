"""What the engine says while it answers: one stream of events, rendered by every wire format.

Legal order is `LEGAL_NEXT`, a table over event classes; `check_order` enforces it in tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pooled_mlx.core.errors import ApiError

FinishReason = Literal["stop", "tool_calls", "length", "context_full"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one finished request, from the engine's own counters.

    `cached_tokens` are prompt tokens that were not pushed through the model: cached + prefilled = prompt.
    `reasoning_tokens` is part of `completion_tokens`; of `drafted_tokens` that were read ahead, `accepted_tokens` were right.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `ahead` requests are served before it."""

    ahead: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is being read: `done` of `total` tokens, `cached` of them reused."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts from 0 in each answer; `id` is unique over the life of the server."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the arguments of call `index`; all fragments join to its final arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is over. `stop` is the stop string that ended it, None otherwise. `cache_note` explains the cache."""

    reason: FinishReason
    usage: Usage
    stop: str | None = None
    cache_note: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error after it was admitted."""

    error: ApiError


Event: TypeAlias = Queued | Prefill | Reasoning | Text | CallStart | CallArguments | CallEnd | Finished | Failed

_ANY = frozenset({Queued, Prefill, Reasoning, Text, CallStart, Finished, Failed})
_ANSWER = frozenset({Reasoning, Text, CallStart, Finished, Failed})
LEGAL_NEXT: dict[type | None, frozenset[type]] = {
    None: _ANY,
    Queued: _ANY,
    Prefill: _ANY,
    Reasoning: _ANSWER,
    Text: _ANSWER,
    CallStart: frozenset({CallArguments, CallEnd, Finished, Failed}),
    CallArguments: frozenset({CallArguments, CallEnd, Finished, Failed}),
    CallEnd: _ANSWER,
    Finished: frozenset(),
    Failed: frozenset(),
}
"""Event class -> classes that may follow it. A call that `Finished` follows directly was cut off."""


def check_order(events: Iterable[Event]) -> None:
    """Raise AssertionError if `events` is not a complete legal sequence."""
    previous: type | None = None
    index = -1
    for event in events:
        if type(event) not in LEGAL_NEXT[previous]:
            raise AssertionError(f"{type(event).__name__} after {previous.__name__ if previous else 'start'}")
        if isinstance(event, CallStart):
            if event.index != index + 1:
                raise AssertionError(f"call index {event.index} after {index}")
            index = event.index
        elif isinstance(event, CallArguments | CallEnd) and event.index != index:
            raise AssertionError(f"event for call {event.index} while call {index} is open")
        previous = type(event)
    if previous not in (Finished, Failed):
        raise AssertionError("the stream has no end event")
