"""The engine thread: the one owner of every MLX array. It loads the model, runs the loop, and is joined at exit."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pooled_mlx.core.errors import ApiError, engine_failed, not_ready
from pooled_mlx.engine.loop import EngineDead, Loop
from pooled_mlx.engine.mlx_backend import finish_work
from pooled_mlx.engine.rows import Row

_log = logging.getLogger("pooled.engine")

Command = Callable[[Loop], None]


class EngineThread(threading.Thread):
    """Runs `make_loop` and then its turns. Not a daemon: MLX aborts a process that exits under a live thread."""

    def __init__(self, make_loop: Callable[[], Loop], on_ready: Callable[[], None], on_dead: Callable[[str], None]) -> None:
        super().__init__(name="pooled-engine")
        self._make_loop, self._on_ready, self._on_dead = make_loop, on_ready, on_dead
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._stopping = False
        self.loop: Loop | None = None

    def submit(self, row: Row) -> None:
        """Queue a row."""
        self._commands.put(lambda loop: loop.submit(row))

    def wake(self) -> None:
        """Make an idle thread look around: something was cancelled."""
        self._commands.put(lambda loop: None)

    def call(self, command: Command) -> None:
        """Run `command` on this thread between two turns."""
        self._commands.put(command)

    def stop(self) -> None:
        """End every request with an error and leave. Returns at once; `join` waits."""
        self._stopping = True
        self._commands.put(None)

    def run(self) -> None:
        """The thread's life."""
        try:
            self._live()
        finally:
            finish_work()

    def _live(self) -> None:
        try:
            loop = self._make_loop()
        except Exception as error:
            if not self._stopping:
                _log.exception("the model could not be loaded")
                self._on_dead(str(error))
            self._refuse(not_ready(f"The model could not be loaded: {error}"))
            return
        self.loop = loop
        self._on_ready()
        try:
            while not self._stopping:
                if self._take_commands(loop, wait=not loop.busy):
                    loop.turn()
            loop.abort(not_ready("The server is shutting down."))
        except EngineDead as error:
            _log.critical("%s", error)
            loop.abort(engine_failed(f"The engine is dead: {error}"))
            self._on_dead(str(error))
        except Exception as error:
            _log.critical("the engine thread failed", exc_info=True)
            loop.abort(engine_failed(f"The engine is dead: {error}"))
            self._on_dead(f"the engine thread failed: {error}")
        self._refuse(not_ready("The server is shutting down."), loop)

    def _take_commands(self, loop: Loop, *, wait: bool) -> bool:
        """Run what was asked of the thread. False when it is told to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(loop)
            wait = False

    def _refuse(self, error: ApiError, loop: Loop | None = None) -> None:
        """Answer what was queued too late."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None and loop is not None:
                command(loop)
        if loop is not None:
            loop.abort(error)
