"""The three APIs on a live server with a fake engine, for tests with real clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pooled_mlx.api.chat_completions import EDGE as CHAT
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Reasoning, Text, Usage
from tests.api.live import Live, running
from tests.fakes import FakeEngine

USAGE = Usage(prompt_tokens=40, completion_tokens=9, cached_tokens=24, reasoning_tokens=3)


@asynccontextmanager
async def three_apis(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Live]:
    """Serve Chat Completions, Responses and Messages with all their endpoints."""
    messages, responses = MessagesEdge(), ResponsesEdge()
    edges = {"/v1/chat/completions": CHAT, "/v1/responses": responses, "/v1/messages": messages}
    options = {
        "count_routes": [*messages.count_routes(), *responses.count_routes()],
        "extra_routes": responses.extra_routes(),
    }
    async with running(engine, edges, options, **settings) as live:
        yield live


def says(text: str, thinking: str = "", stop: str | None = None) -> list[Event]:
    """An answer of text, in pieces, after some thinking."""
    thought: list[Event] = [Reasoning(thinking[:3]), Reasoning(thinking[3:])] if thinking else []
    return [*thought, *pieces(text), Finished("stop", USAGE, stop)]


def pieces(text: str) -> list[Event]:
    """Text as a model writes it: a few characters at a time."""
    return [Text(text[index : index + 5]) for index in range(0, len(text), 5)]


def calls(*wanted: tuple[str, str], thinking: str = "", first: int = 0) -> list[Event]:
    """An answer of tool calls, given as (name, arguments); ids count from `first`."""
    events: list[Event] = [Reasoning(thinking)] if thinking else []
    for index, (name, arguments) in enumerate(wanted):
        half = len(arguments) // 2
        events += [
            CallStart(index, f"call_live{first + index:04d}", name),
            CallArguments(index, arguments[:half]),
            CallArguments(index, arguments[half:]),
            CallEnd(index),
        ]
    return [*events, Finished("tool_calls", USAGE)]
