"""What the pool takes for one long conversation of a large hybrid, and the CPU before the first forward pass of a full hit.

The model computes nothing and has the caches of Qwen3.6-35B-A3B, an eighth of their size: K/V of 2,560 bytes a token in 10
layers, states of 7.7 MiB in 30 layers, real arrays through the real loop and pool.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from pooled_mlx.engine.prefill import data_of
from pooled_mlx.runner.segments import materialise

from benchmarks.empty_models import kv_bytes_per_token, state_bytes
from benchmarks.models import make_room
from benchmarks.prompts import code, script_text, user, words
from benchmarks.report import Result, Size, at_least, at_most, main, measured, note
from benchmarks.rooms import ask, empty_pool, on_engine, opened, parse
from pooled_mlx.api.body import decode_json
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.engine.loop import Loop
from pooled_mlx.runner.model import memory_now, mx

SIZES = (
    Size("conversation", 30_000, 9000, "tokens of the conversation whose bytes are counted"),
    Size("turns", 20, 20, "turns of it, a checkpoint each"),
    Size("history", 100_000, 20_000, "tokens of the history that is hit"),
    Size("history_turns", 200, 40, "turns of that history"),
    Size("repeats", 7, 3, "full hits"),
)
KEPT_STATES = 8
MIB = 1024 * 1024
CHARACTERS_PER_TOKEN = 4
ANSWER = "This is the answer to it."


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    settings = EngineSettings(prefill_step=512)
    with opened(make_room("shape", settings, script_text([{"text": ANSWER}]))) as room:
        yield from asyncio.run(bytes_of_a_conversation(room, sizes.conversation, sizes.turns))
        empty_pool(room)
        yield from asyncio.run(full_hit(room, sizes.history, sizes.history_turns, sizes.repeats))


async def bytes_of_a_conversation(room: LocalEngine, tokens: int, turns: int) -> list[Result]:
    """Grow one conversation turn by turn, then compare what is in memory with its K/V once and eight states."""
    await ask(room, {"messages": [user("hello")], "max_tokens": 4})
    fresh = (await asyncio.to_thread(empty_pool, room))["active_bytes"]
    mx.reset_peak_memory()
    messages: list[dict[str, Any]] = []
    computed = []
    for turn in range(turns):
        messages.append(user(words(tokens // turns - 20, turn)))
        answer = await ask(room, {"messages": messages, "max_tokens": 20})
        computed.append(answer.usage.prompt_tokens - answer.usage.cached_tokens)
        messages.append({"role": "assistant", "content": answer.text})
    memory = memory_now()
    facts = await asyncio.to_thread(on_engine, room, _stored)
    kv = facts["tokens"] * kv_bytes_per_token()
    ideal = kv + KEPT_STATES * state_bytes()
    naive = turns * state_bytes() + kv_bytes_per_token() * facts["tokens"] * (turns + 1) / 2
    what = f"{facts['tokens']:,} tokens, {turns} turns"
    return [
        note(f"{what}: K/V once, one state", f"{kv / MIB:.1f} MiB, {state_bytes() / MIB:.2f} MiB"),
        note(f"{what}: states kept", f"{facts['states']} of {facts['segments']} segments"),
        at_most(f"{what}: pool / (K/V once + {KEPT_STATES} states)", facts["bytes"] / ideal, 1.2),
        at_most(f"{what}: all of MLX, hot cache included / the same", (memory.active - fresh) / ideal, 1.2),
        at_most(f"{what}: peak / the same", (memory.peak - fresh) / ideal, 2.2),
        note(f"{what}: a copy for every turn / the same", f"{naive / ideal:.2f}"),
        measured(f"{what}: tokens computed in a turn", computed[1:]),
    ]


def _stored(loop: Loop) -> dict[str, int]:
    segments = list(loop.pool.segments())
    return {
        "tokens": sum(segment.tokens for segment in segments),
        "segments": len(segments),
        "states": sum(1 for segment in segments if segment.state_bytes),
        "bytes": loop.pool.used_bytes,
    }


async def full_hit(room: LocalEngine, tokens: int, turns: int, repeats: int) -> list[Result]:
    """A long history that is stored in full, and one more message: all CPU work before the first forward pass."""
    messages = [user("Read this.")]
    count = 0
    while count < tokens:
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": code(CHARACTERS_PER_TOKEN * tokens // turns, len(messages))})
        if len(messages) % 20 == 0:
            request = parse({"messages": [*messages, user("count")], "max_tokens": 20}).request
            count = await asyncio.to_thread(room.count_tokens, request)
    await _one_hit(room, [*messages, user("first")], {})
    times: dict[str, list[float]] = {}
    for repeat in range(repeats):
        await _one_hit(room, [*messages, user(f"and now number {repeat}")], times)
    prompt = times["prompt tokens"][-1]
    what = f"{prompt:,.0f} tokens, full hit"
    total = [sum(values) for values in zip(times["parse"], times["prepare"], times["lookup"], strict=True)]
    return [
        at_least(f"{what}: reused of the prompt", times["reused"], 0.99),
        at_most(f"{what}: CPU before the first forward pass", total, 150.0, " ms"),
        *(measured(f"{what}: of it {name}", times[name], " ms") for name in ("parse", "prepare", "lookup")),
        measured(f"{what}: materialise", times["materialise"], " ms"),
        measured(f"{what}: materialise", times["gigabytes a second"], " GB/s"),
    ]


async def _one_hit(room: LocalEngine, messages: list[dict[str, Any]], times: dict[str, list[float]]) -> None:
    """Answer one request and add the times of its parts, in milliseconds."""

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.process_time()  # of all threads: the tokenizer has some of its own, and nothing else runs now
        value = call()
        times.setdefault(name, []).append((time.process_time() - began) * 1000)
        return value

    body = {"messages": messages, "max_tokens": 20}
    sent = json.dumps(body).encode()
    parsed = timed("parse", lambda: parse(decode_json(sent)))
    prepared = timed("prepare", lambda: room.prepare(parsed.request))
    ids = prepared.payload.prompt.ids

    def restore(loop: Loop) -> None:
        match = timed("lookup", lambda: loop.pool.lookup(ids))
        times.setdefault("reused", []).append(match.tokens / len(ids))
        if not match.path:
            return
        drop_slack(loop)
        caches = loop.model.make_cache()
        path = [data_of(segment) for segment in match.path]
        began = time.perf_counter()
        materialise(caches, path, None, reserve_tokens=len(ids) - match.tokens)
        seconds = time.perf_counter() - began
        times.setdefault("materialise", []).append(seconds * 1000)
        times.setdefault("gigabytes a second", []).append(match.tokens * kv_bytes_per_token() / seconds / 1e9)

    await asyncio.to_thread(on_engine, room, restore)
    answer = await ask(room, body)
    times.setdefault("prompt tokens", []).append(answer.usage.prompt_tokens)


if __name__ == "__main__":
    main(__doc__, SIZES, run)
