"""What the caller of the server may plug in: metrics, the status page, a list of recent requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pooled_mlx.core.errors import ErrorKind
from pooled_mlx.core.events import Event


class Watch(Protocol):
    """Sees every event of one request."""

    def event(self, event: Event) -> Any:
        """The next event."""
        ...

    def cancelled(self) -> Any:
        """The client went away; no effect after the end of the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """All optional. Every callable runs on the event loop and must be quick."""

    page: str | None = None
    """The HTML of `GET /`."""
    metrics: Callable[[], str] | None = None
    """The text of `GET /metrics`; without it that path does not exist."""
    metrics_content_type: str = "text/plain; version=0.0.4; charset=utf-8"
    watch: Callable[[str], Watch] | None = None
    """Called with the API's name for each request that was queued."""
    refused: Callable[[ErrorKind], Any] | None = None
    """Called for each request that was refused before it was queued."""
    unenforced: Callable[[int], Any] | None = None
    """Called with the number of schema keywords that a queued request asks for and nothing enforces."""
    finished: Callable[[dict[str, Any]], Any] | None = None
    """Called with the fields of the log line of each finished request."""
    health: Callable[[], dict[str, Any]] = field(default=dict)
    """More facts for `/health` (version, uptime, memory plan)."""
