"""Memory pressure of the system: the pool shrinks first, so that nobody is killed for our cache."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

RECOVERY_SECONDS = 60.0
"""The pressure must have been gone this long before the pool may grow again."""


class Pressure(IntEnum):
    """The levels of macOS's `kern.memorystatus_vm_pressure_level`, by its numbers."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


POOL_SHARE = {Pressure.NORMAL: 1.0, Pressure.WARNING: 0.5, Pressure.CRITICAL: 0.0}
"""The share of its budget that the pool may keep. Requests that run keep what they hold."""


def read_mac_pressure() -> Pressure:
    """The level now. Raises OSError where the system does not tell."""
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "sysctlbyname"):
        raise OSError("this system has no sysctlbyname")
    name = b"kern.memorystatus_vm_pressure_level"
    if library.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        raise OSError(ctypes.get_errno(), "kern.memorystatus_vm_pressure_level cannot be read")
    return level_from(value.value)


def level_from(number: int) -> Pressure:
    """The level of a sysctl value; numbers between two levels count as the higher one."""
    if number <= Pressure.NORMAL:
        return Pressure.NORMAL
    return Pressure.WARNING if number <= Pressure.WARNING else Pressure.CRITICAL


def read_linux_pressure(path: Path = Path("/proc/pressure/memory")) -> Pressure:
    """The level from Linux's stall information: the share of the last 10 s in which every task waited for memory.

    Raises OSError where the kernel does not tell.
    """
    for line in path.read_text().splitlines():
        if line.startswith("full "):
            share = float(line.split("avg10=", 1)[1].split()[0])
            return Pressure.CRITICAL if share >= 20 else Pressure.WARNING if share >= 5 else Pressure.NORMAL
    raise OSError(f"{path} has no line 'full'")


class PressureWatch:
    """Calls `on_share` with the share of its budget that the pool may keep, whenever that changes.

    It shrinks at once and grows back only after `RECOVERY_SECONDS` without pressure. `look` is called about once a second,
    by `start`'s own thread or by anyone who has a timer.
    """

    def __init__(
        self,
        read: Callable[[], Pressure],
        on_share: Callable[[float, Pressure], None],
        *,
        warn: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._on_share = on_share
        self._warn = warn
        self._clock = clock
        self._share = 1.0
        self._calm_since: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.level = Pressure.NORMAL

    def look(self) -> bool:
        """Read the level and act on it. False when the system does not tell: then there is nothing to watch."""
        try:
            self.level = self._read()
        except (OSError, ValueError) as error:
            self._warn(f"memory pressure cannot be watched: {error}")
            return False
        wanted = POOL_SHARE[self.level]
        now = self._clock()
        if wanted < self._share:
            self._set(wanted)
        if wanted > self._share:
            if self._calm_since is None:
                self._calm_since = now
            elif now - self._calm_since >= RECOVERY_SECONDS:
                self._set(wanted)
        else:
            self._calm_since = None
        return True

    def start(self, interval_seconds: float = 1.0) -> None:
        """Look at the pressure in a thread of its own until `close`."""

        def run() -> None:
            while self.look() and not self._stop.wait(interval_seconds):
                pass

        self._thread = threading.Thread(target=run, name="memory-pressure", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _set(self, share: float) -> None:
        self._share = share
        self._calm_since = None
        self._on_share(share, self.level)


def system_pressure(platform: str = sys.platform) -> Callable[[], Pressure]:
    """The reader of this system."""
    return read_mac_pressure if platform == "darwin" else read_linux_pressure
