"""Whatever goes wrong, the answer has the API's error shape, the right status and the right retry headers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from pooled_mlx.core.errors import ApiError, ErrorKind, engine_failed, not_ready, queue_full
from pooled_mlx.core.events import Failed, Finished, Prefill, Queued, Reasoning, Text, Usage
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request
from pooled_mlx.server.context import ServerContext
from pooled_mlx.server.hooks import Hooks
from tests.api.live import CHAT, Live, chat_body, connect, frames, post, running
from tests.fakes import FakeGeneration

JSON = {"content-type": "application/json"}


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with running(body_limit_bytes=2_000_000) as server:
        yield server


def check_error(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    "body", [b"", b'{"model":', b"[]", b"5", b"null", b'{"messages":"hi"}', b'{"messages":[]}', b'{"messages":5}', b"{}"]
)
async def test_malformed_bodies(live: Live, body: bytes) -> None:
    response = await live.http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert check_error(response.json())["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("depth", [300, 5_000, 100_000])
async def test_deep_nesting(live: Live, depth: int) -> None:
    body = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    assert (await live.http.post(CHAT, content=body, headers=JSON)).status_code == 400
    assert (await live.chat()).status_code == 200


async def test_nan_is_refused(live: Live) -> None:
    response = await live.http.post(CHAT, content=chat_body()[:-1] + b', "temperature": NaN}', headers=JSON)
    assert response.status_code == 400
    assert "NaN" in check_error(response.json())["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/", 200),
        ("DELETE", CHAT, 405),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("HEAD", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("TRACE", "/health", 405),
        ("POST", "/v1/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 404),
        ("POST", "/v1/responses/compact", 404),
        ("GET", "/static/x", 404),
    ],
)
async def test_paths_and_methods(live: Live, method: str, path: str, status: int) -> None:
    response = await live.http.request(method, path, **({"json": {}} if method == "POST" else {}))
    assert response.status_code == status
    if status >= 400 and method != "HEAD":
        check_error(response.json())
    if status == 405:
        assert response.headers["allow"]
    if path in ("/v1/completions", "/v1/embeddings"):
        assert CHAT in response.json()["error"]["message"]


async def test_a_base_url_without_v1_gets_a_hint(live: Live) -> None:
    response = await live.http.post("/chat/completions", json={})
    assert response.status_code == 404
    assert "Did you mean /v1/chat/completions?" in response.json()["error"]["message"]
    assert "twice" in (await live.http.post("/v1/v1/chat/completions", json={})).json()["error"]["message"]


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions/", "/v1/chat/completions?beta=true"])
async def test_harmless_variants_of_the_path(live: Live, path: str) -> None:
    async with connect(live.port, post(live.port, chat_body(), path)) as raw:
        status, _, body = await raw.response()
    assert status == 200
    assert json.loads(body)["object"] == "chat.completion"


async def test_too_large_by_content_length_is_refused_before_the_body(live: Live) -> None:
    async with connect(live.port, post(live.port, b"", length=2_000_001)) as raw:
        status, headers, body = await raw.response()
    assert status == 413
    assert headers["x-should-retry"] == "false"
    assert "2000001" in check_error(json.loads(body))["message"]


async def test_the_answer_to_a_large_body_can_be_read(live: Live) -> None:
    response = await live.http.post(CHAT, content=b"x" * 20_000_000, headers=JSON)
    assert response.status_code == 413
    check_error(response.json())


async def test_too_large_in_chunks(live: Live) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 50_000

    response = await live.http.post(CHAT, content=chunks(), headers=JSON)
    assert response.status_code == 413
    check_error(response.json())
    assert (await live.chat()).status_code == 200


async def test_a_large_body_to_a_wrong_path_can_be_read(live: Live) -> None:
    response = await live.http.post("/v1/nothing", content=b"1" * 1_900_000, headers=JSON)
    assert response.status_code == 404


async def test_a_body_that_never_arrives() -> None:
    async with running(body_timeout_seconds=0.05) as live, connect(live.port, post(live.port, b'{"me', length=100)) as raw:
        status, _, body = await raw.response()
        assert status == 400
        assert "0.05 seconds" in check_error(json.loads(body))["message"]


async def test_compressed_bodies_are_refused(live: Live) -> None:
    response = await live.http.post(CHAT, content=b"\x1f\x8b", headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 400
    assert "gzip" in check_error(response.json())["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (queue_full(8), 429, "rate_limit_exceeded", "5"),
        (not_ready("The model is loading (41%)."), 503, "server_error", "5"),
        (engine_failed("The engine has stopped."), 500, "server_error", None),
    ],
)
async def test_refused_at_the_queue(
    live: Live, error: ApiError, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    live.engine.submit_error = error
    response = await live.chat(stream=stream)
    assert response.status_code == status
    assert check_error(response.json())["type"] == kind
    assert response.headers.get("retry-after") == retry_after
    assert "x-should-retry" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_is_a_neutral_500(live: Live, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Request) -> None:
        raise RuntimeError(f"secret {request.turns[0].text}")

    live.engine.prepare_hook = fail
    response = await live.chat(stream=stream)
    assert response.status_code == 500
    error = check_error(response.json())
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert [record.name for record in caplog.records if record.levelno >= logging.ERROR] == ["pooled.server"]


FAILURES: list[tuple[Any, int]] = [
    (Failed(engine_failed("The model produced NaN.")), 500),
    (Failed(ApiError(ErrorKind.NO_PROGRESS, "No progress.")), 504),
    (Failed(not_ready("The engine restarts.")), 503),
    (RuntimeError("the stream broke"), 500),
    (queue_full(3), 429),
]


@pytest.mark.parametrize(("failure", "status"), FAILURES)
@pytest.mark.parametrize("before", [(), (Prefill(1, 9, 0),), (Text("Half an"),), (Reasoning("Hm"), Text("a"))])
async def test_engine_failure(live: Live, failure: Any, status: int, before: Any) -> None:
    live.engine.script(*before, failure)
    whole = await live.chat()
    assert whole.status_code == status
    expected = check_error(whole.json())
    live.engine.script(*before, failure)
    response = await live.chat(stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    got = frames(response.text)
    assert check_error(json.loads(got[-1].removeprefix("data: "))) == expected
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text
    assert len(got) == 2 + sum(not isinstance(event, Prefill) for event in before)
    assert (await live.chat()).status_code == 200


async def test_the_sdk_raises_on_an_error_chunk(live: Live) -> None:
    live.engine.script(Text("Half"), Failed(engine_failed("The model produced NaN.")))
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
        with pytest.raises(openai.APIError, match="NaN"):
            async for _ in stream:
                pass


async def test_a_stream_of_events_without_an_end(live: Live) -> None:
    class Endless:
        def cancel(self) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[Any]:
            yield Text("x")

    live.engine.submit = lambda prepared: Endless()  # type: ignore[assignment, method-assign, return-value]
    assert (await live.chat()).status_code == 500
    assert "without a result" in (await live.chat(stream=True)).text


@pytest.mark.parametrize("stream", [False, True])
async def test_no_progress_is_given_up(stream: bool) -> None:
    async with running(progress_timeout_seconds=0.05) as live:
        live.engine.hold()
        request = asyncio.create_task(live.chat(stream=stream))
        generation = await live.engine.next_generation()
        generation.emit(Prefill(10, 100, 0))
        response = await request
        assert generation.cancelled.is_set()
        assert response.status_code == (200 if stream else 504)
        error = json.loads(frames(response.text)[-1].removeprefix("data: ")) if stream else response.json()
        assert "no progress for 0.05 seconds" in check_error(error)["message"]


async def test_waiting_in_the_queue_is_no_lack_of_progress() -> None:
    async with running(progress_timeout_seconds=0.02, keep_alive_seconds=0.02) as live:
        live.engine.script(Queued(1))
        async with live.http.stream("POST", CHAT, json=json.loads(chat_body(stream=True))) as response:
            generation = await live.engine.next_generation()
            lines = response.aiter_lines()
            seen = 0
            async for line in lines:
                seen += line == ": queued, 1 ahead"
                if seen == 5:
                    break
            generation.emit(Text("x"), Finished("stop", Usage(9, 1)))
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


async def test_an_event_that_cannot_be_rendered_ends_the_stream_with_an_error(live: Live, caplog: Any) -> None:
    live.engine.script(Text("a"), Text(object()), Text("b"))  # type: ignore[arg-type]
    response = await live.chat(stream=True)
    assert check_error(json.loads(frames(response.text)[-1].removeprefix("data: ")))["type"] == "server_error"
    assert "could not be rendered" in caplog.text


async def test_two_hundred_at_once() -> None:
    """The bounded queue answers what it cannot take; nobody gets a 500."""
    async with running() as live:
        live.engine.hold()
        submit = live.engine.submit

        def bounded(prepared: Prepared) -> FakeGeneration:
            if len(live.engine.generations) >= 12:
                raise queue_full(8)
            return submit(prepared)

        live.engine.submit = bounded  # type: ignore[method-assign]
        requests = [asyncio.create_task(live.chat(stream=number % 2 == 0)) for number in range(200)]
        for _ in range(12):
            generation = await live.engine.next_generation()
            generation.finish()
        statuses = [(await request).status_code for request in requests]
        assert sorted(set(statuses)) == [200, 429]
        assert statuses.count(200) == 12


async def test_a_hook_that_fails_does_not_leave_a_request_running(live: Live, caplog: Any) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("hook")

    context: ServerContext = live.app.extensions["pooled"]
    context.hooks = Hooks(watch=fail, finished=fail)  # type: ignore[arg-type]
    assert (await live.chat()).status_code == 500
    while context.links:
        await asyncio.sleep(0)
    assert not context.exchanges
    assert live.engine.generations[0].cancelled.is_set()
    assert "could not be noted" in caplog.text
