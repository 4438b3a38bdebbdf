"""Sends the fuzzer's requests to a server: every answer is checked, and in the end the server is alive and idle."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Reasoning, Text, Usage
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request
from tests.clients.apis import three_apis
from tests.fakes import FakeEngine, FakeGeneration
from tests.fuzz.cases import CHAT, COUNTS, RESPONSES, Case, continue_from, make_case, whole_bodies
from tests.fuzz.checks import Wrong, check, need

ANSWER_SECONDS = 60.0
_IDLE_TRIES = 400


@dataclass(slots=True)
class Report:
    """What a run found. `faults` holds a line for each wrong answer, `broken` the requests that got them."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    broken: list[Case] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, -1)

    def fault(self, case: Case, why: str) -> None:
        """Note a wrong answer."""
        self.faults.append(f"request {case.number} ({case.kind}, {case.path}): {why}")
        self.broken.append(case)


class AnsweringEngine(FakeEngine):
    """A fake engine that answers what was asked for: thinking, calls or JSON, and text."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    def submit(self, prepared: Prepared) -> FakeGeneration:
        """Answer by what the request allows."""
        self.script(*self._events(prepared.request, prepared.prompt_tokens))
        return super().submit(prepared)

    def _events(self, request: Request, prompt_tokens: int) -> Iterator[Event]:
        number = next(self._numbers)
        if request.thinking.on:
            yield Reasoning("Hm.")
        called = min(number % 3, request.call_limit) if request.tool_choice.mode == "auto" else request.call_limit and 1
        if not called:
            yield Text('{"a": 1}' if request.response_format.kind != "text" else "Hello\u2028 there.")
        for index, tool in zip(range(called), itertools.cycle(request.callable_tools or request.tools)):
            yield CallStart(index, f"call_{number}_{index}", tool.name)
            yield CallArguments(index, '{"path":')
            yield CallArguments(index, '"a"}')
            if number % 17 or index < called - 1:
                yield CallEnd(index)
        cut = called and number % 17 == 0
        reason = "length" if cut else "tool_calls" if called and request.tool_choice.mode != "named" else "stop"
        yield Finished(reason, Usage(prompt_tokens, 9, 3, 2 if request.thinking.on else 0), cache_note="ä\n")


async def fuzz(
    engine: Any, numbers: Sequence[int], *, seed: int = 0, clients: int = 4, most_tokens: int | None = None
) -> Report:
    """Send the requests `numbers` of the run `seed`, `clients` at a time, to a server in front of `engine`."""
    report, bodies = Report(), whole_bodies()
    waiting = iter(numbers)
    async with three_apis(engine) as live:
        with _server_errors(report):

            async def client() -> None:
                for number in waiting:
                    await _send(live.http, make_case(seed, number, bodies, most_tokens), report)

            await asyncio.gather(*(client() for _ in range(clients)))
        await _check_idle(live.http, report)
    return report


async def _send(http: httpx.AsyncClient, case: Case, report: Report) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await _ask(http, case)
            if answer is not None:
                _judge(case, answer, report)
                await _compare_count(http, case, answer)
                await _read_back(http, case, answer)
            else:
                report.statuses["left"] += 1
    except TimeoutError:
        report.fault(case, f"no answer within {ANSWER_SECONDS:g} s")
    except (Wrong, httpx.HTTPError) as error:
        report.fault(case, f"{type(error).__name__}: {error}")
    report.slowest = max(report.slowest, (time.monotonic() - began, case.number))


async def _ask(http: httpx.AsyncClient, case: Case) -> httpx.Response | None:
    """The answer to a case, None when its client went away."""
    raw = case.raw
    if case.first is not None:
        first = await http.post(case.api, content=case.first, headers=_HEADERS)
        need(first.status_code == 200, f"the first request: {first.status_code} {first.text[:300]}")
        raw = continue_from(case, first.json())
    async with http.stream("POST", case.path, content=raw, headers=_HEADERS) as answer:
        if case.leaves_after is not None:
            pieces = 0
            async for _ in answer.aiter_raw():
                pieces += 1
                if pieces > case.leaves_after:
                    return None
        await answer.aread() if not answer.is_stream_consumed else None
        return answer if case.leaves_after is None else None


def _judge(case: Case, answer: httpx.Response, report: Report) -> None:
    kind = "stream" if answer.headers.get("content-type", "").startswith("text/event-stream") else str(answer.status_code)
    report.statuses[f"{case.endpoint} {kind}"] += 1
    check(case.api, case.endpoint, answer.status_code, answer.headers, answer.text)
    need(case.kind != "whole" or answer.status_code == 200, f"a whole body is refused: {answer.text[:300]}")
    if answer.status_code == 400:
        error = answer.json()["error"]
        report.refusals[str(error.get("param") or error["message"][:40])] += 1


async def _compare_count(http: httpx.AsyncClient, case: Case, answer: httpx.Response) -> None:
    """What is counted is what a request takes."""
    if case.endpoint not in COUNTS or case.kind != "mutated" or answer.status_code != 200 or case.number % 4:
        return
    if answer.headers["content-type"] != "application/json":
        return
    usage = answer.json()["usage"]
    counted = await http.post(COUNTS[case.endpoint], content=case.raw, headers=_HEADERS)
    need(counted.status_code == 200, f"answered, but not counted: {counted.text[:300]}")
    taken = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    need(counted.json()["input_tokens"] == taken, f"counted {counted.json()['input_tokens']} tokens, took {taken}")


async def _read_back(http: httpx.AsyncClient, case: Case, answer: httpx.Response) -> None:
    """A response that was stored is there as it was given, and so is its input, whatever that holds."""
    if case.endpoint != RESPONSES or answer.status_code != 200 or answer.headers["content-type"] != "application/json":
        return
    body = answer.json()
    stored = await http.get(f"{RESPONSES}/{body['id']}")
    if body["store"]:
        need(stored.json() == body, f"read back: {stored.status_code} {stored.text[:300]}")
        items = await http.get(f"{RESPONSES}/{body['id']}/input_items", params={"limit": 100})
        need(items.status_code == 200 and items.json()["data"], f"its input: {items.status_code} {items.text[:300]}")
    else:
        need(stored.status_code == 404, f"not stored, but there: {stored.status_code}")


async def _check_idle(http: httpx.AsyncClient, report: Report) -> None:
    """The server answers a plain request, and nothing is left of the others."""
    plain = Case(-1, "plain", CHAT, json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode())
    await _send(http, plain, report)
    facts: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for _ in range(_IDLE_TRIES):
        facts = (await http.get("/health")).json()
        left = {name: facts[name] for name in ("queue", "running")}
        if not any(left.values()):
            break
    if any(left.values()):
        report.fault(plain, f"the server is not idle in the end: {left}")
    if not facts["ok"] or not facts["ready"] or facts.get("failed"):
        report.fault(
            plain, f"ok {facts['ok']}, ready {facts['ready']}, failed requests {facts.get('failed')}: {facts['reason']}"
        )


@contextmanager
def _server_errors(report: Report) -> Iterator[None]:
    """Take every error that the server logs for a fault."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report.faults.append(f"logged by {record.name}: {self.format(record)[-3000:]}")

    handler = Handler(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("pooled", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


_HEADERS = {"content-type": "application/json"}
