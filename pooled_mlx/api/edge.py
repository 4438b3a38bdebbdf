"""What one wire format offers the server. Chat Completions, Responses and Messages each have one `Edge`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pooled_mlx.core.answer import Answer
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import Event, Prefill, Queued
from pooled_mlx.core.request import Request


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body that passed the format's checks. `options` is the edge's own (include_usage, store, display …)."""

    request: Request
    stream: bool
    options: Any = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """What is known when an answer starts: `model` is the public id, `created` in Unix seconds."""

    model: str
    created: int
    prompt_tokens: int


class StreamRenderer(Protocol):
    """Turns events into server-sent event frames (complete text, each frame ending with a blank line)."""

    def start(self) -> str:
        """The first frames: they go out at once, before the queue."""
        ...

    def event(self, event: Event) -> str:
        """The frames for one event; "" where it has none. `Finished` gives the whole end, `Failed` the error."""
        ...

    def keep_alive(self, waiting: Queued | Prefill | None) -> str:
        """The frames after 10 s of silence; `waiting` is the last progress event while no answer has begun."""
        ...

    def comment(self, text: str) -> str:
        """A comment frame, which clients ignore."""
        ...


class Edge(Protocol):
    """One wire format."""

    def parse(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """Check the decoded JSON body. Raises `ApiError` for whatever this API refuses."""
        ...

    def renderer(self, parsed: Parsed, header: Header) -> StreamRenderer:
        """The renderer of one streamed answer."""
        ...

    def whole(self, parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
        """The body of a non-streaming answer."""
        ...

    def error(self, error: ApiError) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """HTTP status, body and headers (Retry-After, x-should-retry, Allow) of an error in this API's shape."""
        ...
