"""Broken bodies of every API: a refusal in the API's own shape, or a request that can be answered; never another exception."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pooled_mlx.api.chat_completions import EDGE as CHAT
from pooled_mlx.api.edge import Edge, Parsed
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Reasoning, Text, Usage
from tests.golden.test_one_conversation import CHAT_BODY, MESSAGES_BODY, RESPONSES_BODY
from tests.wire import HEADER, frames

BODIES: dict[str, tuple[Edge, dict[str, Any]]] = {
    "chat": (CHAT, CHAT_BODY),
    "messages": (
        MessagesEdge(),
        {**MESSAGES_BODY, "thread": {"type": "create"}, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
    ),
    "responses": (
        ResponsesEdge(),
        {
            **RESPONSES_BODY,
            "include": ["reasoning.encrypted_content"],
            "previous_response_id": None,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
            "tools": [
                *RESPONSES_BODY["tools"],
                {"type": "custom", "name": "raw", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /./"}},
                {"type": "namespace", "name": "space", "tools": [{"type": "function", "name": "inner"}]},
            ],
        },
    ),
}
EVENTS: list[Event] = [
    Reasoning("a"),
    Text("b"),
    CallStart(0, "call_1", "read_file"),
    CallArguments(0, "{}"),
    CallEnd(0),
    Finished("tool_calls", Usage(1, 1)),
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        ["", "auto", "x", "\ud800", "\0", "none", "message", "function", "text", "type", "user", "resp_x", "a" * 200]
    ),
    st.sampled_from(
        [[], {}, [[]], [None], [{}], {"type": None}, {"type": "text"}, {"type": []}, {"role": "user"}, {"id": "x"}]
    ),
    st.text(max_size=8),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, child in inner:
        found += places(child, (*path, key))
    return found


def change(body: Any, path: tuple[Any, ...], how: str, value: Any) -> None:
    """Replace, remove, double or wrap the value at `path`; a path that is gone by now changes nothing."""
    owner = body
    for key in path[:-1]:
        if not isinstance(owner, dict | list) or (isinstance(owner, dict) and key not in owner):
            return
        if isinstance(owner, list) and (not isinstance(key, int) or key >= len(owner)):
            return
        owner = owner[key]
    key = path[-1]
    if isinstance(owner, dict) and key in owner:
        if how == "remove":
            del owner[key]
        else:
            owner[key] = [owner[key]] if how == "wrap" else value
    elif isinstance(owner, list) and isinstance(key, int) and key < len(owner):
        if how == "remove":
            del owner[key]
        elif how == "double":
            owner.append(copy.deepcopy(owner[key]))
        else:
            owner[key] = [owner[key]] if how == "wrap" else value


def parse_or_refusal(edge: Edge, body: Any) -> Parsed | ApiError:
    try:
        return edge.parse(body, request_id="r1", client="fuzz")
    except ApiError as error:
        return error


def check_refusal(edge: Edge, error: ApiError) -> None:
    assert error.kind is ErrorKind.BAD_REQUEST
    assert error.message
    status, shape, headers = edge.error(error)
    assert status == 400
    assert shape["error"]["message"] == error.message
    assert headers["x-should-retry"] == "false"
    json.dumps(shape, ensure_ascii=False).encode()


@pytest.mark.parametrize("api", sorted(BODIES))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_broken_body_is_refused_or_answered(api: str, data: st.DataObject) -> None:
    edge, original = BODIES[api]
    body = copy.deepcopy({"model": "m", "stream": False, **original})
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(places(body) or [("model",)]))
        change(body, path, data.draw(st.sampled_from(["replace", "remove", "double", "wrap"])), copy.deepcopy(data.draw(ODD)))
    parsed = parse_or_refusal(edge, body)
    if isinstance(parsed, ApiError):
        check_refusal(edge, parsed)
        return
    request = parsed.request
    for turn in request.turns:
        (turn.text + (turn.reasoning or "") + "".join(call.arguments for call in turn.tool_calls)).encode()
    renderer = edge.renderer(parsed, HEADER)
    streamed = renderer.start() + "".join(renderer.event(event) for event in EVENTS)
    assert frames(streamed)
    json.dumps(edge.whole(parsed, HEADER, fold(EVENTS)))


@pytest.mark.parametrize("api", sorted(BODIES))
@pytest.mark.parametrize("body", [None, 5, "x", [], {}, True, 1.5, [{}]])
def test_what_is_no_body_at_all(api: str, body: Any) -> None:
    with pytest.raises(ApiError) as caught:
        BODIES[api][0].parse(body, request_id="r1", client="fuzz")
    assert caught.value.kind is ErrorKind.BAD_REQUEST


@pytest.mark.parametrize("api", sorted(BODIES))
def test_deep_nesting_is_refused(api: str) -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    edge, original = BODIES[api]
    field = "input" if api == "responses" else "messages"
    call: Any = {"role": "user", "content": deep}
    with pytest.raises(ApiError) as caught:
        edge.parse({**original, field: [call]}, request_id="r1", client="fuzz")
    assert caught.value.kind is ErrorKind.BAD_REQUEST
