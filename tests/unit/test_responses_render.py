"""Responses events, bodies, failures and what is stored of them."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.blobs import encode_blob
from pooled_mlx.api.edge import Parsed
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind, engine_failed, not_ready, prompt_too_long, queue_full
from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Failed,
    Finished,
    FinishReason,
    Queued,
    Reasoning,
    Text,
    Usage,
)
from tests.wire import HEADER, frames, stream

USAGE = Usage(prompt_tokens=31, completion_tokens=42, cached_tokens=20, reasoning_tokens=7)
CALL: list[Event] = [CallStart(0, "call_1", "read"), CallArguments(0, '{"path"'), CallArguments(0, ':"a"}'), CallEnd(0)]
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "apply_patch"}


def parsed(edge: ResponsesEdge | None = None, request_id: str = "9f", **fields: Any) -> Parsed:
    return (edge or ResponsesEdge()).parse({"input": "hi", **fields}, request_id=request_id, client="test")


def finished(reason: FinishReason = "stop") -> Finished:
    return Finished(reason, USAGE)


def sent(*events: Event, **fields: Any) -> list[dict[str, Any]]:
    """The data of all events; names, numbering and places are checked on the way."""
    all_frames = stream(ResponsesEdge(), parsed(**fields), events)
    for number, (name, data) in enumerate(all_frames):
        assert name == data["type"]
        assert data["sequence_number"] == number
    return [data for _, data in all_frames]


def kinds(data: list[dict[str, Any]]) -> list[str]:
    return [entry["type"].removeprefix("response.") for entry in data]


TEXT_KINDS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]


def test_text_stream() -> None:
    data = sent(Queued(1), Text("Hello"), finished())
    assert kinds(data) == ["created", "in_progress", *TEXT_KINDS, "output_item.done", "completed"]
    created = data[0]["response"]
    assert (created["id"], created["object"], created["status"], created["output"]) == (
        "resp_9f",
        "response",
        "in_progress",
        [],
    )
    assert (created["created_at"], created["model"]) == (HEADER.created, HEADER.model)
    item = data[-2]["item"]
    assert item == {
        "id": "msg_9f_0",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    for entry in data[3:7]:
        assert (entry["item_id"], entry["output_index"], entry["content_index"]) == ("msg_9f_0", 0, 0)
    final = data[-1]["response"]
    assert final["status"] == "completed"
    assert final["output"] == [item]
    assert final["usage"] == {
        "input_tokens": 31,
        "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
        "output_tokens": 42,
        "output_tokens_details": {"reasoning_tokens": 7},
        "total_tokens": 73,
    }


def test_reasoning_text_and_calls_in_order() -> None:
    fields = {"include": ["reasoning.encrypted_content"], "tools": [READ]}
    data = sent(Reasoning("th"), Reasoning("ink"), Text("ok"), *CALL, finished("tool_calls"), **fields)
    assert kinds(data) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *TEXT_KINDS,
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    output = data[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0] == {
        "id": "rs_9f_0",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "think"}],
        "encrypted_content": encode_blob("think"),
    }
    assert output[2] == {
        "id": "fc_9f_2",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "read",
        "arguments": '{"path":"a"}',
    }
    done = [entry["item"] for entry in data if entry["type"] == "response.output_item.done"]
    assert done == output


def test_without_the_include_there_is_no_blob() -> None:
    data = sent(Reasoning("think"), finished())
    assert "encrypted_content" not in data[-1]["response"]["output"][0]


def test_custom_calls() -> None:
    events = [CallStart(0, "call_1", "apply_patch"), CallArguments(0, "*** "), CallArguments(0, "Begin\n"), CallEnd(0)]
    data = sent(*events, finished("tool_calls"), tools=[PATCH])
    assert kinds(data)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert data[-1]["response"]["output"] == [
        {
            "id": "ctc_9f_0",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "apply_patch",
            "input": "*** Begin\n",
        }
    ]


def test_namespace_calls_come_back_with_the_bare_name() -> None:
    spaces = [{"type": "namespace", "name": name, "tools": [READ]} for name in ("a", "b")]
    events = [CallStart(0, "call_1", "b__read"), CallArguments(0, "{}"), CallEnd(0), finished("tool_calls")]
    item = sent(*events, tools=spaces)[-1]["response"]["output"][0]
    assert (item["name"], item["namespace"]) == ("read", "b")
    alone = [CallStart(0, "call_1", "read"), CallArguments(0, "{}"), CallEnd(0), finished("tool_calls")]
    item = sent(*alone, tools=spaces[:1])[-1]["response"]["output"][0]
    assert (item["name"], item["namespace"]) == ("read", "a")


@pytest.mark.parametrize("reason", ["length", "context_full"])
def test_a_cut_answer_is_incomplete(reason: FinishReason) -> None:
    events: list[Event] = [Text("a"), finished(reason)]
    data = sent(*events)
    whole = ResponsesEdge().whole(parsed(), HEADER, fold(events))
    assert data[-1]["type"] == "response.incomplete"
    for body in (data[-1]["response"], whole):
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["output"][0]["status"] == "incomplete"


def test_a_cut_call_is_an_incomplete_item_that_no_client_runs() -> None:
    events: list[Event] = [Text("a"), *CALL[:2], finished("length")]
    data = sent(*events, tools=[READ])
    assert kinds(data)[-3:] == ["output_item.added", "function_call_arguments.delta", "incomplete"]
    whole = ResponsesEdge().whole(parsed(tools=[READ]), HEADER, fold(events))
    for body in (data[-1]["response"], whole):
        assert [(item["type"], item["status"]) for item in body["output"]] == [
            ("message", "completed"),
            ("function_call", "incomplete"),
        ]
        assert body["output"][1]["arguments"] == '{"path"'


def test_whole_and_stream_end_with_the_same_body() -> None:
    fields: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "tools": [READ, PATCH], "metadata": {"a": "b"}}
    events: list[Event] = [Reasoning("t"), Text("a"), Reasoning("u"), Text("b"), *CALL, finished("tool_calls")]
    whole = ResponsesEdge().whole(parsed(**fields), HEADER, fold(events))
    assert sent(*events, **fields)[-1]["response"] == whole
    assert [item["id"] for item in whole["output"]] == ["rs_9f_0", "msg_9f_1", "rs_9f_2", "msg_9f_3", "fc_9f_4"]


def test_the_request_is_repeated_in_the_response() -> None:
    body = ResponsesEdge().whole(
        parsed(
            instructions="Be brief.",
            tools=[READ],
            tool_choice="required",
            reasoning={"effort": "low"},
            text={"verbosity": "low"},
            temperature=0.5,
            top_p=0.3,
            max_output_tokens=99,
            metadata={"a": "b"},
            store=False,
        ),
        HEADER,
        fold([Text("a"), finished()]),
    )
    assert body["instructions"] == "Be brief."
    assert body["tools"] == [READ]
    assert body["tool_choice"] == "required"
    assert body["reasoning"] == {"effort": "low"}
    assert body["text"] == {"format": {"type": "text"}}  # what is ignored is not said to be in force
    assert body["top_p"] is None
    assert (body["temperature"], body["max_output_tokens"], body["store"], body["metadata"]) == (0.5, 99, False, {"a": "b"})
    assert (body["error"], body["incomplete_details"], body["truncation"]) == (None, None, "disabled")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (engine_failed("The model failed."), "server_error"),
        (not_ready("shutting down"), "server_error"),
        (queue_full(8), "rate_limit_exceeded"),
        (prompt_too_long(9, 8), "context_length_exceeded"),
    ],
)
def test_failures_end_the_stream(error: ApiError, code: str) -> None:
    data = sent(Text("a"), Text("b"), Failed(error))
    assert kinds(data)[-1] == "failed"
    assert data[-1]["response"]["status"] == "failed"
    assert data[-1]["response"]["error"] == {"code": code, "message": error.message}


def test_keep_alive_is_a_real_event_with_a_rising_number() -> None:
    renderer = ResponsesEdge().renderer(parsed(), HEADER)
    started = frames(renderer.start())
    waiting = frames(renderer.keep_alive(Queued(1)))
    again = frames(renderer.keep_alive(None))
    assert [data["sequence_number"] for _, data in [*started, *waiting, *again]] == [0, 1, 2, 3]
    assert waiting[0][0] == again[0][0] == "response.in_progress"
    assert frames(renderer.comment("note")) == []


def test_errors_have_openais_shape() -> None:
    status, body, headers = ResponsesEdge().error(prompt_too_long(9, 8))
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert headers == {"x-should-retry": "false"}
    status, body, headers = ResponsesEdge().error(ApiError(ErrorKind.UNAUTHORIZED, "No."))
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    status, _, headers = ResponsesEdge().error(queue_full(8))
    assert (status, headers) == (429, {"Retry-After": "5"})


@pytest.mark.parametrize("streamed", [True, False])
def test_finished_answers_are_stored_and_failed_ones_are_not(streamed: bool) -> None:
    edge = ResponsesEdge()
    events: list[Event] = [Reasoning("t"), Text("a"), finished()]
    if streamed:
        final = stream(edge, parsed(edge), events)[-1][1]["response"]
        stream(edge, parsed(edge, "bad"), [Failed(engine_failed("x"))])
    else:
        final = edge.whole(parsed(edge), HEADER, fold(events))
    assert edge.store.retrieve("resp_9f", {}) == final
    assert [item["content"] for item in edge.store.input_items("resp_9f", {})["data"]] == [
        [{"type": "input_text", "text": "hi"}]
    ]
    assert len(edge.store) == 1


def test_routes() -> None:
    edge = ResponsesEdge()
    edge.whole(parsed(edge), HEADER, fold([Text("a"), finished()]))
    routes = {(route.method, route.path): route.handler for route in edge.extra_routes()}
    path = {"response_id": "resp_9f"}
    assert routes["GET", "/v1/responses/<response_id>"](path, {})["id"] == "resp_9f"
    assert routes["GET", "/v1/responses/<response_id>/input_items"](path, {})["object"] == "list"
    assert routes["DELETE", "/v1/responses/<response_id>"](path, {})["deleted"] is True
    assert [route.path for route in edge.count_routes()] == ["/v1/responses/input_tokens"]
