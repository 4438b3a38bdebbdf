"""The engine thread: the one owner of every MLX array. It loads the model, runs the loop, and is joined at exit."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pooled_mlx.core.errors import ApiError, engine_failed, not_ready
from pooled_mlx.engine.loop import EngineDead, Loop
from pooled_mlx.engine.row import Row

_log = logging.getLogger("pooled.engine")

Command = Callable[[Loop], None]

_GOING_DOWN = "The server is shutting down."


class EngineStopped(Exception):
    """The engine was told to stop while it was still getting ready."""


class EngineThread(threading.Thread):
    """Runs `make_loop` and then its turns. Not a daemon: MLX aborts a process that exits under a live thread.

    `on_ready` is called when the loop is made, `on_dead` at most once, when the thread ends without having been told to,
    `leave` at its very end; all on this thread, and all must return at once.
    """

    def __init__(
        self,
        make_loop: Callable[[], Loop],
        on_ready: Callable[[], None],
        on_dead: Callable[[str], None],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="pooled-engine")
        self._make_loop, self._on_ready, self._on_dead, self._leave = make_loop, on_ready, on_dead, leave
        self._commands: queue.SimpleQueue[Row | Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over: ApiError | None = None
        self.stopping = False
        self.loop: Loop | None = None

    def submit(self, row: Row) -> None:
        """Queue a row. Raises `ApiError` once the engine takes no more."""
        with self._lock:
            if self._over is not None:
                raise self._over
            self._commands.put(row)

    def wake(self) -> None:
        """Make an idle thread look around: something was cancelled."""
        self.call(lambda loop: None)

    def call(self, command: Command) -> None:
        """Run `command` on this thread between two turns; not at all once the engine is over. What it raises is logged."""
        with self._lock:
            if self._over is None:
                self._commands.put(command)

    def stop(self) -> None:
        """End every request with an error and leave. Returns at once; `join` waits."""
        self.stopping = True
        self._commands.put(None)

    def run(self) -> None:
        """The thread's life."""
        reason = "the engine thread ended"
        try:
            reason = self._live()
        except BaseException as error:  # also SystemExit: the listener must not outlive its engine unnoticed
            _log.critical("the engine thread failed", exc_info=True)
            reason = f"the engine thread failed: {error}"
        self._end(reason)
        try:
            self._leave()
        except Exception:
            _log.exception("the runner could not be left in order")

    def _live(self) -> str:
        """Load and work until told to stop; returns why it ended."""
        try:
            loop = self._make_loop()
        except Exception as error:
            if not self.stopping:
                _log.error("the model could not be loaded", exc_info=True)
            return str(error) or type(error).__name__
        self.loop = loop
        self._on_ready()
        try:
            while not self.stopping:
                if self._take_commands(loop, wait=not loop.busy):
                    loop.turn()
        except EngineDead as error:
            _log.critical("%s", error)
            return str(error)
        return ""

    def _end(self, reason: str) -> None:
        """Say that the engine is over and give every request its error."""
        error = not_ready(_GOING_DOWN) if self.stopping else engine_failed(f"The engine is dead: {reason}")
        with self._lock:
            self._over = error
        if not self.stopping:  # first, so that nobody who reads of the error finds an engine that calls itself well
            try:
                self._on_dead(reason)
            except Exception:
                _log.exception("the end of the engine could not be reported")
        loop, self.loop = self.loop, None
        self._take_late(loop, error)
        if loop is not None:
            loop.abort(error)

    def _take_commands(self, loop: Loop, *, wait: bool) -> bool:
        """Run what was asked of the thread. False when it is told to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._run(command, loop)
            wait = False

    def _take_late(self, loop: Loop | None, error: ApiError) -> None:
        """Run what was asked just before the end; without a loop, since none could be made, only end requests."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if loop is None and isinstance(command, Row):
                command.fail(error)
            elif loop is not None and command is not None:
                self._run(command, loop)

    def _run(self, command: Row | Command, loop: Loop) -> None:
        try:
            if isinstance(command, Row):
                loop.submit(command)
            else:
                command(loop)
        except Exception:
            _log.exception("a command to the engine failed")
