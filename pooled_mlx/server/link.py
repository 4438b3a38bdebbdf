"""One HTTP exchange at the ASGI level: what frameworks leave open about slow, stalled and refused clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pooled_mlx.server.settings import ServerSettings

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

logger = logging.getLogger("pooled.server")


class ClientStalled(ConnectionError):
    """The client took nothing of its answer for too long; its connection is gone."""


class ClientGone(ConnectionError):
    """The client has closed the connection."""


class Link:
    """Wraps `receive` and `send` of one request.

    - Every answer carries the headers of `extra_headers`.
    - Nothing is sent to a client that has gone (`ClientGone`).
    - A client that stops reading without closing is cut off after `stall_timeout_seconds` (`ClientStalled`).
    - An answer that is ready before the body has arrived (a refusal) stays readable: closing a socket with unread input
      resets it, and the client would lose the answer, so the rest of the body is awaited for `linger_seconds`.
    """

    def __init__(
        self, receive: Receive, send: Send, settings: ServerSettings, *, has_body: bool, extra_headers: Mapping[str, str]
    ) -> None:
        self._receive = receive
        self._send = send
        self._settings = settings
        self._headers = [(name.encode(), value.encode("latin-1")) for name, value in extra_headers.items()]
        self._gone = False
        self._body_done = asyncio.Event()
        if not has_body:
            self._body_done.set()

    async def receive(self) -> Any:
        """The next message of the client."""
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._body_done.set()
            self._gone = message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Hand a message to the HTTP server. Raises `ClientStalled` and `ClientGone`."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        elif not message.get("more_body", False) and not self._body_done.is_set():
            await self._bounded({**message, "more_body": True})
            try:
                async with asyncio.timeout(self._settings.linger_seconds):
                    await self._body_done.wait()
            except TimeoutError:
                logger.debug("a refused body was still coming after %g s", self._settings.linger_seconds)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._bounded(message)

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer without the application, reading the body only to throw it away."""
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        if status != 204:  # which has no body, and no length of one
            raw.append((b"content-length", str(len(body)).encode()))
        drain = asyncio.ensure_future(self._drain())
        try:
            await self.send({"type": "http.response.start", "status": status, "headers": raw})
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            drain.cancel()

    def abort(self) -> None:
        """Drop the connection at once, unsent bytes included."""
        transport = _transport(self._send)
        if transport is not None:
            transport.abort()

    async def _drain(self) -> None:
        while not self._body_done.is_set():
            await self.receive()

    async def _bounded(self, message: Message) -> None:
        if self._gone:
            raise ClientGone
        limit = asyncio.timeout(self._settings.stall_timeout_seconds)
        try:
            async with limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            self.abort()
            raise ClientStalled(
                f"the client took nothing of its answer for {self._settings.stall_timeout_seconds:g} s and was cut off"
            ) from None


def _transport(send: Send) -> asyncio.WriteTransport | None:
    """The transport under a Hypercorn `send`.

    ASGI has no way to drop a connection, and Hypercorn waits without end until a stalled client has taken what is
    buffered. The chain is: bound method of the stream, of the protocol, of the TCP server, which has the writer.
    """
    owner: Any = send
    for _ in range(3):
        owner = getattr(owner, "__self__", None)
        transport = getattr(getattr(owner, "writer", None), "transport", None)
        if isinstance(transport, asyncio.WriteTransport):
            return transport
        owner = getattr(owner, "send", None)
    logger.warning("cannot reach the connection of a stalled client: Hypercorn has another shape than expected")
    return None
