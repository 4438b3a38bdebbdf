"""What became of a server that nobody watched: the run under way, the last crash, the last refusal.

A run is written down when it starts and struck out when it ends. One that was never struck out and whose process is gone
has crashed; the last lines of its log are kept, so that `pooled-mlx status` can show them after launchd has restarted it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pooled_mlx.mac.logs import OutputLog, tail
from pooled_mlx.mac.places import Places, write_private

_SAME_PROCESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """One life of a server. Times are Unix seconds; `process_started_at` tells a reused pid from the same process."""

    pid: int
    version: str
    started_at: float
    process_started_at: float | None = None
    log: str = ""
    ended_at: float | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """A run that ended badly. `signal` is a name such as SIGABRT where known; `lines` are the last ones of its log."""

    at: float
    pid: int
    version: str
    ran_seconds: float
    exit_code: int | None = None
    signal: str | None = None
    lines: list[str] = field(default_factory=list[str])

    @property
    def summary(self) -> str:
        """One line: how it ended."""
        if self.signal:
            how = f"killed by {self.signal}"
        elif self.exit_code is not None:
            how = f"exit code {self.exit_code}"
        else:
            how = "ended without a word"
        return f"pid {self.pid} (version {self.version}): {how}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A start that was refused for good: launchd must not try again."""

    at: float
    reason: str


def read_run(where: Places) -> Run | None:
    """The run on record, ended or not."""
    return _read(where.run_record, Run)


def read_refusal(where: Places) -> Refusal | None:
    """Why the last start was refused, if it was."""
    return _read(where.refusal, Refusal)


def last_crash(where: Places, alive: Callable[[Run], bool] | None = None) -> Crash | None:
    """The last crash, also one that no later start has noticed yet. Writes nothing."""
    run = read_run(where)
    if run is not None and run.ended_at is None and not (alive or is_alive)(run):
        return _crash_of(run)
    return _read(where.last_crash, Crash)


def is_alive(run: Run) -> bool:
    """True when the process of this run still exists."""
    import psutil

    try:
        started = psutil.Process(run.pid).create_time()
    except psutil.Error:
        return False
    return run.process_started_at is None or abs(started - run.process_started_at) < _SAME_PROCESS_SECONDS


def note_exit(where: Places, pid: int, return_code: int, clock: Callable[[], float] = time.time) -> Crash | None:
    """Called by whoever started the server and saw it end. `return_code` is Popen's: minus the signal, or the exit code.

    Returns the crash, None after a clean end.
    """
    run = read_run(where)
    if run is None or run.pid != pid:
        run = Run(pid=pid, version="unknown", started_at=clock(), log=str(where.server_log))
    return _finish(where, run, return_code, clock())


class UnattendedRun:
    """The server's own side of the record; see `unattended`."""

    def __init__(self, where: Places, run: Run, clock: Callable[[], float]) -> None:
        self._where = where
        self._run = run
        self._clock = clock

    def refuse(self, reason: str) -> int:
        """A start that cannot succeed, whatever is tried: keep the reason and return the exit code, which is 0.

        launchd restarts on every other code, so a model that does not fit would be loaded again for ever.
        """
        print(f"pooled-mlx: refused to start: {reason}", file=sys.stderr, flush=True)
        _write(self._where.refusal, Refusal(self._clock(), reason))
        return 0

    def end(self, exit_code: int) -> None:
        """The run is over; any code but 0 is kept as a crash."""
        sys.stderr.flush()
        _finish(self._where, self._run, exit_code, self._clock())


@contextmanager
def unattended(
    where: Places, version: str, *, redirect: bool = True, clock: Callable[[], float] = time.time
) -> Iterator[UnattendedRun]:
    """What `serve --service` runs in: own log, record of the run, crash of the former one noticed.

    An exception that leaves the block ends the run as a crash and goes on. `SystemExit` counts by its code. Call
    `UnattendedRun.end` with the exit code before leaving normally; without it the run counts as clean.
    """
    former = read_run(where)
    if former is not None and former.ended_at is None and not is_alive(former):
        _write(where.last_crash, _crash_of(former))
        _write(where.run_record, replace(former, ended_at=clock()))
    where.refusal.unlink(missing_ok=True)
    log = OutputLog(where.server_log)
    if redirect:
        log.take_over()
        log.watch()
        faulthandler.enable()
    run = Run(os.getpid(), version, clock(), _process_start(), str(where.server_log))
    _write(where.run_record, run)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_at))
    print(f"=== pooled-mlx {version} starts, pid {run.pid}, {stamp}", file=sys.stderr, flush=True)
    mine = UnattendedRun(where, run, clock)
    code = 0
    try:
        yield mine
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        raise
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
        raise
    finally:
        latest = read_run(where)
        if latest is not None and latest.pid == run.pid and latest.ended_at is None:
            mine.end(code)
        log.close()


def _process_start() -> float | None:
    import psutil

    return psutil.Process().create_time()


def _finish(where: Places, run: Run, code: int, now: float) -> Crash | None:
    _write(where.run_record, replace(run, ended_at=now, exit_code=code))
    if code == 0:
        return None
    crash = _crash_of(replace(run, ended_at=now, exit_code=code))
    _write(where.last_crash, crash)
    return crash


def _crash_of(run: Run) -> Crash:
    log = Path(run.log)
    ended = run.ended_at
    if ended is None:
        ended = log.stat().st_mtime if run.log and log.exists() else run.started_at
    code, name = run.exit_code, None
    if code is not None and code < 0:
        name, code = signal_name(-code), None
    return Crash(
        at=ended,
        pid=run.pid,
        version=run.version,
        ran_seconds=max(0.0, ended - run.started_at),
        exit_code=code,
        signal=name,
        lines=tail(log) if run.log else [],
    )


def signal_name(number: int) -> str:
    """`9` -> `SIGKILL`; `signal 99` where the system has no such one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write(path: Path, value: Any) -> None:
    write_private(path, json.dumps(asdict(value), indent=1).encode())


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return kind(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
