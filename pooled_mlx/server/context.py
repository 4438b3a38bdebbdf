"""What the handlers of one server share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from quart import Response, request

from pooled_mlx.api.edge import Edge
from pooled_mlx.api.frames import json_text
from pooled_mlx.core.errors import ApiError, not_ready
from pooled_mlx.core.ports import Engine
from pooled_mlx.server.exchange import Exchange
from pooled_mlx.server.guard import RequestHead
from pooled_mlx.server.hooks import Hooks
from pooled_mlx.server.link import Link
from pooled_mlx.server.settings import ServerSettings

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("pooled.server")

_SCOPE_KEY = "pooled"
_REMEMBERED_WARNINGS = 1024


@dataclass(slots=True)
class RequestState:
    """One HTTP request, kept in its ASGI scope. `cleanups` run when the exchange is over, however it ended."""

    id: str
    head: RequestHead
    authorized: bool = False
    cleanups: list[Callable[[], None]] = field(default_factory=list)


def attach_state(scope: dict[str, Any], state: RequestState) -> None:
    """Put the state where `current_state` finds it."""
    scope[_SCOPE_KEY] = state


def current_state() -> RequestState:
    """The state of the request that is being handled."""
    return request.scope[_SCOPE_KEY]  # pyright: ignore[reportGeneralTypeIssues, reportTypedDictNotRequiredAccess]


class ServerContext:
    """Engine, settings, wire formats, and everything that is open right now. Belongs to the event loop."""

    def __init__(self, engine: Engine, settings: ServerSettings, edges: Mapping[str, Edge], hooks: Hooks) -> None:
        self.engine = engine
        self.settings = settings
        self.edges = edges
        self.hooks = hooks
        self.exchanges: set[Exchange] = set()
        self.links: set[Link] = set()
        self.stopping = False
        self._workers = asyncio.Semaphore(settings.workers)
        self._warned: dict[tuple[str, str], None] = {}

    def edge_for(self, head: RequestHead) -> Edge:
        """The wire format whose errors fit a request outside the generating endpoints."""
        for path, edge in self.edges.items():
            if head.path.startswith(path):
                return edge
        if head.anthropic and "/v1/messages" in self.edges and not head.path.startswith(("/v1/chat", "/v1/responses")):
            return self.edges["/v1/messages"]
        return self.edges["/v1/chat/completions"]

    async def work(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU work in a worker thread; only so many at a time, for they share the interpreter with the event loop."""
        async with self._workers:
            return await asyncio.to_thread(function, *args, **kwargs)

    def warn_once(self, client: str, warning: str) -> None:
        """Log a warning about what a client sends, once for each client."""
        key = (client, warning)
        if key not in self._warned:
            if len(self._warned) >= _REMEMBERED_WARNINGS:
                self._warned.clear()
            self._warned[key] = None
            logger.warning("%s: %s", client, warning)

    def stop(self) -> None:
        """Take no more requests and end the open ones with their API's error."""
        self.stopping = True
        for exchange in tuple(self.exchanges):
            exchange.fail(shutting_down())

    def abort(self) -> None:
        """Drop every connection that is still busy."""
        for link in tuple(self.links):
            link.abort()


def shutting_down() -> ApiError:
    """The 503 of a server that is about to go."""
    return not_ready("The server is shutting down.")


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    response = Response(json_text(body).encode("utf-8", "replace"), status, content_type="application/json")
    response.headers.update(headers or {})
    return response


def error_response(edge: Edge, error: ApiError) -> Response:
    """An error in the shape of `edge`."""
    status, body, headers = edge.error(error)
    return json_response(body, status, dict(headers))
