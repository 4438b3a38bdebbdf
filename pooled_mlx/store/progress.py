"""Progress of a download or conversion: values for `/health` and the menu bar, a bar for a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

Stage = Literal["downloading", "checking", "converting"]

STALL_SECONDS = 30.0
"""Without a new byte for this long a download counts as stalled."""
_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of making a model ready.

    `total_bytes` and `seconds_left` are None while unknown, `rate` is bytes per second over the last ten seconds,
    `stalled_seconds` counts from the last byte that came and is 0 while bytes come.
    """

    stage: Stage
    model: str
    done_bytes: int = 0
    total_bytes: int | None = None
    rate: float = 0.0
    seconds_left: float | None = None
    stalled_seconds: float = 0.0

    @property
    def fraction(self) -> float | None:
        """Done of total, 0 to 1; None while the total is unknown."""
        return min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else None


Report = Callable[[Progress], None]


def no_report(progress: Progress) -> None:
    """Discards progress."""


class Meter:
    """Turns byte counts into `Progress` with rate and time left. `clock` gives seconds."""

    def __init__(
        self, stage: Stage, model: str, total_bytes: int | None, report: Report, clock: Callable[[], float] = time.monotonic
    ):
        self._stage: Stage = stage
        self._model, self._report, self._clock = model, report, clock
        self.total_bytes = total_bytes
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._moved_at = clock()
        self._done = 0

    def set_done(self, done_bytes: int) -> None:
        """`done_bytes` are done now. Counts of an earlier run that is resumed do not enter the rate."""
        now = self._clock()
        if len(self._samples) == 1 and self._done == 0:
            self._samples[0] = (self._samples[0][0], done_bytes if done_bytes > 0 and now - self._samples[0][0] < 0.5 else 0)
        if done_bytes != self._done:
            self._moved_at = now
        self._done = done_bytes
        self._samples.append((now, done_bytes))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        began, first = self._samples[0]
        rate = max(done_bytes - first, 0) / (now - began) if now > began else 0.0
        left = (self.total_bytes - done_bytes) / rate if self.total_bytes and rate > 0 else None
        still = now - self._moved_at
        self._report(
            Progress(
                self._stage, self._model, done_bytes, self.total_bytes, rate, left, still if still >= STALL_SECONDS else 0.0
            )
        )


class TerminalBar:
    """Shows progress on a terminal; where stderr is none, one line per stage. Use it as a context manager and call it."""

    def __init__(self, console: Any = None):
        self._console = console
        self._bar: Any = None
        self._task: Any = None
        self._stage: str | None = None

    def __enter__(self) -> TerminalBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, progress: Progress) -> None:
        """Draw `progress`."""
        from rich.console import Console

        if self._console is None:
            self._console = Console(stderr=True)
        begins = progress.stage != self._stage
        self._stage = progress.stage
        if not self._console.is_terminal:
            if begins:
                self._console.print(f"{progress.stage} {progress.model}{_total(progress)}", highlight=False, soft_wrap=True)
            return
        if begins:
            self.__exit__(None, None, None)
            self._start(progress)
        note = f"[yellow]no data for {progress.stalled_seconds:.0f} s" if progress.stalled_seconds else ""
        self._bar.update(self._task, completed=progress.done_bytes, total=progress.total_bytes, note=note)

    def _start(self, progress: Progress) -> None:
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[note]}"),
        )
        self._bar = bars.Progress(*columns, console=self._console)
        self._task = self._bar.add_task(f"{progress.stage} {progress.model}", total=progress.total_bytes, note="")
        self._bar.start()


def _total(progress: Progress) -> str:
    from pooled_mlx.core.memory import format_size

    return f" ({format_size(progress.total_bytes)})" if progress.total_bytes else ""
