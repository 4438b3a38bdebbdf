"""Reads server-sent events back, strictly: what the renderers write must be frames that any client can read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pooled_mlx.api.edge import Edge, Header, Parsed
from pooled_mlx.core.events import Event, check_order

HEADER = Header(model="pooled/test-model", created=1_700_000_000, prompt_tokens=31)


def frames(text: str) -> list[tuple[str | None, dict[str, Any]]]:
    """The (event name, data) pairs of a stream; comments are left out, `[DONE]` is {"done": True}."""
    assert text.endswith("\n\n") or not text
    read: list[tuple[str | None, dict[str, Any]]] = []
    for frame in text.split("\n\n")[:-1]:
        lines = frame.split("\n")
        if lines[0].startswith(":"):
            assert len(lines) == 1
            continue
        name = None
        if lines[0].startswith("event: "):
            name = lines.pop(0).removeprefix("event: ")
        assert len(lines) == 1
        assert lines[0].startswith("data: ")
        assert len(lines[0].splitlines()) == 1
        data = lines[0].removeprefix("data: ")
        read.append((name, {"done": True} if data == "[DONE]" else json.loads(data)))
    return read


def stream(
    edge: Edge, parsed: Parsed, events: Iterable[Event], header: Header = HEADER
) -> list[tuple[str | None, dict[str, Any]]]:
    """Everything one streamed answer sends."""
    events = list(events)
    check_order(events)
    renderer = edge.renderer(parsed, header)
    return frames(renderer.start() + "".join(renderer.event(event) for event in events))
