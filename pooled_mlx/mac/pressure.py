"""Memory pressure of the system: the pool shrinks first, so that nobody is killed for our cache."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

STEP_SECONDS = 20.0
"""The system must have been calm this long before the pool may grow by a step."""
TRIM_SECONDS = 10.0
"""Between two trims: the system takes a moment to say whether the last one was enough."""
STEPS = (0.25, 0.5, 1.0)
"""Shares of its budget over which the pool grows back. A warning alone leaves it the first one."""
TRIM_SHARE = 0.125
"""What a warning takes at a time, of the budget."""


class Pressure(IntEnum):
    """The levels of macOS's `kern.memorystatus_vm_pressure_level`, by its numbers."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Hold:
    """What the pool may have: a share of its budget (1: all), and what clients begin with (system + tools) beyond it.

    Requests that run keep what they hold.
    """

    share: float = 1.0
    keeps_pins: bool = True


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
    """Calls `on_hold` with what the pool may have, whenever that changes.

    A warning trims what is in use by an eighth of the budget, again and again until the system is content, down to a quarter.
    At a critical level everything goes but what clients begin with, and that too if the level stays. The pool grows back in
    steps while the system is calm. `used` is the share of the budget in use now. `look` is called about once a second, by
    `start`'s own thread or by anyone who has a timer.
    """

    def __init__(
        self,
        read: Callable[[], Pressure],
        on_hold: Callable[[Hold, Pressure], None],
        *,
        used: Callable[[], float] = lambda: 1.0,
        warn: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._on_hold, self._used, self._warn, self._clock = read, on_hold, used, warn, clock
        self._hold = Hold()
        self._changed = -math.inf
        self._since: tuple[Pressure, float] = (Pressure.NORMAL, -math.inf)
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
        now = self._clock()
        if self._since[0] != self.level:
            self._since = (self.level, now)
        hold = self._next(now - max(self._since[1], self._changed))
        if hold != self._hold:
            self._hold, self._changed = hold, now
            self._on_hold(hold, self.level)
        return True

    def _next(self, seconds: float) -> Hold:
        """What the pool may have from now on; for `seconds` neither the level nor that has changed."""
        share, first = self._hold.share, STEPS[0]
        if self.level is Pressure.CRITICAL:
            return Hold(0.0, keeps_pins=share > 0.0 or (self._hold.keeps_pins and seconds < TRIM_SECONDS))
        if self.level is Pressure.WARNING and share >= first:
            due = share == 1.0 or seconds >= TRIM_SECONDS
            return Hold(max(first, min(share, self._used()) - TRIM_SHARE)) if due and share > first else self._hold
        if seconds < STEP_SECONDS or share == 1.0:
            return self._hold
        return Hold(first if self.level is Pressure.WARNING else next(step for step in STEPS if step > share))

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


def system_pressure(platform: str = sys.platform) -> Callable[[], Pressure]:
    """The reader of this system."""
    return read_mac_pressure if platform == "darwin" else read_linux_pressure
