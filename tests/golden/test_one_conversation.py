"""One conversation in the words of each API: the same turns and tools for the engine."""

from __future__ import annotations

import json
from typing import Any

from pooled_mlx.api.blobs import encode_blob
from pooled_mlx.api.chat_completions import EDGE as CHAT
from pooled_mlx.api.edge import Edge
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Reasoning, Text, Usage
from pooled_mlx.core.request import Request, Thinking, ToolChoice
from tests.wire import HEADER

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}, "required": ["path"]}
FIRST = {"path": "notes/ä 🙂.md", "lines": 5}
SECOND = {"path": "b.txt"}
NOTE = "<system-reminder>Plan mode is on.</system-reminder>"

CHAT_BODY: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "The year is 2026."},
        {"role": "user", "content": [{"type": "text", "text": "Read "}, {"type": "text", "text": "both."}]},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Two files.\n",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": FIRST}},
                {"id": "c2", "type": "function", "function": {"name": "read_file", "arguments": SECOND}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "first\r\n"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "second"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": NOTE},
        {"role": "user", "content": "Thanks. Again?"},
    ],
    "tools": [{"type": "function", "function": {"name": "read_file", "description": "Read.", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "read_file"}},
    "parallel_tool_calls": False,
    "reasoning_effort": "high",
    "max_tokens": 500,
    "temperature": 0.5,
}


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


RESPONSES_BODY: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "The year is 2026."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Read "}, {"type": "input_text", "text": "both."}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": encode_blob("Two files.\n")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I will."}]},
        {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": compact(FIRST)},
        {"type": "function_call", "call_id": "c2", "name": "read_file", "arguments": compact(SECOND)},
        {"type": "function_call_output", "call_id": "c1", "output": "first\r\n"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "second"}, {"type": "input_image", "image_url": "u"}],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": NOTE},
        {"role": "user", "content": "Thanks. Again?"},
    ],
    "tools": [{"type": "function", "name": "read_file", "description": "Read.", "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": "read_file"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "high"},
    "max_output_tokens": 500,
    "temperature": 0.5,
}

MESSAGES_BODY: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "The year is 2026.", "cache_control": {}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read "}, {"type": "text", "text": "both."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": encode_blob("Two files.\n")},
                {"type": "text", "text": "I will."},
                {"type": "tool_use", "id": "c1", "name": "read_file", "input": FIRST},
                {"type": "tool_use", "id": "c2", "name": "read_file", "input": SECOND},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "first\r\n"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "second"}, {"type": "image", "source": {}}],
                },
            ],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": [{"type": "text", "text": NOTE, "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Thanks. Again?"},
    ],
    "tools": [{"name": "read_file", "description": "Read.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "read_file", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "max_tokens": 500,
    "temperature": 0.5,
}


def request(edge: Edge, body: dict[str, Any]) -> Request:
    return edge.parse({"model": "any", **body}, request_id="same", client="test").request


def test_the_three_bodies_are_one_request() -> None:
    chat = request(CHAT, CHAT_BODY)
    assert request(ResponsesEdge(), RESPONSES_BODY) == chat
    assert request(MessagesEdge(), MESSAGES_BODY) == chat
    assert [turn.role for turn in chat.turns] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert chat.turns[-1].text == f"{NOTE}\n\nThanks. Again?"
    assert (chat.tool_choice, chat.thinking) == (ToolChoice("named", "read_file"), Thinking(True, "high"))


def test_a_stored_history_is_the_same_request() -> None:
    whole = request(ResponsesEdge(), RESPONSES_BODY)
    edge = ResponsesEdge()
    items = RESPONSES_BODY["input"]
    # The first answer as this server stores it, then the rest of the conversation by reference to it.
    events: list[Event] = [Reasoning("Two files.\n"), Text("I will.")]
    for index, (call_id, arguments) in enumerate((("c1", FIRST), ("c2", SECOND))):
        events += [CallStart(index, call_id, "read_file"), CallArguments(index, compact(arguments)), CallEnd(index)]
    events.append(Finished("tool_calls", Usage(1, 1)))
    opening = edge.parse({**RESPONSES_BODY, "input": items[:2]}, request_id="one", client="test")
    edge.whole(opening, HEADER, fold(events))
    rest = {**RESPONSES_BODY, "input": items[6:], "previous_response_id": "resp_one"}
    assert request(edge, rest) == whole
