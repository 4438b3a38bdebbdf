"""Endpoints that an API has beside its generating one. An API lists them as values; the server turns them into routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pooled_mlx.api.edge import Edge, Parsed


class ParseBody(Protocol):
    """Checks a decoded JSON body; raises `ApiError`. Called in a worker thread."""

    def __call__(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """The request in `body`."""
        ...


@dataclass(frozen=True, slots=True)
class CountRoute:
    """A POST endpoint that renders a request and answers its prompt length, never queued.

    `parse` is often more lenient than the edge's own (no output limit needed); `answer` makes the body from the count.
    """

    path: str
    edge: Edge
    parse: ParseBody
    answer: Callable[[int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ExtraRoute:
    """An endpoint without the engine, such as one over stored responses.

    `path` is a rule with `<name>` fields. `handler` gets those fields and the query, answers a JSON body and raises
    `ApiError`; it must be quick, for it runs on the event loop. `edge` renders the errors.
    """

    method: str
    path: str
    edge: Edge
    handler: Callable[[Mapping[str, str], Mapping[str, str]], dict[str, Any]]
