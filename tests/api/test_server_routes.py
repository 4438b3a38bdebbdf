"""The endpoints beside generation, the hooks, and the places where other wire formats plug in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from pooled_mlx.api.chat_completions import EDGE, ChatCompletions
from pooled_mlx.api.edge import Edge
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.api.routes import CountRoute, ExtraRoute
from pooled_mlx.core.errors import ApiError, ErrorKind, queue_full
from pooled_mlx.core.events import Event, Finished, Prefill, Text, Usage
from pooled_mlx.server.hooks import Hooks
from pooled_mlx.server.request_log import client_label
from tests.api.live import CHAT, EDGES, running

ANTHROPIC = {"anthropic-version": "2023-06-01", "x-api-key": "k"}
USER = {"messages": [{"role": "user", "content": "one two three"}]}


class Other(ChatCompletions):
    """Chat Completions with another error shape: stands for the Messages API."""

    def error(self, error: ApiError) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        status = 529 if error.kind is ErrorKind.QUEUE_FULL else error.kind.status
        return status, {"type": "error", "error": {"type": error.kind.name.lower(), "message": error.message}}, {}


OTHER = Other()
BOTH = {**EDGES, "/v1/messages": OTHER}


async def test_models_in_openai_shape() -> None:
    async with running() as live:
        listed = (await live.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        (entry,) = listed["data"]
        assert entry == {
            "id": "pooled/fake-1b",
            "object": "model",
            "created": 1_760_000_000,
            "owned_by": "pooled",
            "type": "model",
            "display_name": "Fake 1B",
            "created_at": "2025-10-09T08:53:20Z",
            "thinking": False,
            "max_model_len": 32_768,
            "context_length": 32_768,
            "max_context_length": 32_768,
        }
        for model_id in ("pooled", "pooled/fake-1b", "pooled%2Ffake-1b"):
            assert (await live.http.get(f"/v1/models/{model_id}")).json() == entry
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="k") as sdk:
            assert [model.id async for model in sdk.models.list()] == ["pooled/fake-1b"]
            assert (await sdk.models.retrieve("pooled/fake-1b")).owned_by == "pooled"


@pytest.mark.parametrize("headers", [ANTHROPIC, {"x-api-key": "k"}, {"anthropic-version": "1", "authorization": "Bearer k"}])
async def test_models_in_anthropic_shape(headers: dict[str, str]) -> None:
    async with running(edges=BOTH) as live:
        listed = (await live.http.get("/v1/models?limit=1000", headers=headers)).json()
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "pooled/fake-1b", "pooled/fake-1b")
        (entry,) = listed["data"]
        assert (entry["type"], entry["id"], entry["display_name"]) == ("model", "pooled/fake-1b", "Fake 1B")
        assert entry["created_at"] == "2025-10-09T08:53:20Z"
        assert entry["max_model_len"] == 32_768
        assert (await live.http.get("/v1/models/pooled", headers=headers)).json() == entry


async def test_both_shapes_are_one_whichever_key_comes() -> None:
    async with running(edges=BOTH) as live:
        for path in ("/v1/models", "/v1/models/pooled"):
            answers = [(await live.http.get(path, headers=headers)).json() for headers in ({}, ANTHROPIC, {"x-api-key": "k"})]
            assert answers[0] == answers[1] == answers[2]
        assert (await live.http.get("/v1/models/nothing", headers=ANTHROPIC)).json()["type"] == "error"
        assert "error" in (await live.http.get("/v1/models/nothing")).json()


async def test_the_anthropic_sdk_reads_the_models() -> None:
    async with running(edges=BOTH) as live, AsyncAnthropic(base_url=live.url, api_key="k") as sdk:
        assert [model.id async for model in sdk.models.list()] == ["pooled/fake-1b"]
        assert (await sdk.models.retrieve("pooled/fake-1b")).display_name == "Fake 1B"


async def test_unknown_models() -> None:
    async with running(edges=BOTH) as live:
        response = await live.http.get("/v1/models/gpt-4o")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        response = await live.http.get("/v1/models/gpt-4o", headers=ANTHROPIC)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found"


@pytest.mark.parametrize(
    ("path", "headers", "shape"),
    [
        ("/v1/messages/nothing", {}, "other"),
        ("/v1/messages", {}, "other"),
        ("/nothing", ANTHROPIC, "other"),
        ("/nothing", {}, "openai"),
        ("/v1/chat/nothing", ANTHROPIC, "openai"),
        ("/v1/responses/nothing", ANTHROPIC, "openai"),
        (CHAT, {"x-api-key": "k"}, "openai"),
    ],
)
async def test_the_error_shape_follows_path_and_headers(path: str, headers: dict[str, str], shape: str) -> None:
    async with running(edges=BOTH) as live:
        not_found = await live.http.get(path, headers=headers)
        assert not_found.status_code in (404, 405)
        forbidden = await live.http.get(path, headers={**headers, "origin": "null"})
        assert forbidden.status_code == 403
        for response in (not_found, forbidden):
            assert set(response.json()) == ({"type", "error"} if shape == "other" else {"error"})


async def test_the_edge_decides_the_status() -> None:
    async with running(edges=BOTH) as live:
        live.engine.submit_error = queue_full(8)
        assert (await live.http.post("/v1/messages", json=USER)).status_code == 529
        assert (await live.http.post(CHAT, json=USER)).status_code == 429


async def test_health() -> None:
    async with running(app_options={"hooks": Hooks(health=lambda: {"version": "1.2.3"})}) as live:
        response = await live.http.get("/health")
        assert response.status_code == 200
        body = response.json()
        assert (body["ok"], body["ready"], body["version"]) == (True, True, "1.2.3")
        assert {"model", "ctx", "queue", "running", "served"} <= set(body)
        for facts in ({"ready": False, "reason": "loading (41%)"}, {"ok": False, "reason": "the engine is dead"}):
            live.engine.facts |= facts
            response = await live.http.get("/health")
            assert (response.status_code, response.json()["reason"]) == (503, facts["reason"])


async def test_pool() -> None:
    async with running() as live:
        assert (await live.http.get("/pool")).json() == {"segments": [], "bytes": 0}


async def test_the_page() -> None:
    async with running(app_options={"hooks": Hooks(page="<!doctype html><p>status</p>")}) as live:
        response = await live.http.get("/")
        assert response.text == "<!doctype html><p>status</p>"
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        head = await live.http.head("/")
        assert (head.status_code, head.content) == (200, b"")
    async with running() as live:
        assert (await live.http.head("/")).status_code == 200
        assert "pooled-mlx" in (await live.http.get("/")).text


async def test_metrics() -> None:
    async with running(app_options={"hooks": Hooks(metrics=lambda: "pooled_up 1\n")}) as live:
        response = await live.http.get("/metrics")
        assert response.text == "pooled_up 1\n"
        assert response.headers["content-type"].startswith("text/plain; version=")
    async with running() as live:
        assert (await live.http.get("/metrics")).status_code == 404


async def test_counting_tokens() -> None:
    route = CountRoute("/v1/messages/count_tokens", OTHER, OTHER.parse, lambda count: {"input_tokens": count})
    async with running(edges=BOTH, app_options={"count_routes": [route]}) as live:
        response = await live.http.post("/v1/messages/count_tokens?beta=true", json=USER)
        assert response.json() == {"input_tokens": 11}
        assert live.engine.generations == []
        bad = await live.http.post("/v1/messages/count_tokens", json={"messages": []})
        assert (bad.status_code, bad.json()["type"]) == (400, "error")
        assert (await live.http.get("/v1/messages/count_tokens")).status_code == 405


async def test_extra_routes() -> None:
    def handler(fields: Mapping[str, str], query: Mapping[str, str]) -> dict[str, Any]:
        if fields["response_id"] == "gone":
            raise ApiError(ErrorKind.NOT_FOUND, "No such response.")
        return {**fields, **query}

    routes = [ExtraRoute(method, "/v1/responses/<response_id>/items", OTHER, handler) for method in ("GET", "DELETE")]
    async with running(app_options={"extra_routes": routes}) as live:
        assert (await live.http.get("/v1/responses/r1/items?a=b")).json() == {"response_id": "r1", "a": "b"}
        assert (await live.http.delete("/v1/responses/r2/items")).json() == {"response_id": "r2"}
        missing = await live.http.get("/v1/responses/gone/items")
        assert (missing.status_code, missing.json()["type"]) == (404, "error")
        assert (await live.http.put("/v1/responses/r1/items", json={})).headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    ("user_agent", "label"),
    [
        ("claude-cli/2.1.332 (external, sdk-cli)", "claude-cli"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "opencode"),
        ("OpenAI/Python 3.57.0", "OpenAI"),
        ("curl", "curl"),
        ("", "unknown"),
        ("/1.0", "unknown"),
        (None, "unknown"),
        ("a b\r\n\x1b[31m/1", "a-b----31m"),
        ("x" * 100, "x" * 40),
    ],
)
def test_client_labels(user_agent: str | None, label: str) -> None:
    assert client_label(user_agent) == label


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.request for record in caplog.records if record.name == "pooled.request"]  # type: ignore[attr-defined]


async def test_one_log_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = {"messages": [{"role": "user", "content": "tell nobody"}]}
    finished: list[dict[str, Any]] = []
    async with running(app_options={"hooks": Hooks(finished=finished.append)}) as live:
        headers = {"user-agent": "opencode/1.18.33"}
        answer: list[Event] = [Text("a whisper"), Finished("length", Usage(900, 30, 850, 12), cache_note="reused 850 of 900")]
        live.engine.script(*answer)
        live.engine.script(*answer)
        await live.http.post(CHAT, json=secret, headers=headers)
        await live.http.post(CHAT, json={**secret, "stream": True}, headers=headers)
        await live.http.post(CHAT, json={**secret, "n": 2}, headers=headers)
        while len(finished) < 3:
            await asyncio.sleep(0)
    got = lines(caplog)
    assert got == finished
    assert [(line["api"], line["client"], line["status"], line["finish"], line["stream"]) for line in got] == [
        ("chat_completions", "opencode", 200, "length", False),
        ("chat_completions", "opencode", 200, "length", True),
        ("chat_completions", "opencode", 400, "bad_request", False),
    ]
    for line in got[:2]:
        assert (line["prompt_tokens"], line["cached_tokens"], line["prefilled_tokens"]) == (900, 850, 50)
        assert (line["generated_tokens"], line["reasoning_tokens"], line["cache"]) == (30, 12, "reused 850 of 900")
    assert "opencode 200 length prompt=900 cached=850 prefilled=50 generated=30" in caplog.text
    assert "tell nobody" not in caplog.text
    assert "whisper" not in caplog.text


async def test_warnings_once_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    body = {**USER, "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}]}
    async with running() as live:
        for agent in ("a/1", "a/2", "b/1"):
            assert (await live.http.post(CHAT, json=body, headers={"user-agent": agent})).status_code == 200
    warnings = [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()]
    assert [warning.partition(":")[0] for warning in warnings] == ["a", "b"]


async def test_the_hooks_see_every_request() -> None:
    seen: list[Any] = []

    class Watch:
        def __init__(self, api: str) -> None:
            seen.append(api)

        def event(self, event: Event) -> None:
            seen.append(type(event).__name__)

        def cancelled(self) -> None:
            seen.append("over")

    hooks = Hooks(watch=Watch, refused=seen.append)
    async with running(app_options={"hooks": hooks}) as live:
        live.engine.script(Prefill(1, 2, 0), Text("x"), Finished("stop", Usage(9, 1)))
        assert (await live.chat()).status_code == 200
        assert (await live.chat(n=2)).status_code == 400
        while len(seen) < 6:
            await asyncio.sleep(0)
    assert seen == ["chat_completions", "Prefill", "Text", "Finished", "over", ErrorKind.BAD_REQUEST]


async def test_requests_side_by_side() -> None:
    """Forty at once: each gets its own answer."""
    async with running() as live:

        async def one(number: int) -> None:
            text = f"request {number}"
            response = await live.chat(messages=[{"role": "user", "content": text}], stream=number % 2 == 0)
            assert response.status_code == 200

        await asyncio.gather(*(one(number) for number in range(40)))
        assert sorted(request.turns[0].text for request in live.engine.requests) == sorted(f"request {n}" for n in range(40))
        assert len({request.id for request in live.engine.requests}) == 40


def test_an_edge_is_what_the_port_says() -> None:
    edge: Edge = EDGE
    assert json.dumps(edge.error(queue_full(3))[1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_ignored_fields_are_named_on_every_api(path: str, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    edges = {CHAT: EDGES[CHAT], "/v1/responses": ResponsesEdge(), "/v1/messages": MessagesEdge()}
    body = {"input": "hi"} if path == "/v1/responses" else {**USER, "max_tokens": 9}
    async with running(edges=edges) as live:
        for _ in range(2):
            asked = {**body, "top_p": 0.5, "seed": 7, "stream": stream}
            answer = await live.http.post(path, json=asked, headers={"user-agent": "agent/1"})
            assert answer.status_code == 200
            assert answer.headers["x-pooled-ignored"] == "top_p, seed"
        assert "x-pooled-ignored" not in (await live.http.post(path, json={**body, "top_p": 1, "stream": stream})).headers
    lines = [record.getMessage() for record in caplog.records if "no influence" in record.getMessage()]
    assert len(lines) == 2
