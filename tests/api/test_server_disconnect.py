"""A client that goes away stops its request, whatever phase it is in, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from pooled_mlx.core.events import CallStart, Event, Finished, Prefill, Queued, Text, Usage
from pooled_mlx.core.request import Request
from pooled_mlx.server.context import ServerContext
from tests.api.live import Live, Raw, chat_body, connect, post, running

PHASES: dict[str, list[Event]] = {
    "no event yet": [],
    "queued": [Queued(1)],
    "prefill": [Queued(0), Prefill(512, 4096, 0)],
    "decode": [Prefill(9, 9, 0), Text("Hello")],
    "call": [Prefill(9, 9, 0), CallStart(0, "c1", "f")],
}


async def until_idle(live: Live) -> None:
    """Wait until the server has nothing open."""
    context: ServerContext = live.app.extensions["pooled"]

    async def wait() -> None:
        while context.links or context.exchanges:
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), 10)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", list(PHASES))
async def test_every_phase(phase: str, stream: bool, how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running() as live:
        live.engine.hold()
        async with connect(live.port, post(live.port, chat_body(stream=stream))) as raw:
            generation = await live.engine.next_generation()
            generation.emit(*PHASES[phase])
            if stream:
                await raw.head()
            leave(raw, how)
            await asyncio.wait_for(generation.cancelled.wait(), 10)
        await until_idle(live)
        live.engine.script(Text("ok"), Finished("stop", Usage(9, 1)))
        assert (await live.chat()).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def leave(raw: Raw, how: str) -> None:
    if how == "reset":
        raw.reset()
    else:
        raw.writer.close()


async def test_a_finished_request_is_not_reported_as_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pooled.request")
    async with running() as live:
        for stream in (False, True):
            await live.chat(stream=stream)
        await until_idle(live)
    finishes = [record.request["finish"] for record in caplog.records if record.name == "pooled.request"]  # type: ignore[attr-defined]
    assert finishes == ["stop", "stop"]


async def test_while_the_body_is_on_its_way() -> None:
    async with running() as live:
        async with connect(live.port, post(live.port, b'{"messages', length=1000)) as raw:
            await until_something_is_open(live)
            raw.writer.close()
        await until_idle(live)
        assert live.engine.requests == []


async def test_while_the_request_is_prepared() -> None:
    entered, leave_now = threading.Event(), threading.Event()

    def slow(request: Request) -> None:
        entered.set()
        leave_now.wait(10)

    async with running() as live:
        live.engine.prepare_hook = slow
        async with connect(live.port, post(live.port, chat_body(stream=True))) as raw:
            assert await asyncio.to_thread(entered.wait, 10)
            raw.writer.close()
            await until_idle(live)
        leave_now.set()
        live.engine.prepare_hook = None
        assert (await live.chat()).status_code == 200
        assert len(live.engine.generations) == 1


async def until_something_is_open(live: Live) -> None:
    context: ServerContext = live.app.extensions["pooled"]
    while not context.links:
        await asyncio.sleep(0)


async def test_fifty_resets(caplog: pytest.LogCaptureFixture) -> None:
    """At every point of an answer: no error is logged, nothing stays open, the next request works."""
    async with running(keep_alive_seconds=0.01) as live:
        live.engine.hold()
        for number in range(50):
            async with connect(live.port, post(live.port, chat_body(stream=number % 5 != 0))) as raw:
                if number % 10 == 9:
                    raw.reset()
                    continue
                generation = await live.engine.next_generation()
                generation.emit(*[Text("word ")] * (number * 7))
                if number % 3 == 0:
                    generation.finish()
                if number % 2 and number % 5:
                    await raw.head()
                raw.reset()
        await until_idle(live)
        live.engine.script(Text("ok"), Finished("stop", Usage(9, 1)))
        assert (await live.chat()).status_code == 200
        for generation in live.engine.generations:
            assert generation.cancelled.is_set()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_response_that_was_never_started_is_cleaned_up() -> None:
    """The client is gone before the first byte of the stream: a generator's `finally` would not run."""
    async with running() as live:
        live.engine.hold()
        submit = live.engine.submit
        connections: list[Raw] = []

        def submit_and_lose(prepared: Any) -> Any:
            connections[0].reset()
            return submit(prepared)

        live.engine.submit = submit_and_lose  # type: ignore[method-assign]
        async with connect(live.port) as raw:
            connections.append(raw)
            raw.writer.write(post(live.port, chat_body(stream=True)))
            generation = await live.engine.next_generation()
            await asyncio.wait_for(generation.cancelled.wait(), 10)
        await until_idle(live)
