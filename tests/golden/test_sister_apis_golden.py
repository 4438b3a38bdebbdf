"""Responses and Messages renderings of the golden event files, and how they agree with Chat Completions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pooled_mlx.api.blobs import decode_blob
from pooled_mlx.api.edge import Edge
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError
from tests.golden.loader import case_names, check_golden, load_case, render_stream, render_whole, whole_text
from tests.wire import frames

EDGES: dict[str, type[ResponsesEdge] | type[MessagesEdge]] = {"responses": ResponsesEdge, "messages": MessagesEdge}
BOTH = pytest.mark.parametrize("api", sorted(EDGES))
CASES = pytest.mark.parametrize("name", case_names())


def edge(api: str) -> Edge:
    return EDGES[api]()


def opened(text: str) -> str:
    """`text` with each blob replaced by what is in it: the compressed bytes differ between builds of zlib."""
    return re.sub(r"pooled1\.[\w-]+", lambda found: f"pooled1.[{decode_blob(found[0])}]", text)


@BOTH
@CASES
def test_stream(api: str, name: str) -> None:
    check_golden(api, f"{name}.sse", opened(render_stream(edge(api), api, load_case(name))))


@BOTH
@CASES
def test_whole(api: str, name: str) -> None:
    check_golden(api, f"{name}.json", opened(whole_text(render_whole(edge(api), api, load_case(name)))))


def failure(name: str) -> ApiError | None:
    try:
        fold(load_case(name).events)
    except ApiError as error:
        return error
    return None


@CASES
def test_responses_streams_build_their_final_body(name: str) -> None:
    sent = [data for _, data in frames(render_stream(ResponsesEdge(), "responses", load_case(name)))]
    assert [data["sequence_number"] for data in sent] == list(range(len(sent)))
    final = sent[-1]
    whole = render_whole(ResponsesEdge(), "responses", load_case(name))
    if error := failure(name):
        assert final["type"] == "response.failed"
        assert final["response"]["error"]["message"] == error.message
        return
    assert final["response"] == whole
    built: dict[int, dict[str, Any]] = {}
    for data in sent:
        kind = data["type"].removeprefix("response.")
        if kind == "output_item.added":
            built[data["output_index"]] = {"id": data["item"]["id"], "text": "", "done": False}
        elif kind.endswith(".delta"):
            assert data["item_id"] == built[data["output_index"]]["id"]
            built[data["output_index"]]["text"] += data["delta"]
        elif kind == "output_item.done":
            built[data["output_index"]]["done"] = True
            assert data["item"] == final["response"]["output"][data["output_index"]]
    assert len(built) == len(whole["output"])
    for index, item in enumerate(whole["output"]):
        text = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
        assert built[index]["text"] == text
        assert built[index]["done"] == (item.get("status") != "incomplete" or item["type"] == "message")


@CASES
def test_messages_streams_build_the_whole_message(name: str) -> None:
    sent = frames(render_stream(MessagesEdge(), "messages", load_case(name)))
    if error := failure(name):
        assert sent[-1][0] == "error"
        assert sent[-1][1]["error"]["message"] == error.message
        return
    whole = render_whole(MessagesEdge(), "messages", load_case(name))
    blocks: list[dict[str, Any]] = []
    stopped: list[int] = []
    for event, data in sent:
        if event == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append({**data["content_block"], "json": ""})
        elif event == "content_block_delta":
            delta = data["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                delta["type"], "json"
            )
            blocks[data["index"]][field] += delta.get(field, delta.get("partial_json"))
        elif event == "content_block_stop":
            stopped.append(data["index"])
    assert stopped == list(range(len(blocks)))
    assert [event for event, _ in sent if event in ("message_start", "message_delta", "message_stop")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert sent[-2][1]["delta"]["stop_reason"] == whole["stop_reason"]
    assert sent[-2][1]["usage"] == whole["usage"]
    # A call that was cut off stays in the stream and is left out of the whole answer.
    for block, expected in zip(blocks, whole["content"], strict=False):
        assert block["type"] == expected["type"]
        for field in ("text", "thinking", "signature", "id", "name"):
            assert block.get(field) == expected.get(field)
    assert len(blocks) - len(whole["content"]) == (fold(load_case(name).events).cut_call is not None)


@pytest.mark.parametrize("name", [name for name in case_names() if failure(name) is None])
def test_the_three_apis_say_the_same(name: str) -> None:
    answer = fold(load_case(name).events)
    responses = render_whole(ResponsesEdge(), "responses", load_case(name))
    messages = render_whole(MessagesEdge(), "messages", load_case(name))
    said = [item for item in responses["output"] if item["type"] == "message"]
    assert "".join(item["content"][0]["text"] for item in said) == answer.text
    assert "".join(block["text"] for block in messages["content"] if block["type"] == "text") == answer.text
    thought = [decode_blob(block["signature"]) for block in messages["content"] if block["type"] == "thinking"]
    assert "".join(map(str, thought)) == answer.reasoning
    calls = [item["call_id"] for item in responses["output"] if item.get("call_id") and item["status"] == "completed"]
    used = [block["id"] for block in messages["content"] if block["type"] == "tool_use"]
    assert calls == used == [call.id for call in answer.calls]
    usage = messages["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == answer.usage.prompt_tokens
    assert usage["output_tokens"] == responses["usage"]["output_tokens"] == answer.usage.completion_tokens
    assert responses["usage"]["input_tokens_details"]["cached_tokens"] == usage["cache_read_input_tokens"]
