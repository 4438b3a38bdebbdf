"""Server processes under measurement: ours and mlx-lm's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

READY_SECONDS = 180
_LOOK_SECONDS, _MOST_LOOKS, _IDLE_PERCENT = 0.15, 400, 5.0
_ROOT = Path(__file__).parents[1]


@dataclass
class Server:
    """A running server: its base URL (without /v1), the model name to send, its process. `lag` is known after its end."""

    url: str
    process: subprocess.Popen[str]
    model: str
    lag: dict[str, float] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def facts(self) -> dict[str, Any]:
        """Empty the pool of our own idle server; what is left in memory and in use."""
        self.process.send_signal(signal.SIGUSR1)
        return json.loads(self._line("facts "))

    def count_peak_anew(self) -> None:
        """From now on the peak memory in /health is that of what follows (our own server only)."""
        self.process.send_signal(signal.SIGUSR2)
        self._line("peak")

    def rest(self) -> None:
        """Wait until the process is idle: some servers go on working after an answer, at the cost of who is measured next."""
        process = psutil.Process(self.process.pid)
        quiet = 0
        for _ in range(_MOST_LOOKS):
            quiet = quiet + 1 if process.cpu_percent(_LOOK_SECONDS) < _IDLE_PERCENT else 0
            if quiet == 2:
                return
        raise RuntimeError("a server does not come to rest")

    def _line(self, beginning: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(beginning):
            raise RuntimeError(f"the server wrote {line!r}, not {beginning!r}")
        return line[len(beginning) :]


@contextmanager
def pooled(model: str, *arguments: str) -> Iterator[Server]:
    """`python -m benchmarks.serve MODEL ...`, ready to answer."""
    command = [sys.executable, "-m", "benchmarks.serve", model, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    server = Server("", process, "pooled")
    try:
        server.url = f"http://127.0.0.1:{server._line('port ').strip()}"
        yield server
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=60)
        for line in (rest or "").splitlines():
            if line.startswith("lag "):
                server.lag = json.loads(line[len("lag ") :])


@contextmanager
def mlx_lm_server(folder: Path, *arguments: str) -> Iterator[Server]:
    """mlx-lm's own server on a model folder, with OpenBLAS in the process where ours has it."""
    from pooled_mlx.runner.model import BLAS

    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if BLAS:
        environment["LD_PRELOAD"] = BLAS
    port = _free_port()
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port), *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
        server = Server(f"http://127.0.0.1:{port}", process, str(folder))
        try:
            _wait(server, log)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def _wait(server: Server, log: Any) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.3)
    log.seek(0)
    raise RuntimeError(f"mlx_lm.server did not start: {log.read()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
