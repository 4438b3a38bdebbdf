"""Serves a room of a benchmark on a free port, and tells about the process what no endpoint does.

Standard output, one line each: `port N` when it is ready; `facts {...}` after SIGUSR1, which empties the pool first; `peak`
after SIGUSR2, which makes MLX count its peak memory anew; `lag {...}` at the end, where it was asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time

from benchmarks.report import percentile
from benchmarks.rooms import empty_pool
from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.runner.model import mx
from pooled_mlx.server.app import create_app
from pooled_mlx.server.serve import StopSignal, open_sockets, port_of, serve
from pooled_mlx.server.settings import ServerSettings

_TICK_SECONDS = 0.005


class LagRecorder:
    """How much later than due a timer of the event loop runs, while the engine is busy. Seconds."""

    def __init__(self, room: LocalEngine) -> None:
        self._room = room
        self.lags: list[float] = []

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            due = time.perf_counter() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            if self._room.loop.busy:
                self.lags.append(max(0.0, time.perf_counter() - due))

    def summary(self) -> dict[str, float]:
        """Median, 99th percentile and maximum in milliseconds; the number of samples."""
        lags = self.lags or [0.0]
        half, most, worst = percentile(lags, 0.5), percentile(lags, 0.99), max(lags)
        return {"p50_ms": half * 1000, "p99_ms": most * 1000, "max_ms": worst * 1000, "samples": len(self.lags)}


def serve_room(room: LocalEngine, *, lag: bool = False) -> None:
    """Serve until terminated. Raises SystemExit when the model cannot be loaded."""
    logging.basicConfig(level=logging.WARNING)
    room.start()
    if not room.wait_ready(300):
        raise SystemExit(f"the model cannot be loaded: {room.health()['reason']}")
    recorder = LagRecorder(room)

    async def run() -> None:
        settings = ServerSettings(port=0)
        sockets = open_sockets(settings)
        app = create_app(
            room,
            {"/v1/chat/completions": EDGE, "/v1/responses": ResponsesEdge(), "/v1/messages": MessagesEdge()},
            settings,
        )
        loop, stop = asyncio.get_running_loop(), StopSignal()
        tasks: set[asyncio.Task[None]] = set()
        if lag:
            tasks.add(loop.create_task(recorder.run()))
        loop.add_signal_handler(signal.SIGTERM, stop.request)
        loop.add_signal_handler(signal.SIGUSR1, lambda: tasks.add(loop.create_task(_print_facts(room))))
        loop.add_signal_handler(signal.SIGUSR2, _count_peak_anew)
        print(f"port {port_of(sockets)}", flush=True)
        await serve(app, sockets, stop=stop)
        for task in tasks:
            task.cancel()

    try:
        asyncio.run(run())
    finally:
        room.stop()
    if lag:
        print(f"lag {json.dumps(recorder.summary())}", flush=True)


async def _print_facts(room: LocalEngine) -> None:
    print(f"facts {json.dumps(await asyncio.to_thread(empty_pool, room))}", flush=True)


def _count_peak_anew() -> None:
    mx.reset_peak_memory()
    print("peak", flush=True)
