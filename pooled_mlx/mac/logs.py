"""The log of a server without a terminal: its standard output and error, in one file that is rotated by size.

launchd and Popen hand over an open file and never rotate it. So the server itself takes its output over: descriptors 1 and
2 are pointed at our file, which catches what Python cannot, such as the last words of an aborting C++ library.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

MAX_LOG_BYTES = 5 * 1024 * 1024
KEPT_LOGS = 5


def rotated(path: Path, number: int) -> Path:
    """`server.log`, 2 -> `server.2.log`."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def rotate(path: Path, kept: int = KEPT_LOGS) -> None:
    """Move `path` out of the way: it becomes number 1, the others move up, number `kept` is dropped."""
    for number in range(kept - 1, 0, -1):
        older = rotated(path, number)
        if older.exists():
            os.replace(older, rotated(path, number + 1))
    if path.exists():
        os.replace(path, rotated(path, 1))


def tail(path: Path, lines: int = 20, max_bytes: int = 16_384) -> list[str]:
    """The last lines of a text file; [] when it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return []
    return data.decode("utf-8", "replace").splitlines()[-lines:]


class OutputLog:
    """Points descriptors 1 and 2 at `path` and keeps that file small."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES, kept: int = KEPT_LOGS) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take_over(self) -> None:
        """Send this process's output to the file from now on. A file that is too large is rotated first."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._size() > self._max_bytes:
            rotate(self._path, self._kept)
        self._point()

    def rotate_if_large(self) -> bool:
        """Start a new file when this one has grown too large; True when it did."""
        if self._size() <= self._max_bytes:
            return False
        rotate(self._path, self._kept)
        self._point()
        return True

    def watch(self, interval_seconds: float = 60.0) -> None:
        """Look at the size from time to time, until `close`."""

        def run() -> None:
            while not self._stop.wait(interval_seconds):
                self.rotate_if_large()

        self._thread = threading.Thread(target=run, name="log-rotation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. The output stays where it is."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _point(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.dup2(handle, 1)
            os.dup2(handle, 2)
        finally:
            os.close(handle)
