"""Signs of life while a request waits, is read or thinks unseen: real events on Messages and Responses, by the wall clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pooled_mlx.core.events import Prefill, Queued, Reasoning, Text
from tests.clients.apis import three_apis
from tests.fakes import FakeEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 100,
        "stream": True,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "adaptive", "display": "omitted"},
    },
    "/v1/responses": {"input": "hi", "stream": True, "reasoning": {"effort": "low"}},
}
SIGN = {"/v1/messages": "ping", "/v1/responses": "response.in_progress"}
MOST_EVENTS = 500


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def until(stream: AsyncIterator[dict[str, Any]], kind: str, seen: list[dict[str, Any]]) -> None:
    """Read up to the next event of this kind."""
    for _ in range(MOST_EVENTS):
        seen.append(await anext(stream))
        if seen[-1]["type"] == kind:
            return
    raise AssertionError(f"no {kind} among {MOST_EVENTS} events")


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_every_kind_of_silence_has_events(path: str) -> None:
    engine = FakeEngine()
    engine.hold()
    seen: list[dict[str, Any]] = []
    async with (
        three_apis(engine, keep_alive_seconds=0.01) as live,
        live.http.stream("POST", path, json=BODIES[path]) as response,
    ):
        generation = await engine.next_generation()
        stream = events(response)
        for waiting in (Queued(2), Prefill(10, 100, 0), Reasoning("unseen"), Text("Hello")):
            generation.emit(waiting)
            for _ in range(3):
                await until(stream, SIGN[path], seen)
        generation.finish()
        seen += [event async for event in stream]
    kinds = [event["type"] for event in seen]
    if path == "/v1/responses":
        assert kinds[-1] == "response.completed"
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert all(event["response"]["status"] == "in_progress" for event in seen if event["type"] == SIGN[path])
    else:
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert "thinking_delta" not in json.dumps(seen)
