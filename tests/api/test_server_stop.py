"""The way down: open answers end with their API's error, connections close, the exit code comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading

import httpx
import pytest

from pooled_mlx.core.events import Queued, Text
from pooled_mlx.core.request import Request
from pooled_mlx.server.app import create_app
from pooled_mlx.server.serve import StopSignal, open_sockets, port_of, serve
from pooled_mlx.server.settings import ServerSettings
from tests.api.live import CHAT, EDGES, chat_body, connect, frames, post, running
from tests.fakes import FakeEngine


@pytest.mark.parametrize("events", [[], [Queued(3)], [Text("Half an")]])
async def test_open_streams_end_with_an_error_chunk(events: list[Text | Queued]) -> None:
    async with running() as live:
        live.engine.hold()
        request = asyncio.create_task(live.chat(stream=True))
        generation = await live.engine.next_generation()
        generation.emit(*events)
        live.stop.request()
        response = await request
        error = json.loads(frames(response.text)[-1].removeprefix("data: "))["error"]
        assert "shutting down" in error["message"]
        assert "[DONE]" not in response.text
        assert generation.cancelled.is_set()
        assert await asyncio.wait_for(live.served, 10) == 0


async def test_whole_answers_get_503() -> None:
    async with running() as live:
        live.engine.hold()
        request = asyncio.create_task(live.chat())
        await live.engine.next_generation()
        live.stop.request()
        response = await request
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"


async def test_a_request_in_preparation_is_not_queued_any_more() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(request: Request) -> None:
        entered.set()
        go_on.wait(10)

    async with running() as live:
        live.engine.prepare_hook = slow
        request = asyncio.create_task(live.chat(stream=True))
        assert await asyncio.to_thread(entered.wait, 10)
        live.stop.request()
        await live.stop.requested.wait()
        await asyncio.sleep(0)
        go_on.set()
        assert (await request).status_code == 503
        assert live.engine.generations == []


async def test_idle_connections_close_and_new_ones_are_refused() -> None:
    async with running() as live:
        assert (await live.chat()).status_code == 200
        live.stop.request()
        await asyncio.wait_for(live.served, 10)
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(trust_env=False).get(f"{live.url}/health")


async def test_a_stalled_client_does_not_hold_the_server() -> None:
    async with running(stop_grace_seconds=0.05) as live:
        live.engine.hold()
        async with connect(live.port, post(live.port, chat_body(stream=True)), limit=1024) as raw:
            await raw.head()
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            generation = await live.engine.next_generation()
            generation.emit(*[Text("x" * 65_536)] * 1000)
            live.stop.request()
            assert await asyncio.wait_for(live.served, 10) == 0


async def test_half_a_request_does_not_hold_the_server() -> None:
    async with (
        running(stop_grace_seconds=0.05) as live,
        connect(live.port, post(live.port, b"{", length=100)),
        connect(live.port, b"GET /hea"),
    ):
        assert await live.http.get("/health")
        live.stop.request()
        assert await asyncio.wait_for(live.served, 10) == 0


async def test_the_second_request_waits_for_nothing() -> None:
    async with running(stop_grace_seconds=600) as live:
        live.engine.hold()
        async with connect(live.port, post(live.port, chat_body(stream=True)), limit=1024) as raw:
            await raw.head()
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            generation = await live.engine.next_generation()
            generation.emit(*[Text("x" * 65_536)] * 1000)
            live.stop.request()
            await live.stop.requested.wait()
            live.stop.request()
            assert await asyncio.wait_for(live.served, 10) == 0
            assert live.stop.forced.is_set()


async def test_the_exit_code_of_a_fatal_engine_error() -> None:
    async with running() as live:
        await asyncio.to_thread(live.stop.request, 1)
        live.stop.request()
        assert await asyncio.wait_for(live.served, 10) == 1


async def test_health_says_that_it_stops() -> None:
    async with running() as live:
        live.app.extensions["pooled"].stop()
        response = await live.http.get("/health")
        assert response.status_code == 503
        assert "shutting down" in response.json()["reason"]
        assert (await live.chat()).status_code == 503


async def test_signals() -> None:
    settings = ServerSettings(port=0)
    sockets = open_sockets(settings)
    stop = StopSignal()
    port = port_of(sockets)
    served = asyncio.create_task(serve(create_app(FakeEngine(), EDGES, settings), sockets, stop=stop, handle_signals=True))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        assert (await http.post(CHAT, content=chat_body(), headers={"content-type": "application/json"})).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(served, 10) == 0
    assert asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM) is False
