"""A short request beside a very long one: memory, rates, and the lag of the server's event loop.

The model is a small random llama with 8 KiB of K/V a token, whose long prompts are cheap to read, with scripted answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.client import Running, stream
from benchmarks.prompts import user, words, write_script
from benchmarks.report import Result, Size, at_least, at_most, main, measured, note
from benchmarks.servers import Server, pooled

SIZES = (
    Size("long_prompt", 20_000, 3000, "tokens of the long prompt"),
    Size("short_prompt", 100, 100, "tokens of the short prompt"),
    Size("short_answer", 100, 40, "tokens of the short answer"),
    Size("window", 300, 60, "tokens of the long stream for each measurement of its own"),
    Size("step", 256, 256, "tokens of a prefill piece"),
    Size("repeats", 3, 1, "repetitions"),
)
ANSWER_WORDS = 8000


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    with TemporaryDirectory() as scratch:
        script = write_script(Path(scratch) / "answers.jsonl", [{"text": words(ANSWER_WORDS, 5)}])
        with pooled("long", "--step", str(sizes.step), "--script", str(script), "--lag") as server:
            stream(server, [user("hello")], 4)
            rounds = [_round(server, sizes, number) for number in range(sizes.repeats)]
        lag = server.lag
    yield note("long prompt", f"{rounds[0]['prompt']:.0f} tokens")
    yield at_least("short stream while the long prompt is read / alone", [row["share"] for row in rounds], 0.3)
    yield at_most("peak memory, long stream with a short request / alone", [row["peak"] for row in rounds], 1.1)
    yield at_least("long stream with a short request / alone", [row["long"] for row in rounds], 0.5)
    yield measured("long stream alone", [row["rate"] for row in rounds], " tokens/s")
    yield measured("first token of the short request beside the long stream", [row["first"] for row in rounds], " s")
    yield at_most("lag of the event loop under this load, 99th percentile", lag["p99_ms"], 10.0, " ms")
    yield note("lag: median, maximum", f"{lag['p50_ms']:.2f} ms, {lag['max_ms']:.1f} ms of {lag['samples']:.0f} samples")


def _round(server: Server, sizes: Any, number: int) -> dict[str, float]:
    """One long prompt beside a running short stream, then its answer alone and beside a short request."""
    result: dict[str, float] = {}
    seed = 100 * number
    running = Running(server, [user(words(sizes.short_prompt, seed + 1))], ANSWER_WORDS - 100)
    running.wait_pieces(10)
    begin = time.perf_counter()
    running.wait_pieces(10 + sizes.window)
    alone = running.stream.rate_between(begin, time.perf_counter())

    long = Running(server, [user(words(sizes.long_prompt, seed + 2))], ANSWER_WORDS - 100)
    long.wait_pieces(1)
    seen = running.stop()
    result["share"] = seen.rate_between(long.stream.sent, min(long.stream.first, seen.last)) / alone

    def watch(pieces: int) -> tuple[float, float]:
        """Rate and peak memory of the next tokens of the long stream."""
        server.count_peak_anew()
        begin, count = time.perf_counter(), len(long.stream.times)
        long.wait_pieces(count + pieces)
        return long.stream.rate_between(begin, time.perf_counter()), server.get("/health")["memory"]["peak_bytes"]

    watch(10)  # the short stream has gone by now
    result["rate"], peak_alone = watch(sizes.window)
    server.count_peak_anew()
    short = stream(server, [user(words(sizes.short_prompt, seed + 3))], sizes.short_answer)
    peak_beside = server.get("/health")["memory"]["peak_bytes"]
    result["long"] = long.stream.rate_between(short.sent, short.last) / result["rate"]
    result["peak"] = peak_beside / peak_alone
    result["first"] = short.first_token_seconds
    long.stop()
    result["prompt"] = sizes.long_prompt
    return result


if __name__ == "__main__":
    main(__doc__, SIZES, run)
