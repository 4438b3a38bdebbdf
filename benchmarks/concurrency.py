"""Several clients at once, against mlx_lm.server on the same float32 weights, interleaved.

Total rate of four streams; the longest gap of a running stream while another client's prompt is read; the next request after a
cancelled prompt; a request that arrives while another one decodes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.client import Running, Stream, stream
from benchmarks.models import float32_folder, make_room, small_folder
from benchmarks.prompts import script_text, user, words, write_script
from benchmarks.report import Result, Size, at_least, at_most, interleaved, main, measured, note, ratios
from benchmarks.rooms import opened, parse
from benchmarks.servers import Server, mlx_lm_server, pooled
from pooled_mlx.core.events import Finished, Prefill, Text
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.runner.model import load, mx

SIZES = (
    Size("rounds", 3, 1, "interleaved rounds of the stream rates"),
    Size("tokens", 256, 24, "tokens of each answer"),
    Size("system_words", 150, 60, "words of the system prompt that all streams have in common, as an agent's have"),
    Size("repeats", 5, 1, "repetitions of the other measurements"),
    Size("long_prompt", 2000, 600, "tokens of the prompt that is read beside a running stream"),
    Size("cancelled_prompt", 1600, 600, "tokens of the prompt that is cancelled"),
    Size("cancel_after", 0.7, 0.2, "seconds until it is cancelled"),
)
STREAMS = 4
STORY = "Tell a long story about this list of words. "


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    folder = float32_folder()
    with (
        pooled("small") as ours,
        mlx_lm_server(folder) as theirs,
        mlx_lm_server(folder, "--decode-concurrency", str(STREAMS)) as theirs_narrow,
    ):
        for server in (ours, theirs, theirs_narrow):
            stream(server, [user("hello")], 4)
        step = ours.get("/health")["prefill_step"]
        yield note("prefill step", str(step))
        yield from stream_rates(ours, theirs, theirs_narrow, sizes)
        yield from cancelled_prompt(ours, theirs, sizes, step)
        yield from arrival(ours, theirs, sizes)
    yield from admission(sizes)
    with TemporaryDirectory() as scratch:
        script = write_script(Path(scratch) / "answers.jsonl", [{"text": words(4000, 5)}])
        with pooled("small", "--step", str(step), "--script", str(script)) as server:
            yield from beside_a_prompt(server, sizes, step)


def stream_rates(ours: Server, theirs: Server, theirs_narrow: Server, sizes: Any) -> Iterator[Result]:
    """One stream and four, each with a question of its own below the same system prompt."""
    system = {"role": "system", "content": words(sizes.system_words, 98)}
    decoding: dict[str, list[float]] = {server.url: [] for server in (ours, theirs, theirs_narrow)}

    def four(server: Server) -> float:
        _rest(ours, theirs, theirs_narrow)
        total, all_decode = together(server, system, STREAMS, sizes.tokens)
        decoding[server.url].append(all_decode)
        return total

    def one(server: Server) -> float:
        _rest(ours, theirs, theirs_narrow)
        return together(server, system, 1, sizes.tokens)[0]

    runs: list[Callable[[], float]] = [lambda server=server: one(server) for server in (ours, theirs)]
    runs += [lambda server=server: four(server) for server in (ours, theirs, theirs_narrow)]
    rows = interleaved(sizes.rounds, runs)
    yield at_least(f"{STREAMS} streams / mlx_lm.server's", ratios(rows, over=2, under=3), 1.0)
    yield measured(f"{STREAMS} streams / mlx_lm.server's with --decode-concurrency {STREAMS}", ratios(rows, over=2, under=4))
    yield measured("one stream / mlx_lm.server's", ratios(rows, over=0, under=1))
    yield measured(f"{STREAMS} streams / one, ours", ratios(rows, over=2, under=0))
    yield measured(f"{STREAMS} streams / one, mlx_lm.server", ratios(rows, over=3, under=1))
    yield measured(f"{STREAMS} streams, ours", [row[2] for row in rows], " tokens/s")
    for server, whose in ((ours, "ours"), (theirs, "mlx_lm.server"), (theirs_narrow, "mlx_lm.server, narrow")):
        yield measured(f"{STREAMS} streams while all of them decode, {whose}", decoding[server.url], " tokens/s")


_seeds = itertools.count(100)


def _rest(*servers: Server) -> None:
    for server in servers:
        server.rest()


def together(server: Server, system: dict[str, Any], count: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of `count` streams in all: from the first request to the last token, and while all of them decode."""
    asked = [Running(server, [system, user(STORY + words(30, next(_seeds)))], tokens) for _ in range(count)]
    streams = [running.wait() for running in asked]
    seconds = max(one.last for one in streams) - min(one.sent for one in streams)
    begin, end = max(one.first for one in streams), min(one.last for one in streams)
    all_decode = sum(one.rate_between(begin, end) for one in streams) if end > begin else 0.0
    return sum(one.tokens for one in streams) / seconds, all_decode


def cancelled_prompt(ours: Server, theirs: Server, sizes: Any, step: int) -> Iterator[Result]:
    """A client goes away while its prompt is read; another one comes at once."""

    def after_cancel(server: Server) -> float:
        leaving = Running(server, [user(words(sizes.cancelled_prompt, next(_seeds)))], 4)
        time.sleep(sizes.cancel_after)
        if leaving.stop().times:
            raise RuntimeError(f"the prompt was read within {sizes.cancel_after} s: lower --cancel-after")
        return alone(server)

    def alone(server: Server) -> float:
        return stream(server, [user(words(10, next(_seeds)))], 1).first_token_seconds

    pieces = Pieces(sizes.cancelled_prompt, step)
    runs = [
        lambda: after_cancel(ours),
        lambda: alone(ours),
        lambda: after_cancel(theirs),
        lambda: alone(theirs),
        pieces.longest,
    ]
    rows = interleaved(sizes.repeats, runs)
    yield at_most(
        "after a cancelled prompt: (first token - the same alone) / one piece",
        [(row[0] - row[1]) / row[4] for row in rows],
        1.0,
    )
    yield measured("after a cancelled prompt: first token", [row[0] for row in rows], " s")
    yield measured("after a cancelled prompt: first token, mlx_lm.server", [row[2] for row in rows], " s")
    yield measured("first token of the same request alone", [row[1] for row in rows], " s")
    yield measured("first token of the same request alone, mlx_lm.server", [row[3] for row in rows], " s")


def arrival(ours: Server, theirs: Server, sizes: Any) -> Iterator[Result]:
    """First token of a short request that arrives while another one decodes, against the same on an idle server."""

    def busy(server: Server) -> float:
        running = Running(server, [user(STORY + words(30, next(_seeds)))], 400)
        running.wait_pieces(5)
        first = idle(server)
        running.stop()
        return first

    def idle(server: Server) -> float:
        return stream(server, [user(words(8, next(_seeds)))], 1).first_token_seconds

    rows = interleaved(sizes.repeats, [lambda: busy(ours), lambda: idle(ours), lambda: busy(theirs), lambda: idle(theirs)])
    yield measured("first token while another decodes - the same alone", [row[0] - row[1] for row in rows], " s")
    yield measured("the same, mlx_lm.server", [row[2] - row[3] for row in rows], " s")
    yield measured("first token while another decodes / mlx_lm.server's", ratios(rows, over=0, under=2))


def admission(sizes: Any) -> Iterator[Result]:
    """Tokens of a running stream between the arrival of a request and the beginning of its prompt."""
    with opened(make_room("small", EngineSettings(prefill_step=128), script_text([{"text": words(2000, 6)}]))) as room:
        counts = asyncio.run(_arrivals(room, sizes.repeats))
    yield at_most("tokens of a running stream until an arriving request is admitted", max(counts), 1)


async def _arrivals(room: LocalEngine, repeats: int) -> list[int]:
    counts = []
    for number in range(repeats):
        running, arriving = (
            room.prepare(parse({"messages": [user(words(20, 7000 + 2 * number + index))], "max_tokens": 400}).request)
            for index in range(2)
        )
        stream_events = room.submit(running)
        pieces = asyncio.Queue[None]()

        async def read(events: Any = stream_events, pieces: asyncio.Queue[None] = pieces) -> None:
            async for event in events:
                if isinstance(event, Text | Finished):
                    pieces.put_nowait(None)

        reader = asyncio.create_task(read())
        for _ in range(5):
            await pieces.get()
        while not pieces.empty():
            pieces.get_nowait()
        arrived = room.submit(arriving)
        async for event in arrived:
            if isinstance(event, Prefill):
                break
        counts.append(pieces.qsize())
        stream_events.cancel()
        arrived.cancel()
        await reader_end(reader)
    return counts


async def reader_end(reader: asyncio.Task[None]) -> None:
    """Wait for the end of a cancelled stream, whose last event is an error."""
    await asyncio.wait({reader}, timeout=60)


def beside_a_prompt(server: Server, sizes: Any, step: int) -> Iterator[Result]:
    """A running stream while another client's long prompt is read."""
    pieces = Pieces(sizes.long_prompt, step)
    solo, during, gaps, longest = [], [], [], []
    for _ in range(sizes.repeats):
        longest.append(pieces.longest())
        running = Running(server, [user(words(20, next(_seeds)))], 3900)
        running.wait_pieces(4)
        begin = time.perf_counter()
        running.wait_pieces(4 + sizes.tokens)
        solo.append(running.stream.rate_between(begin, time.perf_counter()))
        other = stream(server, [user(words(sizes.long_prompt, next(_seeds)))], 1)
        seen = running.stop()
        during.append(_share_seen(seen, other))
        gaps.append(seen.longest_gap(other.sent, other.first))
    steps = [1 / rate for rate in solo]
    yield at_most(
        "longest gap while another prompt is read / (one piece + one step)",
        [gap / (piece + one) for gap, piece, one in zip(gaps, longest, steps, strict=True)],
        1.1,
    )
    yield measured("longest gap while another prompt is read", gaps, " s")
    yield measured("one piece at the end of that prompt", longest, " s")
    yield at_least("rate while another prompt is read / rate alone", [a / b for a, b in zip(during, solo, strict=True)], 0.3)


def _share_seen(seen: Stream, other: Stream) -> float:
    return seen.rate_between(other.sent, other.first)


class Pieces:
    """The prefill pieces of a prompt, run in this process on the same weights."""

    _model: Any = None

    def __init__(self, tokens: int, step: int) -> None:
        if Pieces._model is None:
            Pieces._model = load(small_folder())
        self._lengths: Sequence[int] = [step] * max(1, tokens // step)

    def longest(self) -> float:
        """Seconds of the longest piece, which is the last one or nearly so."""
        model, times = Pieces._model, []
        caches = model.make_cache()
        for length in self._lengths:
            began = time.perf_counter()
            model.forward(mx.array([[1] * length]), caches)
            mx.eval([cache.state for cache in caches])
            times.append(time.perf_counter() - began)
        return max(times)


if __name__ == "__main__":
    main(__doc__, SIZES, run)
