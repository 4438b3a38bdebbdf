"""The whole answer: a fold of the event stream, used by every non-streaming response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Failed,
    Finished,
    FinishReason,
    Reasoning,
    Text,
    Usage,
)
from pooled_mlx.core.request import ToolCall


@dataclass(slots=True)
class Answer:
    """Everything one finished request produced.

    `calls` are the complete calls, `cut_call` is the one that the token limit cut off. `parts` keeps the order in which
    reasoning, text and calls began, as (kind, index): kind "reasoning" or "text" indexes `texts`, "call" indexes `calls`.
    """

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    cut_call: ToolCall | None = None
    finish_reason: FinishReason = "stop"
    stop: str | None = None
    usage: Usage = field(default_factory=Usage)
    cache_note: str = ""
    parts: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    texts: list[str] = field(default_factory=list[str])


class Fold:
    """Collects events into an `Answer`; `add` raises the `ApiError` of a `Failed` event."""

    def __init__(self) -> None:
        self.answer = Answer()
        self._open: CallStart | None = None
        self._arguments: list[str] = []
        self._chunks: list[list[str]] = []

    def add(self, event: Event) -> None:
        """Take the next event."""
        answer = self.answer
        if isinstance(event, Text | Reasoning):
            kind = "text" if isinstance(event, Text) else "reasoning"
            if not answer.parts or answer.parts[-1][0] != kind:
                answer.parts.append((kind, len(self._chunks)))
                self._chunks.append([])
            self._chunks[-1].append(event.text)
        elif isinstance(event, CallStart):
            self._open, self._arguments = event, []
        elif isinstance(event, CallArguments):
            self._arguments.append(event.text)
        elif isinstance(event, CallEnd):
            answer.parts.append(("call", len(answer.calls)))
            answer.calls.append(self._call())
            self._open = None
        elif isinstance(event, Finished):
            if self._open is not None:
                answer.cut_call = self._call()
            answer.finish_reason, answer.stop = event.reason, event.stop
            answer.usage, answer.cache_note = event.usage, event.cache_note
            answer.texts = ["".join(chunks) for chunks in self._chunks]
            for kind, index in answer.parts:
                if kind == "text":
                    answer.text += answer.texts[index]
                elif kind == "reasoning":
                    answer.reasoning += answer.texts[index]
        elif isinstance(event, Failed):
            raise event.error

    def _call(self) -> ToolCall:
        assert self._open is not None
        return ToolCall(id=self._open.id, name=self._open.name, arguments="".join(self._arguments))


def fold(events: Iterable[Event]) -> Answer:
    """The answer that a complete event stream amounts to. Raises `ApiError` if the stream failed."""
    folding = Fold()
    for event in events:
        folding.add(event)
    return folding.answer
