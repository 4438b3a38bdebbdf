"""Endurance: thousands of mixed requests on the tiny hybrid, a third of them cut off; afterwards nothing may be left.

In this process through the engine's own interface, and with `--through http` through a server process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from benchmarks.client import Running
from benchmarks.models import make_room
from benchmarks.prompts import script_text, user, words, write_script
from benchmarks.report import Result, Size, all_of, at_most, main, note, slope
from benchmarks.rooms import ask, empty_pool, one_arena, opened
from benchmarks.servers import Server, pooled
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.engine.engine import LocalEngine

SIZES = (
    Size("requests", 2000, 120, "requests in all"),
    Size("clients", 6, 6, "clients at the same time"),
    Size("conversations", 24, 6, "different conversations that they draw from: all are known by the second half"),
    Size("samples", 20, 6, "samples of the memory in the second half"),
    Size("pool_mib", 32, 32, "budget of the pool in MiB: small, so that it is full early"),
    Size("through", "room", "room", "room or http", ("room", "http")),
)
MIB = 1024 * 1024
_CALL = "<tool_call>\n<function=look>\n<parameter=path>\nsrc/main.py\n</parameter>\n</function>\n</tool_call>"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
ANSWERS = (
    {"match": "short", "text": "Yes."},
    {"match": "long", "text": words(32, 3)},
    {"match": "call", "text": f"I will look.\n\n{_CALL}"},
    {"match": "json", "text": '{"name": "river", "count": 7}'},
    {"match": "think", "text": f"{words(6, 4)}\n</think>\n\n{words(8, 5)}"},
)
KINDS = ("short", "long", "call", "json", "think")
LONGER_KINDS = ("long", "call", "think")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def draw(number: int, conversations: int) -> tuple[dict[str, Any], int | None]:
    """The body of request `number`, and after how many pieces its client goes away (None: it stays).

    Every third client goes away. Conversations repeat and grow, so that hits, branches and evictions all happen.
    """
    luck = random.Random(number)
    conversation = luck.randrange(conversations)
    turns = luck.randrange(1, 4)
    of_it = random.Random(conversation)
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(of_it.choice((8, 40, 120)), conversation % 7)}]
    for turn in range(turns):
        if turn:
            messages.append({"role": "assistant", "content": words(20, conversation + turn)})
        messages.append(user(words(of_it.choice((4, 20, 80)), conversation * 4 + turn)))
    leaves = number % 3 == 2
    kind = luck.choice(LONGER_KINDS if leaves else KINDS)
    messages[-1]["content"] += f" {kind}"
    body: dict[str, Any] = {"messages": messages, "max_tokens": 80, "temperature": 0, "stream": leaves or luck.random() < 0.25}
    if kind == "call":
        body |= {"tools": [TOOL], "tool_choice": "auto"}
    elif kind == "json":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA, "strict": True}}
    elif kind == "think":
        body["reasoning_effort"] = "low"
    return body, luck.choice((0, 1, 3)) if leaves else None


def sampled(requests: int, samples: int) -> list[int]:
    """After how many requests the memory is looked at: at the half, at the end, and evenly between."""
    half = requests // 2
    return sorted({half + (requests - half) * index // samples for index in range(samples + 1)})


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    began = time.monotonic()
    if sizes.through == "http":
        with TemporaryDirectory() as scratch:
            script = write_script(Path(scratch) / "answers.jsonl", ANSWERS)
            pool = ("--pool-bytes", str(sizes.pool_mib * MIB), "--max-queue", str(sizes.clients), "--one-arena")
            with pooled("hybrid", "--step", "256", "--script", str(script), *pool) as server:
                facts = asyncio.run(soak(OverHttp(server), sizes))
    else:
        one_arena()
        settings = EngineSettings(prefill_step=256, pool_bytes=sizes.pool_mib * MIB, max_queue=sizes.clients)
        with opened(make_room("hybrid", settings, script_text(ANSWERS))) as room:
            facts = asyncio.run(soak(InProcess(room), sizes))
    yield note("requests", f"{sizes.requests} in {time.monotonic() - began:.0f} s, {facts[-1]['cut']} cut off")
    yield from judge(facts)


def judge(facts: list[dict[str, Any]]) -> Iterator[Result]:
    """`facts` are those of the fresh room, then of every sample, the last one at the end; `number` counts requests."""
    fresh, samples = facts[0], facts[1:]
    last = samples[-1]
    busy = [last[name] for name in ("running", "waiting", "in_flight", "reserved_bytes", "segment_bytes", "failures")]
    yield all_of(
        "nothing running, waiting, reserved, stored or failed at the end", sum(1 for value in busy if value == 0), len(busy)
    )
    yield at_most("active memory against the fresh room", abs(last["active_bytes"] - fresh["active_bytes"]) / MIB, 1.0, " MiB")
    growth = slope([(sample["number"], sample["rss_bytes"]) for sample in samples])
    yield at_most("resident memory a request, second half", growth / 1024, 1.0, " KiB")
    yield note("resident memory", f"{fresh['rss_bytes'] / MIB:.0f} MiB fresh, {last['rss_bytes'] / MIB:.0f} MiB at the end")


class Target(Protocol):
    """What the requests go to."""

    async def ask(self, body: dict[str, Any], cut_after: int | None) -> bool:
        """Send one request; True when its client went away before the end."""
        ...

    async def health(self) -> Mapping[str, Any]:
        """Facts of /health."""
        ...

    async def facts(self) -> dict[str, Any]:
        """Empty the pool; what is left."""
        ...


class InProcess:
    """A room in this process."""

    def __init__(self, room: LocalEngine) -> None:
        self._room = room

    async def ask(self, body: dict[str, Any], cut_after: int | None) -> bool:
        return (await ask(self._room, body, cut_after=cut_after)).last == 0.0

    async def health(self) -> Mapping[str, Any]:
        return self._room.health()

    async def facts(self) -> dict[str, Any]:
        return await asyncio.to_thread(empty_pool, self._room)


class OverHttp:
    """A server process."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def ask(self, body: dict[str, Any], cut_after: int | None) -> bool:
        return await asyncio.to_thread(self._ask, dict(body), cut_after)

    def _ask(self, body: dict[str, Any], cut_after: int | None) -> bool:
        running = Running(self._server, body.pop("messages"), body.pop("max_tokens"), **body)
        if cut_after is None:
            running.wait()
            return False
        while cut_after and not running.over and len(running.stream.times) <= cut_after:
            time.sleep(0.001)
        left = not running.over
        running.stop()
        return left

    async def health(self) -> Mapping[str, Any]:
        return await asyncio.to_thread(self._server.get, "/health")

    async def facts(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._server.facts)


async def soak(target: Target, sizes: Any) -> list[dict[str, Any]]:
    """Send everything; facts of the fresh target and of every sample."""
    for kind in range(len(KINDS)):
        await target.ask(draw(kind, sizes.conversations)[0], None)
    facts = [{**await target.facts(), "number": 0}]
    begin = cut = 0
    for end in sampled(sizes.requests, sizes.samples):
        numbers = iter(range(begin, end))

        async def client(numbers: Iterator[int] = numbers) -> int:
            return sum([await target.ask(*draw(number, sizes.conversations)) for number in numbers])

        cut += sum(await asyncio.gather(*(client() for _ in range(sizes.clients))))
        await _idle(target)
        facts.append({**await target.facts(), "number": end, "cut": cut})
        print(f"  after {end}: {facts[-1]['rss_bytes'] / MIB:.2f} MiB resident, {cut} cut off", flush=True)
        begin = end
    return facts


async def _idle(target: Target) -> None:
    """Wait until cancelled requests have left. Raises RuntimeError when they do not within a minute."""
    for _ in range(6000):
        health = await target.health()
        if health["queue"] + health["running"] == 0:
            return
        await asyncio.sleep(0.01)
    raise RuntimeError(f"requests are still running: {health['requests']}")


if __name__ == "__main__":
    main(__doc__, SIZES, run)
