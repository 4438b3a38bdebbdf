"""Answers as token streams over a byte vocabulary with tags, and what an `AnswerStream` makes of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pooled_mlx import chat_formats
from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Finished,
    FinishReason,
    Reasoning,
    Text,
    Usage,
    check_order,
)
from pooled_mlx.core.request import Request, Thinking, Tool
from pooled_mlx.text.answer_stream import AnswerStream
from pooled_mlx.text.tokens import TokenTable

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
GLM_TAGS = (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MISTRAL_TAGS = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
GEMMA_TAGS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
LLAMA_TAGS = ("<|python_tag|>",)
HARMONY_TAGS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")

READ = Tool("read_file", parameters={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
WRITE = Tool(
    "write_file",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "string"}},
        "required": ["path", "content"],
    },
)
PATCH = Tool("apply_patch", custom=True)


def byte_table(tags: Sequence[str] = TAGS) -> TokenTable:
    """One token per byte, then the tags, then the end of the turn."""
    names = [*tags, END]
    return TokenTable(
        [bytes([byte]) for byte in range(256)] + [name.encode() for name in names],
        {256 + index: name for index, name in enumerate(names)},
        frozenset({256 + len(tags)}),
    )


def parts(text: str, tags: Sequence[str] = TAGS) -> list[str]:
    """`text` cut at its tags."""
    return [part for part in re.split("|".join(f"({re.escape(tag)})" for tag in tags), text) if part] if tags else [text]


def tokens(text: str, tags: Sequence[str] = TAGS) -> list[int]:
    """The token ids of `text`: tags as single tokens, all else byte by byte."""
    ids: list[int] = []
    for part in parts(text, tags):
        ids += [256 + tags.index(part)] if part in tags else part.encode()
    return ids


class PieceTable:
    """A vocabulary made up on the way: any piece of bytes is a token."""

    def __init__(self, tags: Sequence[str] = TAGS) -> None:
        self.bytes_of = list(byte_table(tags).bytes_of)
        self.table = TokenTable(self.bytes_of, byte_table(tags).name_of_added, byte_table(tags).eos_ids)

    def token(self, piece: bytes) -> int:
        """The id of a new token for `piece`."""
        self.bytes_of.append(piece)
        return len(self.bytes_of) - 1


@dataclass
class Outcome:
    """What came of one answer. `events` are joined: no two neighbours of one kind."""

    events: list[Event]
    reason: FinishReason
    stop: str | None
    notes: tuple[str, ...]
    reasoning_tokens: int = 0
    raw_events: list[Event] = field(default_factory=list[Event])

    @property
    def text(self) -> str:
        """The answer text."""
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def reasoning(self) -> str:
        """The thinking."""
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Complete calls: name and decoded arguments (raw for text that is not JSON)."""
        return [(name, decoded(arguments)) for name, arguments in self.raw_calls]

    @property
    def raw_calls(self) -> list[tuple[str, str]]:
        """Complete calls: name and arguments as they went out."""
        found: list[tuple[str, str]] = []
        name, arguments = "", ""
        for event in self.events:
            if isinstance(event, CallStart):
                name, arguments = event.name, ""
            elif isinstance(event, CallArguments):
                arguments += event.text
            elif isinstance(event, CallEnd):
                found.append((name, arguments))
        return found


def decoded(arguments: str) -> Any:
    """JSON where it is JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with neighbouring fragments put together."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            found[-1] = CallArguments(last.index, last.text + event.text)
        else:
            found.append(event)
    return found


def call_ids() -> Callable[[], str]:
    """Ids call-0, call-1, …"""
    count = itertools.count()
    return lambda: f"call-{next(count)}"


def stream_of(
    table: TokenTable,
    chat_format: str,
    request: Request,
    *,
    thinking: bool = False,
    constrained: bool = False,
) -> AnswerStream:
    """An answer stream with plain call ids."""
    return AnswerStream(
        table,
        chat_formats.get(chat_format),
        request,
        reasoning_open=thinking,
        new_call_id=call_ids(),
        constrained=constrained,
    )


def says(
    text: str | Sequence[int],
    chat_format: str = "qwen3_coder",
    tools: Sequence[Tool] = (READ,),
    *,
    tags: Sequence[str] = TAGS,
    table: TokenTable | None = None,
    thinking: bool = False,
    may_think: bool = False,
    constrained: bool = False,
    ends: Literal["stop", "length", "context_full"] = "stop",
    **request: Any,
) -> Outcome:
    """The outcome of a model that says `text` (or these tokens) and then ends its turn.

    `thinking`: the prompt has opened a thought. `may_think`: thinking is on, and the model opens its thought itself.
    """
    asked = Request("r", (), tools=tuple(tools), thinking=Thinking(on=thinking or may_think), **request)
    stream = stream_of(table or byte_table(tags), chat_format, asked, thinking=thinking, constrained=constrained)
    events: list[Event] = []
    for token in tokens(text, tags) if isinstance(text, str) else text:
        events += stream.feed(token)
        if stream.stop is not None:
            break
    events += stream.finish(ends)
    check_order([*events, Finished("stop", Usage())])
    outcome = Outcome(joined(events), stream.finish_reason(ends), stream.stop, stream.notes, stream.reasoning_tokens, events)
    check_parsed(stream, outcome)
    return outcome


def check_parsed(stream: AnswerStream, outcome: Outcome) -> None:
    """The stream's own record says the same as its events."""
    text, reasoning, calls = stream.parsed()
    assert (text, reasoning) == (outcome.text, outcome.reasoning)
    assert [(call.name, call.arguments) for call in calls] == outcome.raw_calls


def xml_call(name: str, /, **arguments: str) -> str:
    """A call in Qwen's XML, values as raw text."""
    blocks = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{blocks}</function>\n</tool_call>"


def json_call(name: str, /, **arguments: Any) -> str:
    """A call in Hermes JSON."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
