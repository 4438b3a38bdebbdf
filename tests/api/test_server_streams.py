"""Streams in time: first bytes at once, keep-alives by the clock, events as they come, slow and stalled readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.events import Finished, Prefill, Queued, Reasoning, Text, Usage
from pooled_mlx.server.context import ServerContext
from pooled_mlx.server.feed import MAX_WAITING_EVENTS
from tests.api.live import CHAT, EDGES, chat_body, connect, post, running

STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}


class Frames:
    """The frames of a live stream, one by one."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> str:
        frame = await asyncio.wait_for(anext(self._lines), 10)
        assert await asyncio.wait_for(anext(self._lines), 10) == ""
        return frame

    async def delta(self) -> dict[str, Any]:
        return json.loads((await self.next()).removeprefix("data: "))["choices"][0]["delta"]

    async def until(self, wanted: str) -> list[str]:
        """The frames before the first one that equals `wanted`."""
        seen: list[str] = []
        while (frame := await self.next()) != wanted:
            seen.append(frame)
        return seen


def is_empty_chunk(frame: str) -> bool:
    choice = json.loads(frame.removeprefix("data: "))["choices"][0]
    return choice == {"index": 0, "delta": {}, "finish_reason": None}


async def test_headers_and_the_role_chunk_go_out_before_the_queue() -> None:
    async with running() as live:
        live.engine.hold()
        async with live.http.stream("POST", CHAT, json=STREAM) as response:
            frames = Frames(response.aiter_lines())
            assert await frames.delta() == {"role": "assistant", "content": ""}
            generation = await live.engine.next_generation()
            for event, delta in (
                (Reasoning("Hm."), {"reasoning_content": "Hm."}),
                (Text("a"), {"content": "a"}),
                (Text("b"), {"content": "b"}),
            ):
                generation.emit(event)
                assert await frames.delta() == delta
            generation.finish()
            assert [frame[:8] for frame in await frames.until("data: [DONE]")] == ['data: {"'] * 2


async def test_keep_alives() -> None:
    """Comments that say what is waited for, an empty chunk after every third, none of it in the way of the answer."""
    async with running(keep_alive_seconds=0.01) as live:
        live.engine.script(Queued(2))
        async with live.http.stream("POST", CHAT, json=STREAM) as response:
            frames = Frames(response.aiter_lines())
            await frames.next()
            generation = await live.engine.next_generation()
            first = [await frames.next() for _ in range(8)]
            assert [frame for frame in first if frame[0] == ":"] == [": queued, 2 ahead"] * 6
            assert [index for index, frame in enumerate(first) if frame[0] != ":"] == [3, 7]
            assert is_empty_chunk(first[3])
            generation.emit(Prefill(410, 1000, 0))
            await frames.until(": prefill 41%")
            generation.emit(Text("x"))
            silent = await frames.until(": keep-alive")
            assert sum('"content":"x"' in frame for frame in silent) == 1
            generation.finish()
            rest = await frames.until("data: [DONE]")
            finish = next(index for index, frame in enumerate(rest) if '"finish_reason":"stop"' in frame)
            assert len(rest) - finish == 2
            assert json.loads(rest[-1].removeprefix("data: "))["choices"] == []


async def test_keep_alives_do_not_depend_on_events() -> None:
    """Progress events that show nothing do not put a keep-alive off."""
    async with running(keep_alive_seconds=0.05) as live:
        live.engine.hold()
        async with live.http.stream("POST", CHAT, json=STREAM) as response:
            frames = Frames(response.aiter_lines())
            await frames.next()
            generation = await live.engine.next_generation()

            async def chatter() -> None:
                for done in range(100_000):
                    generation.emit(Prefill(done, 100_000, 0))
                    await asyncio.sleep(0)

            busy = asyncio.create_task(chatter())
            frame = await frames.next()
            busy.cancel()
            assert frame.startswith(": prefill")


async def test_a_burst_arrives_whole_and_in_order() -> None:
    count = 5 * MAX_WAITING_EVENTS
    async with running() as live:
        live.engine.script(*(Text(f"{index} ") for index in range(count)), Finished("stop", Usage(9, count)))
        response = await live.chat(stream=True)
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text.split() == [str(index) for index in range(count)]
        assert (await live.chat()).status_code == 200


async def test_a_reader_that_stalls_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """It neither reads nor closes; its connection and its request are gone nevertheless."""
    async with running(stall_timeout_seconds=0.1, keep_alive_seconds=5) as live:
        live.engine.hold()
        async with connect(live.port, post(live.port, chat_body(stream=True)), limit=1024) as raw:
            status, _ = await raw.head()
            assert status == 200
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            generation = await live.engine.next_generation()
            piece = "x" * 65_536
            generation.emit(*[Text(piece)] * 1000)
            await asyncio.wait_for(generation.cancelled.wait(), 10)
            assert generation.taken < 1000
            context: ServerContext = live.app.extensions["pooled"]
            while context.links:
                await asyncio.sleep(0)
            assert "was cut off" in caplog.text
        live.engine.script(Finished("stop", Usage(9, 1)))
        assert (await live.chat()).status_code == 200


async def test_the_engine_is_not_drained_for_a_slow_reader() -> None:
    async with running() as live:
        live.engine.hold()
        async with connect(live.port, post(live.port, chat_body(stream=True)), limit=1024) as raw:
            await raw.head()
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            generation = await live.engine.next_generation()
            generation.emit(*[Text("x" * 65_536)] * 5000)
            before = -1
            while generation.taken != before:
                before = generation.taken
                for _ in range(200):
                    await asyncio.sleep(0)
            assert generation.taken < 5000
        await asyncio.wait_for(generation.cancelled.wait(), 10)


async def test_no_framework_limit_ends_a_long_answer() -> None:
    """Not Quart's limit on bodies, nor the one on the time a request body may take."""
    async with running(body_timeout_seconds=0.02, keep_alive_seconds=0.02) as live:
        assert live.app.config["RESPONSE_TIMEOUT"] is None
        live.engine.hold()
        async with live.http.stream("POST", CHAT, json=STREAM) as response:
            frames = Frames(response.aiter_lines())
            await frames.next()
            generation = await live.engine.next_generation()
            for _ in range(8):
                await frames.next()
            generation.emit(Text("at last"))
            generation.finish()
            assert any("at last" in frame for frame in await frames.until("data: [DONE]"))


async def test_requests_in_a_row_on_one_connection() -> None:
    """Also when they arrive together."""
    async with running() as live:
        body = post(live.port, chat_body())
        async with connect(live.port, body * 3) as raw:
            for _ in range(3):
                status, _, answer = await raw.response()
                assert status == 200
                assert json.loads(answer)["choices"][0]["message"]["content"] == "Hello there."


async def test_half_a_character_of_the_request_does_not_break_the_stream_that_repeats_it():
    edge = ResponsesEdge()
    async with running(edges={**EDGES, "/v1/responses": edge}) as live:
        body = b'{"input": "hi", "stream": true, "instructions": "\\ud800", "metadata": {"a": "\\udc00"}}'
        answer = await live.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert "event: response.completed" in answer.text
        assert '"metadata":{"a":"\ufffd"}' in answer.text
