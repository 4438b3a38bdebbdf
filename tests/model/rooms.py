"""Rooms for tests on real tokenizers, and a small client that speaks core types."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pooled_mlx.core.answer import Answer, fold
from pooled_mlx.core.card import SamplingDefaults
from pooled_mlx.core.events import Event, check_order
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.request import Request, Sampling, ToolCall, Turn
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.replay.engine import open_replay_engine
from pooled_mlx.replay.script import ReplayScript, ScriptLine
from pooled_mlx.runner.start import MlxSource
from pooled_mlx.store import Ready

READY_SECONDS = 300.0
_numbers = itertools.count()


@contextmanager
def scripted_room(embedded: Ready, folder: Path, lines: Sequence[ScriptLine], **settings: Any) -> Iterator[LocalEngine]:
    """A room that answers from `lines`, on the tiny hybrid model."""
    room = open_replay_engine(ReplayScript(lines), embedded.folder, folder, EngineSettings(**{"prefill_step": 64, **settings}))
    with _running(room):
        yield room


@contextmanager
def small_room(embedded: Ready, **settings: Any) -> Iterator[LocalEngine]:
    """The embedded model, greedy unless the request says otherwise."""
    card = replace(embedded.card, sampling=SamplingDefaults(temperature=0.0))
    room = LocalEngine(card, embedded.folder, EngineSettings(**{"prefill_step": 128, "seed": 7, **settings}), MlxSource())
    room.start()
    with _running(room):
        yield room


@contextmanager
def _running(room: LocalEngine) -> Iterator[None]:
    try:
        assert room.wait_ready(READY_SECONDS), room.health()["reason"]
        yield
    finally:
        room.stop()


@dataclass
class Said:
    """One answer with everything a test looks at."""

    answer: Answer
    events: list[Event]
    request: Request

    @property
    def turn(self) -> Turn:
        """The answer as a client sends it back: without its reasoning, calls with their ids."""
        return Turn("assistant", self.answer.text, None, tuple(self.answer.calls))

    @property
    def computed(self) -> int:
        """Prompt tokens that went through the model."""
        return self.answer.usage.prompt_tokens - self.answer.usage.cached_tokens


def ask(room: LocalEngine, turns: Sequence[Turn], *, temperature: float = 0.0, most: int = 60, **fields: Any) -> Said:
    """One request through `prepare` and `submit`, to its end."""
    request = Request(
        id=f"test-{next(_numbers)}",
        turns=tuple(turns),
        sampling=fields.pop("sampling", Sampling(temperature=temperature, top_k=40 if temperature else None)),
        max_output_tokens=most,
        **fields,
    )

    async def collect() -> list[Event]:
        prepared = await asyncio.to_thread(room.prepare, request)
        return [event async for event in room.submit(prepared)]

    events = asyncio.run(collect())
    check_order(events)
    return Said(fold(events), events, request)


def result(call: ToolCall, text: str) -> Turn:
    """A tool's result."""
    return Turn("tool", text, tool_call_id=call.id, name=call.name)
