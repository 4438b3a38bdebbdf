"""Keeps one child process alive: restarts it after a crash, with growing pauses, and leaves it alone after a clean end.

Nothing here waits: `tick` is called about once a second by whoever has a timer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

BACK_OFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
STABLE_SECONDS = 120.0
"""A child that lived this long was healthy: its crash starts the pauses anew."""
STOP_SECONDS = 90
"""Time to end before a stopping server is killed: a minute for its engine, the rest for open streams. A process that is killed
while Metal works for it can leave memory wired until the next start of the Mac."""

SupervisorState = Literal["off", "running", "stopping", "waiting", "ended"]


class Child(Protocol):
    """What `subprocess.Popen` offers and is used here."""

    @property
    def pid(self) -> int: ...  # noqa: D102

    def poll(self) -> int | None:
        """The return code, None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended. `code` is Popen's: minus the signal, or the exit code."""

    pid: int
    code: int
    wanted: bool


class Supervisor:
    """One child. Owned by one thread.

    States: "off" (never started, or stopped on request) · "running" · "stopping" · "waiting" (crashed, will be restarted) ·
    "ended" (it left by itself with code 0: by the rule of services a refusal that another start cannot cure).
    """

    def __init__(
        self,
        launch: Callable[[], Child],
        *,
        on_exit: Callable[[Exit], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        back_off_seconds: tuple[float, ...] = BACK_OFF_SECONDS,
    ) -> None:
        self._launch = launch
        self._on_exit = on_exit
        self._clock = clock
        self._back_off = back_off_seconds
        self._child: Child | None = None
        self._started = 0.0
        self._restart_at = 0.0
        self._kill_at = 0.0
        self._again = False
        self.state: SupervisorState = "off"
        self.crashes_in_a_row = 0
        self.problem = ""

    @property
    def pid(self) -> int | None:
        """The child's process id, None without one."""
        return self._child.pid if self._child is not None else None

    @property
    def seconds_to_restart(self) -> float:
        """How long until the next try; 0 unless waiting."""
        return max(0.0, self._restart_at - self._clock()) if self.state == "waiting" else 0.0

    def start(self) -> None:
        """Start the child unless it runs already. Also ends a pause."""
        if self.state in ("running", "stopping"):
            self._again = self.state == "stopping"
            return
        self.crashes_in_a_row = 0
        self._spawn()

    def stop(self) -> None:
        """Ask the child to end; it is killed after `STOP_SECONDS`. A pending restart is dropped."""
        self._again = False
        if self._child is None:
            self.state = "off"
        elif self.state == "running":
            self.state = "stopping"
            self._kill_at = self._clock() + STOP_SECONDS
            self._child.terminate()

    def restart(self) -> None:
        """Stop the child and start it again once it is gone."""
        if self._child is None:
            self.start()
            return
        self.stop()
        self._again = True

    def tick(self) -> None:
        """Look at the child and do what is due."""
        if self._child is not None:
            code = self._child.poll()
            if code is not None:
                self._gone(self._child, code)
            elif self.state == "stopping" and self._clock() >= self._kill_at:
                self._child.kill()
        if self.state == "waiting" and self._clock() >= self._restart_at:
            self._spawn()

    def _gone(self, child: Child, code: int) -> None:
        wanted = self.state == "stopping"
        lived = self._clock() - self._started
        self._child = None
        self._on_exit(Exit(child.pid, code, wanted))
        if wanted:
            self.state = "off"
            if self._again:
                self._again = False
                self._spawn()
        elif code == 0:
            self.state = "ended"
        else:
            if lived >= STABLE_SECONDS:
                self.crashes_in_a_row = 0
            self._wait()

    def _spawn(self) -> None:
        try:
            self._child = self._launch()
        except OSError as error:
            self.problem = f"the server could not be started: {error}"
            self._wait()
            return
        self.problem = ""
        self._started = self._clock()
        self.state = "running"

    def _wait(self) -> None:
        pause = self._back_off[min(self.crashes_in_a_row, len(self._back_off) - 1)]
        self.crashes_in_a_row += 1
        self._restart_at = self._clock() + pause
        self.state = "waiting"
