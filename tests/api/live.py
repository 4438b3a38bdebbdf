"""A real server on a free port, in the event loop of the test."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
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


@dataclass(slots=True)
class Raw:
    """A connection of bytes, for what no HTTP library would send or leave unread."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower case names) of the next response."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """The next response with a Content-Length."""
        status, headers = await self.head()
        return status, headers, await self.reader.readexactly(int(headers.get("content-length", "0")))

    def reset(self) -> None:
        """Close with a reset, as a killed process or a cut network would."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connect(port: int, data: bytes = b"", limit: int = 2**16) -> AsyncIterator[Raw]:
    """Open a connection and send `data`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    writer.write(data)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


def post(port: int, body: bytes, path: str = CHAT, *lines: str, length: int | None = None) -> bytes:
    """The bytes of a POST with a JSON body; `lines` are further headers."""
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *lines,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chat_body(**fields: Any) -> bytes:
    """A chat request as bytes."""
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
