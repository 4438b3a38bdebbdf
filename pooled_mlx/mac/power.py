"""Keeps the Mac awake while it works for somebody, and only then. The display may sleep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

CAFFEINATE = "/usr/bin/caffeinate"


class PowerAssertion(Protocol):
    """Something that keeps the system from idle sleep between `hold` and `release`."""

    def hold(self) -> None:
        """Begin. Raises OSError when the system cannot do it."""
        ...

    def release(self) -> None:
        """End. No effect when not held."""
        ...


class Caffeinate:
    """The system's own command: `-i` prevents idle sleep, `-w` ends it with this process even after a kill -9."""

    def __init__(self, spawn: Callable[[Sequence[str]], Any] | None = None, pid: int | None = None) -> None:
        self._spawn = spawn or _spawn
        self._pid = os.getpid() if pid is None else pid
        self._process: Any = None

    def hold(self) -> None:
        """Start `caffeinate`."""
        if self._process is None:
            self._process = self._spawn([CAFFEINATE, "-i", "-w", str(self._pid)])

    def release(self) -> None:
        """End it and collect it, so that no zombie stays behind."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()


def _spawn(command: Sequence[str]) -> Any:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


class PowerGuard:
    """Holds the assertion while there is work. Call `update` from any thread whenever that changes: it may start a process.

    A system that cannot do it is reported once through `warn` and left in peace.
    """

    def __init__(self, assertion: PowerAssertion | None, warn: Callable[[str], None] = lambda _: None) -> None:
        self._assertion = assertion
        self._warn = warn
        self._lock = threading.Lock()
        self._held = False

    @property
    def held(self) -> bool:
        """True while the system is kept awake."""
        return self._held

    def update(self, running: int) -> None:
        """`running` requests, downloads or loads are under way now."""
        with self._lock:
            if self._assertion is None or (running > 0) == self._held:
                return
            if running > 0:
                try:
                    self._assertion.hold()
                except OSError as error:
                    self._assertion = None
                    self._warn(f"this Mac cannot be kept awake while it works: {error}")
                    return
                self._held = True
            else:
                self._assertion.release()
                self._held = False

    def close(self) -> None:
        """Let the system sleep again."""
        self.update(0)


def power_guard(enabled: bool, warn: Callable[[str], None] = lambda _: None, platform: str = sys.platform) -> PowerGuard:
    """The guard of this system: one that does nothing when switched off or not on a Mac."""
    return PowerGuard(Caffeinate() if enabled and platform == "darwin" else None, warn)
