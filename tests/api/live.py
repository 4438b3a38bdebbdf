"""A real server on a free port, in the event loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from quart import Quart

from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.server.app import create_app
from pooled_mlx.server.serve import StopSignal, open_sockets, port_of, serve
from pooled_mlx.server.settings import ServerSettings
from tests.fakes import FakeEngine

CHAT = "/v1/chat/completions"
EDGES = {CHAT: EDGE}


@dataclass(slots=True)
class Live:
    """A running server, its engine, and a client with its base URL."""

    engine: FakeEngine
    app: Quart
    port: int
    http: httpx.AsyncClient
    stop: StopSignal
    served: asyncio.Task[int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def chat(self, **body: Any) -> httpx.Response:
        """POST a chat request; without messages a short one is sent."""
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return await self.http.post(CHAT, json=body)


@asynccontextmanager
async def running(
    engine: FakeEngine | None = None, edges: Any = None, app_options: Any = None, **settings: Any
) -> AsyncIterator[Live]:
    """Serve a fake engine; `settings` are fields of `ServerSettings`."""
    engine = engine or FakeEngine()
    settings = {"port": 0, "stop_grace_seconds": 2.0, "linger_seconds": 2.0, **settings}
    app = create_app(engine, edges or EDGES, ServerSettings(**settings), **(app_options or {}))
    sockets = open_sockets(ServerSettings(**settings))
    port = port_of(sockets)
    stop = StopSignal()
    served = asyncio.create_task(serve(app, sockets, stop=stop))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            yield Live(engine, app, port, http, stop, served)
    finally:
        stop.request()
        await served


def frames(text: str) -> list[str]:
    """The frames of an event stream, without their blank lines."""
    assert text == "" or text.endswith("\n\n")
    return text.split("\n\n")[:-1]
