"""Rooms in this process: requests from an event loop, questions to the engine thread."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.api.edge import Header, Parsed
from pooled_mlx.core.answer import Fold
from pooled_mlx.core.events import CallArguments, CallStart, Event, Finished, Prefill, Reasoning, Text, Usage
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.engine.loop import Loop
from pooled_mlx.runner.model import memory_now, mx

T = TypeVar("T")
_numbers = itertools.count()
_M_ARENA_MAX = -8
"""glibc's number for this parameter of `mallopt`."""


@contextmanager
def opened(room: LocalEngine) -> Iterator[LocalEngine]:
    """Start a room, wait until it is ready, stop it at the end. Raises RuntimeError when it cannot be loaded."""
    room.start()
    try:
        if not room.wait_ready(300):
            raise RuntimeError(f"the model cannot be loaded: {room.health()['reason']}")
        yield room
    finally:
        room.stop()


def on_engine(room: LocalEngine, question: Callable[[Loop], T]) -> T:
    """Ask `question` on the engine thread, between two turns of its loop, and return the answer. Do not call it there."""
    answer: Future[T] = Future()

    def command(loop: Loop) -> None:
        try:
            answer.set_result(question(loop))
        except BaseException as error:
            answer.set_exception(error)

    room._thread.call(command)
    return answer.result(300)


def empty_pool(room: LocalEngine) -> dict[str, Any]:
    """Empty the pool and the buffer cache of an idle room; what is left in memory and in use, in bytes."""

    def ask(loop: Loop) -> dict[str, Any]:
        drop_slack(loop)
        loop.pool.clear()
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        return {
            "running": len(loop.running),
            "waiting": len(loop.waiting),
            "reserved_bytes": loop.pool.reserved_bytes,
            "segment_bytes": loop.pool.segment_bytes,
            "steps": loop.counters.steps,
            "failures": loop.counters.failures,
        }

    facts = on_engine(room, ask)
    _give_back()
    facts["active_bytes"] = memory_now().active
    facts["rss_bytes"] = psutil.Process().memory_info().rss
    facts["in_flight"] = room.health()["queue"] + room.health()["running"]
    return facts


def one_arena() -> None:
    """Make the C library on Linux use one heap for all threads: with one for each, resident memory wanders by megabytes
    with the thread that freed last, and a slow growth cannot be seen. Call it before threads are started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _give_back() -> None:
    """Let the C library return what it keeps of freed memory, so that growth is what somebody holds."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True)
class Run:
    """One answered request; times are `time.perf_counter` seconds, 0.0 for what did not happen."""

    submitted: float
    prompt_read: float = 0.0
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    pieces: int = 0
    usage: Usage = field(default_factory=Usage)
    frames: int = 0
    body: dict[str, Any] | None = None

    @property
    def decode_seconds(self) -> float:
        """From the end of the prompt to the end of the answer."""
        return self.last - self.prompt_read


def parse(body: dict[str, Any]) -> Parsed:
    """A Chat Completions body as a request of its own id."""
    return EDGE.parse({"model": "pooled", **body}, request_id=f"request-{next(_numbers)}", client="benchmark")


async def ask(room: LocalEngine, body: dict[str, Any], *, cut_after: int | None = None) -> Run:
    """Answer one body as the server does: parsed, prepared in a worker, rendered as a stream or whole.

    With `cut_after` the client goes away after so many pieces of the answer (0: while the prompt is read). Raises `ApiError`.
    """
    parsed = await asyncio.to_thread(parse, body)
    prepared = await asyncio.to_thread(room.prepare, parsed.request)
    header = Header(room.model.public_id, 0, prepared.prompt_tokens)
    renderer = EDGE.renderer(parsed, header) if parsed.stream else None
    fold = Fold()
    run = Run(time.perf_counter())
    generation = room.submit(prepared)
    try:
        async for event in generation:
            _note(run, event)
            fold.add(event)
            if renderer is not None:
                run.frames += len(renderer.event(event))
            if cut_after is not None and (run.pieces > cut_after or (cut_after == 0 and isinstance(event, Prefill))):
                return run
        if renderer is None:
            run.body = EDGE.whole(parsed, header, fold.answer)
        return run
    finally:
        generation.cancel()


def _note(run: Run, event: Event) -> None:
    now = time.perf_counter()
    if isinstance(event, Prefill) and event.done == event.total:
        run.prompt_read = now
    elif isinstance(event, Text | Reasoning | CallStart | CallArguments):
        run.first = run.first or now
        run.pieces += 1
        run.text += event.text if isinstance(event, Text | CallArguments) else ""
    elif isinstance(event, Finished):
        run.last, run.usage = now, event.usage
