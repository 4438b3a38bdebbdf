"""Serves a room of a benchmark on a free port and prints it."""

from __future__ import annotations

import asyncio
import logging
import signal

from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.engine.room import Room
from pooled_mlx.server.app import create_app
from pooled_mlx.server.serve import StopSignal, open_sockets, port_of, serve
from pooled_mlx.server.settings import ServerSettings


def serve_room(room: Room) -> None:
    """Serve until terminated."""
    logging.basicConfig(level=logging.WARNING)
    room.start()
    if not room.wait_ready(300):
        raise SystemExit(f"the model cannot be loaded: {room.health()['reason']}")

    async def run() -> None:
        settings = ServerSettings(port=0)
        sockets = open_sockets(settings)
        app = create_app(room, {"/v1/chat/completions": EDGE}, settings)
        stop = StopSignal()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.request)
        print(f"port {port_of(sockets)}", flush=True)
        await serve(app, sockets, stop=stop)

    try:
        asyncio.run(run())
    finally:
        room.stop()
