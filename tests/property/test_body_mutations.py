"""Broken bodies of every API: a refusal in the API's own shape, or a request that can be answered; never another exception."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from pooled_mlx.api.body import decode_json
from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.api.edge import Edge, Parsed
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Reasoning, Text, Usage
from tests.fuzz.cases import CHAT, MESSAGES, RESPONSES, invented_body, whole_bodies
from tests.fuzz.mutations import encode, mutate
from tests.wire import HEADER, frames

EDGES: dict[str, Edge] = {CHAT: EDGE, RESPONSES: ResponsesEdge(), MESSAGES: MessagesEdge()}
BODIES = whole_bodies()
EVENTS: list[Event] = [
    Reasoning("a"),
    Text("b"),
    CallStart(0, "call_1", "read_file"),
    CallArguments(0, "{}"),
    CallEnd(0),
    Finished("tool_calls", Usage(1, 1)),
]


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


def check(api: str, body: Any) -> None:
    edge = EDGES[api]
    note(repr(body))
    try:
        body = decode_json(encode(body))
    except ApiError as error:
        check_refusal(edge, error)
        return
    parsed = parse_or_refusal(edge, body)
    if isinstance(parsed, ApiError):
        check_refusal(edge, parsed)
        return
    request = parsed.request
    assert request.turns[-1].role != "assistant"
    assert all(turn.role != "system" for turn in request.turns[1:])
    assert request.max_output_tokens is None or 1 <= request.max_output_tokens <= 65_536
    for turn in request.turns:
        (turn.text + (turn.reasoning or "") + "".join(call.arguments for call in turn.tool_calls)).encode()
    repr(request).encode()
    renderer = edge.renderer(parsed, HEADER)
    streamed = renderer.start() + "".join(renderer.event(event) for event in EVENTS)
    assert frames(streamed.encode().decode())
    json.dumps(edge.whole(parsed, HEADER, fold(EVENTS)), ensure_ascii=False).encode()


@pytest.mark.parametrize("api", EDGES)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random=st.randoms(use_true_random=False), data=st.data())
def test_a_broken_body_is_refused_or_answered(api: str, random: Random, data: st.DataObject) -> None:
    check(api, mutate(random, data.draw(st.sampled_from(BODIES[api]))))


@pytest.mark.parametrize("api", EDGES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random=st.randoms(use_true_random=False))
def test_an_invented_body_is_refused_or_answered(api: str, random: Random) -> None:
    check(api, invented_body(random, api))


@pytest.mark.parametrize("api", EDGES)
def test_a_whole_body_is_answered(api: str) -> None:
    for body in BODIES[api]:
        assert isinstance(parse_or_refusal(EDGES[api], copy.deepcopy(body)), Parsed), body


@pytest.mark.parametrize("api", EDGES)
@pytest.mark.parametrize("body", [None, 5, "x", [], {}, True, 1.5, [{}]])
def test_what_is_no_body_at_all(api: str, body: Any) -> None:
    with pytest.raises(ApiError) as caught:
        EDGES[api].parse(body, request_id="r1", client="fuzz")
    assert caught.value.kind is ErrorKind.BAD_REQUEST


@pytest.mark.parametrize("api", EDGES)
def test_deep_nesting_is_refused(api: str) -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    field = "input" if api == RESPONSES else "messages"
    call: Any = {"role": "user", "content": deep}
    with pytest.raises(ApiError) as caught:
        EDGES[api].parse({**BODIES[api][0], field: [call]}, request_id="r1", client="fuzz")
    assert caught.value.kind is ErrorKind.BAD_REQUEST
