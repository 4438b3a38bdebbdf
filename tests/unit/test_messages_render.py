"""Messages events, bodies, errors and threads."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.blobs import decode_blob, encode_blob
from pooled_mlx.api.edge import Parsed
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind, bad_request, engine_failed, not_ready, prompt_too_long, queue_full
from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefill,
    Queued,
    Reasoning,
    Text,
    Usage,
)
from pooled_mlx.core.request import Turn
from tests.wire import HEADER, frames, stream

USAGE = Usage(prompt_tokens=31, completion_tokens=42, cached_tokens=20, reasoning_tokens=7)
CALL: list[Event] = [CallStart(0, "call_1", "read"), CallArguments(0, '{"path"'), CallArguments(0, ':"a"}'), CallEnd(0)]


def parsed(edge: MessagesEdge | None = None, request_id: str = "9f", **fields: Any) -> Parsed:
    body = {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], **fields}
    return (edge or MessagesEdge()).parse(body, request_id=request_id, client="test")


def finished(reason: FinishReason = "stop", stop: str | None = None) -> Finished:
    return Finished(reason, USAGE, stop)


def names(events: list[Event], **fields: Any) -> list[str]:
    sent = stream(MessagesEdge(), parsed(**fields), events)
    for name, data in sent:
        assert name == data["type"]
    return [str(name) for name, _ in sent]


def test_text_stream() -> None:
    sent = stream(MessagesEdge(), parsed(), [Queued(2), Prefill(5, 31, 20), Text("Hel"), Text("lo"), finished()])
    assert [name for name, _ in sent] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = sent[0][1]["message"]
    assert (start["id"], start["role"], start["model"], start["content"]) == ("msg_9f", "assistant", HEADER.model, [])
    assert start["usage"] == {
        "input_tokens": 31,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert sent[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert sent[-2][1]["usage"] == {
        "input_tokens": 11,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 20,
        "output_tokens": 42,
        "output_tokens_details": {"thinking_tokens": 7},
    }


def test_thinking_then_text_then_calls() -> None:
    sent = stream(MessagesEdge(), parsed(), [Reasoning("th"), Reasoning("ink"), Text("ok"), *CALL, finished("tool_calls")])
    deltas = [data["delta"] for name, data in sent if name == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "th"},
        {"type": "thinking_delta", "thinking": "ink"},
        {"type": "signature_delta", "signature": encode_blob("think")},
        {"type": "text_delta", "text": "ok"},
        {"type": "input_json_delta", "partial_json": '{"path"'},
        {"type": "input_json_delta", "partial_json": ':"a"}'},
    ]
    starts = [data for name, data in sent if name == "content_block_start"]
    assert [data["index"] for data in starts] == [0, 1, 2]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "read", "input": {}}
    assert [data["index"] for name, data in sent if name == "content_block_stop"] == [0, 1, 2]
    assert sent[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_omitted_thinking_still_has_its_signature() -> None:
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    events: list[Event] = [Reasoning("secret"), Text("ok"), finished()]
    sent = stream(MessagesEdge(), parsed(**fields), events)
    deltas = [data["delta"] for name, data in sent if name == "content_block_delta"]
    assert deltas == [
        {"type": "signature_delta", "signature": encode_blob("secret")},
        {"type": "text_delta", "text": "ok"},
    ]
    block = MessagesEdge().whole(parsed(**fields), HEADER, fold(events))["content"][0]
    assert block["thinking"] == ""
    assert decode_blob(block["signature"]) == "secret"


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, "end_turn"),
        ("stop", "ZZ", "stop_sequence"),
        ("tool_calls", None, "tool_use"),
        ("length", None, "max_tokens"),
        ("context_full", None, "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(reason: FinishReason, stop: str | None, expected: str) -> None:
    events: list[Event] = [Text("a"), finished(reason, stop)]
    delta = stream(MessagesEdge(), parsed(), events)[-2][1]["delta"]
    whole = MessagesEdge().whole(parsed(), HEADER, fold(events))
    assert delta == {"stop_reason": expected, "stop_sequence": stop}
    assert (whole["stop_reason"], whole["stop_sequence"]) == (expected, stop)


def test_whole_answer() -> None:
    events: list[Event] = [Reasoning("think"), Text("ok"), *CALL, finished("tool_calls")]
    assert MessagesEdge().whole(parsed(), HEADER, fold(events)) == {
        "id": "msg_9f",
        "type": "message",
        "role": "assistant",
        "model": HEADER.model,
        "content": [
            {"type": "thinking", "thinking": "think", "signature": encode_blob("think")},
            {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "a"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 20,
            "output_tokens": 42,
            "output_tokens_details": {"thinking_tokens": 7},
        },
    }


def test_a_cut_call_is_left_out_of_a_whole_answer_and_closed_in_a_stream() -> None:
    events: list[Event] = [Text("a"), *CALL[:2], finished("length")]
    whole = MessagesEdge().whole(parsed(), HEADER, fold(events))
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert names(events)[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_two_calls_have_blocks_of_their_own() -> None:
    second: list[Event] = [CallStart(1, "call_2", "read"), CallArguments(1, "{}"), CallEnd(1)]
    sent = stream(MessagesEdge(), parsed(), [*CALL, *second, finished("tool_calls")])
    starts = [data["content_block"]["id"] for name, data in sent if name == "content_block_start"]
    assert starts == ["call_1", "call_2"]


def test_empty_answer() -> None:
    assert names([finished()]) == ["message_start", "message_delta", "message_stop"]
    assert MessagesEdge().whole(parsed(), HEADER, fold([finished()]))["content"] == []


def test_failure_in_the_stream() -> None:
    sent = stream(MessagesEdge(), parsed(), [Text("a"), Failed(engine_failed("The model failed."))])
    assert sent[-1] == ("error", {"type": "error", "error": {"type": "api_error", "message": "The model failed."}})


def test_keep_alive_is_a_ping_and_comments_are_ignored() -> None:
    renderer = MessagesEdge().renderer(parsed(), HEADER)
    assert frames(renderer.keep_alive(Queued(1))) == [("ping", {"type": "ping"})]
    assert frames(renderer.keep_alive(None)) == [("ping", {"type": "ping"})]
    assert frames(renderer.comment("cache: 20 tokens")) == []


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (bad_request("x", "messages"), 400, "invalid_request_error"),
        (prompt_too_long(9, 8), 400, "invalid_request_error"),
        (ApiError(ErrorKind.UNAUTHORIZED, "x"), 401, "authentication_error"),
        (ApiError(ErrorKind.FORBIDDEN, "x"), 403, "permission_error"),
        (ApiError(ErrorKind.NOT_FOUND, "x"), 404, "not_found_error"),
        (ApiError(ErrorKind.METHOD_NOT_ALLOWED, "x", allow=("POST",)), 405, "invalid_request_error"),
        (ApiError(ErrorKind.TOO_LARGE, "x"), 413, "request_too_large"),
        (queue_full(8), 529, "overloaded_error"),
        (not_ready("loading"), 529, "overloaded_error"),
        (engine_failed("x"), 500, "api_error"),
        (ApiError(ErrorKind.NO_PROGRESS, "x"), 504, "timeout_error"),
    ],
)
def test_errors(error: ApiError, status: int, kind: str) -> None:
    got, body, headers = MessagesEdge().error(error)
    assert got == status
    assert body == {"type": "error", "error": {"type": kind, "message": error.message}}
    assert (headers.get("x-should-retry") == "false") == (400 <= status < 500)
    assert (headers.get("Retry-After") == "5") == (status == 529)
    assert headers.get("Allow") == ("POST" if status == 405 else None)


def test_a_thread_continues_with_everything_the_server_holds() -> None:
    edge = MessagesEdge()
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    first = parsed(edge, "one", system="Be brief.", tools=tools, thread={"type": "create"})
    stream(edge, first, [Reasoning("think"), *CALL, finished("tool_calls")])
    result = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "text"}]}]
    second = parsed(edge, "two", messages=result, thread={"type": "continue", "previous_message_id": "msg_one"})
    assert [turn.role for turn in second.request.turns] == ["system", "user", "assistant", "tool"]
    assert second.request.turns[2].reasoning == "think"
    assert second.request.tools == first.request.tools
    edge.whole(second, HEADER, fold([Text("done"), finished()]))
    third = parsed(
        edge,
        "three",
        messages=[{"role": "user", "content": "thanks"}],
        thread={"type": "continue", "previous_message_id": "msg_two"},
    )
    assert third.request.turns[-2:] == (Turn("assistant", "done"), Turn("user", "thanks"))


def test_an_unknown_thread_is_refused_with_the_code_that_makes_clients_send_everything() -> None:
    with pytest.raises(ApiError) as caught:
        parsed(thread={"type": "continue", "previous_message_id": "msg_gone"})
    status, body, _ = MessagesEdge().error(caught.value)
    assert status == 400
    assert body["error"]["details"] == {"error_code": "thread_not_found"}


def test_without_a_thread_nothing_is_kept() -> None:
    edge = MessagesEdge()
    edge.whole(parsed(edge), HEADER, fold([Text("a"), finished()]))
    stream(edge, parsed(edge), [Text("a"), finished()])
    assert len(edge.threads) == 0
