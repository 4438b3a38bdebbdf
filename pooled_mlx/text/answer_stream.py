"""One answer, token by token: the fold from sampled ids to events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from pooled_mlx.core.events import Event, FinishReason
from pooled_mlx.core.request import Request, ToolCall
from pooled_mlx.text.detokenizer import Detokenizer
from pooled_mlx.text.event_writer import EventWriter
from pooled_mlx.text.tokens import TokenTable


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """What a format's parser is made from.

    `token_tags` are the spellings that this model has as single tokens. `reasoning_open`: the prompt ended inside a
    thinking block. `constrained`: a grammar holds the answer to the format, so nothing in it needs repair and every rule
    that guesses at a mistake is off.
    """

    request: Request
    writer: EventWriter
    token_tags: frozenset[str]
    reasoning_open: bool
    constrained: bool


class AnswerParser(Protocol):
    """Recognises reasoning, text and calls in a stream of text pieces and tags, and writes them to the setup's writer.

    The outcome must not depend on how the text is cut into pieces.
    """

    @property
    def in_reasoning(self) -> bool:
        """True while what comes next is thinking."""
        ...

    def text(self, text: str) -> None:
        """The next piece of ordinary text, not empty."""
        ...

    def tag(self, name: str) -> None:
        """One of the format's tags arrived as a token of its own."""
        ...

    def finish(self, cut: bool) -> None:
        """The answer is over; `cut` when a limit ended it, not the model."""
        ...


class AnswerFormat(Protocol):
    """The part of a chat format that an `AnswerStream` uses."""

    @property
    def tags(self) -> frozenset[str]:
        """The spellings that are tags where the model has them as tokens."""
        ...

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        ...


class AnswerStream:
    """Feeds the tokens of one answer through detokenizer, parser and stop strings.

    Streamed and whole answers are both made from these events. `stop` is the stop string that ended the answer: nothing
    more comes out and the row can end. `notes` says in words what was repaired or refused.
    """

    def __init__(
        self,
        table: TokenTable,
        chat_format: AnswerFormat,
        request: Request,
        *,
        reasoning_open: bool,
        new_call_id: Callable[[], str],
        constrained: bool = False,
    ) -> None:
        tags = chat_format.tags
        self._tag_of = {token: name for token, name in table.name_of_added.items() if name in tags}
        self._eos_ids = table.eos_ids
        self._detokenizer = Detokenizer(table)
        self._writer = EventWriter(request.stop, new_call_id)
        self._parser = chat_format.parser(
            ParserSetup(request, self._writer, frozenset(self._tag_of.values()), reasoning_open, constrained)
        )
        self._named = request.tool_choice.mode == "named"
        self.reasoning_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, None while it goes on."""
        return self._writer.stop

    @property
    def in_reasoning(self) -> bool:
        """True while the next token is thinking; false inside a call."""
        return self._parser.in_reasoning

    @property
    def notes(self) -> tuple[str, ...]:
        """What was repaired or refused so far: one short sentence each."""
        return tuple(self._writer.notes)

    def feed(self, token: int) -> list[Event]:
        """The events that `token` completes. Tokens that end the turn give none. Raises IndexError for an unknown id."""
        writer = self._writer
        if writer.stop is not None or token in self._eos_ids:
            return []
        tag = self._tag_of.get(token)
        if tag is None:
            if self._parser.in_reasoning:
                self.reasoning_tokens += 1
            text = self._detokenizer.add(token)
            if text:
                self._parser.text(text)
        else:
            self._flush_character()
            self._parser.tag(tag)
        return writer.take()

    def finish(self, reason: Literal["stop", "length", "context_full"]) -> list[Event]:
        """The last events. After "stop" an unfinished call is completed or given back as text; a limit leaves it open."""
        if self._writer.stop is None:
            self._flush_character()
            self._parser.finish(reason != "stop")
            self._writer.finish()
        return self._writer.take()

    def finish_reason(self, reason: Literal["stop", "length", "context_full"]) -> FinishReason:
        """The reason for the client. A named tool ends with "stop", as OpenAI's API does."""
        if reason == "stop" and self._writer.calls and not self._named:
            return "tool_calls"
        return reason

    def parsed(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Answer text, reasoning and complete calls so far."""
        return self._writer.answer_text, self._writer.reasoning_text, tuple(self._writer.calls)

    def _flush_character(self) -> None:
        tail = self._detokenizer.end()
        if tail:
            self._parser.text(tail)
