"""Server processes under measurement, and a small streaming client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY_SECONDS = 180


@dataclass
class Server:
    """A running server: its base URL (without /v1) and its process."""

    url: str
    process: subprocess.Popen[str]
    model: str


@contextmanager
def pooled(program: str, *arguments: str) -> Iterator[Server]:
    """`python -m benchmarks.serve_PROGRAM`, which prints its port when it is ready."""
    command = [sys.executable, "-m", f"benchmarks.serve_{program}", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith("port "):
            raise RuntimeError(f"{' '.join(command)} did not start: {line}")
        yield Server(f"http://127.0.0.1:{line.split()[1]}", process, "pooled")
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def mlx_lm_server(folder: Path, port: int, *arguments: str) -> Iterator[Server]:
    """mlx-lm's own server on the same weights, with OpenBLAS in the process where ours has it."""
    from pooled_mlx.engine.mlx_backend import BLAS

    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if BLAS:
        environment["LD_PRELOAD"] = BLAS
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port), *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.3)
        else:
            raise RuntimeError("mlx_lm.server did not start")
        yield Server(url, process, str(folder))
    finally:
        process.terminate()
        process.wait(30)


@dataclass
class Stream:
    """What a client saw of one streamed answer; times are `time.perf_counter` seconds."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second between the first and the last one."""
        return (len(self.times) - 1) / (self.last - self.first) if len(self.times) > 1 else 0.0

    @property
    def first_token_seconds(self) -> float:
        """Time to the first token."""
        return self.first - self.sent

    @property
    def longest_gap(self) -> float:
        """The longest time between two tokens."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def stream(
    server: Server, messages: list[dict[str, Any]], tokens: int, *, stop_after: float | None = None, **more: Any
) -> Stream:
    """Stream one greedy answer; with `stop_after` the connection is closed after so many seconds."""
    body = {
        "model": server.model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    result = Stream(time.perf_counter())
    with (
        httpx.Client(timeout=httpx.Timeout(600)) as client,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            now = time.perf_counter()
            if stop_after is not None and now - result.sent > stop_after:
                return result
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            result.usage = chunk.get("usage") or result.usage
            delta = (chunk.get("choices") or [{}])[0].get("delta", {})
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text:
                result.text += text
                result.first = result.first or now
                result.last = now
                result.times.append(now)
    return result


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.25), at(0.5), at(0.75)


def words(count: int, seed: int = 0) -> str:
    """About `count` tokens of plain text that differs with the seed."""
    lexicon = ("time people water house light story music paper river stone garden winter morning letter engine window").split()  # noqa: SIM905
    return " ".join(lexicon[(index * 7 + seed * 13 + index * index * 3) % len(lexicon)] for index in range(count))
