"""Sockets, Hypercorn, and the way down."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Sequence

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from quart import Quart

from pooled_mlx.server.app import context_of
from pooled_mlx.server.settings import ServerSettings

logger = logging.getLogger("pooled.server")

_BACKLOG = 512
_BIND_TRIES = 20
_CONNECTION_IDLE_SECONDS = 60.0
"""Longer than the pools of the usual clients keep an idle connection, so that the client is the one to close it."""
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


class PortBusyError(OSError):
    """Another process listens on the port."""


class StopSignal:
    """Asks a running server to stop. Make it on the server's event loop; `request` may be called from any thread.

    The first request ends open answers with an error and waits for them, the second one (`forced`) waits for nothing.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self.exit_code = 0

    def request(self, exit_code: int = 0) -> None:
        """Stop; `serve` returns the highest `exit_code` it was asked with."""
        self._loop.call_soon_threadsafe(self._request, exit_code)

    def _request(self, exit_code: int) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()


def open_sockets(settings: ServerSettings) -> list[socket.socket]:
    """Listening sockets on one port: 127.0.0.1 and ::1 (where there is one), or the addresses of `settings.host`.

    Connections wait in the backlog from here on, so the address may be announced. Raises `PortBusyError`, or `OSError` for
    an address that this machine does not have.
    """
    hosts = _addresses(settings.host)
    for attempt in range(_BIND_TRIES):
        try:
            return _bind_all(hosts, settings.port)
        except PortBusyError:
            # A free port of the first address may be taken on the second one: then another one is tried.
            if settings.port != 0 or attempt == _BIND_TRIES - 1:
                raise
    raise AssertionError("unreachable")


async def serve(
    app: Quart,
    sockets: Sequence[socket.socket],
    *,
    stop: StopSignal | None = None,
    handle_signals: bool = False,
) -> int:
    """Serve an application of `create_app` on `sockets` until asked to stop; returns the exit code.

    The way down: new requests get 503, open answers end with their API's error, connections get `stop_grace_seconds` to
    take it, then they are dropped. With `handle_signals` SIGINT and SIGTERM ask for it, a second one at once.
    """
    stop = stop or StopSignal()
    context = context_of(app)
    settings = context.settings
    config = Config()
    config.bind = [f"fd://{sock.detach()}" for sock in sockets]
    config.backlog = _BACKLOG
    config.accesslog = None
    config.errorlog = _http_logger()
    config.include_server_header = False
    config.keep_alive_timeout = _CONNECTION_IDLE_SECONDS
    config.graceful_timeout = settings.stop_grace_seconds + 5
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM) if handle_signals else ()
    for number in signals:
        loop.add_signal_handler(number, stop.request)
    server = asyncio.create_task(hypercorn_serve(app, config, shutdown_trigger=stop.requested.wait))
    requested = asyncio.create_task(stop.requested.wait())
    forced = asyncio.create_task(stop.forced.wait())
    try:
        await asyncio.wait({server, requested}, return_when=asyncio.FIRST_COMPLETED)
        context.stop()
        await asyncio.wait({server, forced}, timeout=settings.stop_grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not server.done():
            context.abort()
            await asyncio.wait({server}, timeout=0 if stop.forced.is_set() else 1)
        if server.done() and not server.cancelled():
            server.result()
        return stop.exit_code
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        for task in (server, requested, forced):
            task.cancel()
        await asyncio.gather(server, requested, forced, return_exceptions=True)


def _http_logger() -> logging.Logger:
    """Hypercorn's log without its greeting, which would name the wrong addresses to use."""
    http = logging.getLogger("pooled.http")
    http.setLevel(logging.WARNING)
    return http


def port_of(sockets: Sequence[socket.socket]) -> int:
    """The real port of `open_sockets`."""
    return sockets[0].getsockname()[1]


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    if host in ("127.0.0.1", "localhost", "::1", "[::1]"):
        return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bind_all(hosts: Sequence[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for family, address in hosts:
            try:
                sockets.append(_bind(family, address, port or (port_of(sockets) if sockets else 0)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortBusyError(error.errno, f"port {port} on {address} is in use by another process") from None
                if error.errno not in _NO_SUCH_ADDRESS or len(hosts) == 1:
                    raise
                logger.debug("not listening on %s: %s", address, error)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, f"this machine has none of the addresses {[address for _, address in hosts]}")
        return sockets
    except BaseException:
        for sock in sockets:
            sock.close()
        raise


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise
