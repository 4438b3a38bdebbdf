"""Decode under a grammar against decode without one, in pairs.

Scripted answers on the tiny hybrid with 248,320 logits: the same text held by its grammar and free (a script line with
`"free": true`). Then the embedded model with 49,152 logits, which answers by itself: how many of its tokens the mask changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.models import make_room
from benchmarks.prompts import script_text, user, words
from benchmarks.report import Result, Size, at_least, main, measured, note
from benchmarks.rooms import Run, ask, opened
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.runner.model import mx
from pooled_mlx.runner.sampler import BatchSampler

SIZES = (
    Size("pairs", 7, 2, "interleaved pairs of each kind of answer"),
    Size("words", 120, 40, "words of free text in each scripted answer"),
    Size("tokens", 96, 24, "tokens of each answer of the embedded model"),
    Size("models", "both", "both", "large (248k, scripted), small (49k) or both", ("large", "small", "both")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of answer: what is added to the body, and the text of a model that follows."""

    name: str
    body: dict[str, Any]
    text: str
    bar: float = 0.95


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _format(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"name": "answer", "schema": _schema(properties), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


WRITE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": _schema({"path": {"type": "string"}, "content": {"type": "string"}}),
    },
}
NOTE = {"title": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}, "text": {"type": "string"}}


def cases(count: int) -> list[Case]:
    """What is held, with `count` words of free text each."""
    free = words(count, 5)
    fixed = {f"part_{number}": {"const": words(count // 3, 30 + number)} for number in range(3)}
    call = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\nsrc/main.py\n</parameter>\n"
        f"<parameter=content>\n{free}\n</parameter>\n</function>\n</tool_call>"
    )
    consts = ", ".join(f'"{name}": "{value["const"]}"' for name, value in fixed.items())
    return [
        Case("JSON schema", _format(NOTE), f'{{"title": "river stone", "count": 17, "text": "{free}"}}'),
        Case("forced call", {"tools": [WRITE], "tool_choice": "required"}, call),
        Case("auto tools", {"tools": [WRITE]}, f"{words(count // 2, 6)}.\n\n{call}"),
        Case("forced stretches", _format(fixed), f"{{{consts}}}", bar=1.0),
    ]


def script(held: list[Case], count: int) -> str:
    """Each text twice, held and free, and one that follows no schema."""
    lines = [{"match": _marker(case.name, free), "text": case.text, "free": free} for case in held for free in (False, True)]
    never = words(20 * count, 9)
    lines += [{"match": _marker("never", free), "text": never, "free": free} for free in (False, True)]
    return script_text(lines)


def _marker(name: str, free: bool) -> str:
    return f"({name}, {'free' if free else 'held'})"


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    if sizes.models != "small":
        held = cases(sizes.words)
        with opened(make_room("hybrid-248k", EngineSettings(prefill_step=512), script(held, sizes.words))) as room:
            yield from asyncio.run(scripted(room, held, sizes))
    if sizes.models != "large":
        with opened(make_room("small", EngineSettings(prefill_step=128))) as room:
            yield from asyncio.run(natural(room, sizes))


async def scripted(room: LocalEngine, held: list[Case], sizes: Any) -> list[Result]:
    """The same text, held and free: the ratio of its times is that of the rates."""
    results = []
    for case in held:

        async def answer(free: bool, case: Case = case) -> Run:
            body = {"messages": [user(f"Go on {_marker(case.name, free)}")], "max_tokens": 2000, "temperature": 0}
            return await ask(room, body | case.body)

        pairs = await _pairs(answer, sizes.pairs)
        if any(a.text != b.text for a, b in pairs):
            raise RuntimeError(f"{case.name}: held and free answers differ: {pairs[0][0].text!r}, {pairs[0][1].text!r}")
        ratios = [b.decode_seconds / a.decode_seconds for a, b in pairs]
        with mask_counter() as counter:
            once = await answer(False)
        what = f"248k, {case.name}"
        results += [
            at_least(f"{what}: constrained / unconstrained", ratios, case.bar),
            note(f"{what}: tokens", _tokens(once, counter) + f"; free: {pairs[0][1].usage.completion_tokens}"),
        ]
    results += await _never(room, sizes)
    return results


async def _never(room: LocalEngine, sizes: Any) -> list[Result]:
    async def answer(free: bool) -> Run:
        body = {"messages": [user(f"Go on {_marker('never', free)}")], "max_tokens": sizes.words, "temperature": 0}
        return await ask(room, body | _format({"text": {"type": "string", "pattern": "^[0-9]{300}$"}}))

    pairs = await _pairs(answer, sizes.pairs)
    with mask_counter() as counter:
        once = await answer(False)
    return [
        at_least("248k, a model that never follows: constrained / unconstrained", [_rate(a) / _rate(b) for a, b in pairs], 0.5),
        note("248k, a model that never follows: tokens", _tokens(once, counter)),
    ]


async def natural(room: LocalEngine, sizes: Any) -> list[Result]:
    """The embedded model's own answers, held; the reference is its free text after a prompt of the same length."""
    requests = {
        "JSON schema": ("Describe a river as JSON with title, count and text.", _format(NOTE)),
        "forced call": ("Write a short story into the file story.txt.", {"tools": [WRITE], "tool_choice": "required"}),
        "auto tools": ("Tell a long story.", {"tools": [WRITE]}),
    }
    results = []
    for name, (text, more) in requests.items():
        first = await ask(room, {"messages": [user(text)], "max_tokens": 1, "temperature": 0} | more)
        story = "Tell a long story. " + words(first.usage.prompt_tokens - 35, 3)

        async def answer(free: bool, story: str = story, text: str = text, more: dict[str, Any] = more) -> Run:
            body: dict[str, Any] = {"max_tokens": sizes.tokens, "temperature": 0}
            return await ask(room, body | ({"messages": [user(story)]} if free else {"messages": [user(text)], **more}))

        pairs = await _pairs(answer, sizes.pairs)
        with mask_counter() as counter:
            once = await answer(False)
        results += [
            at_least(f"49k, SmolLM2, {name}: constrained / unconstrained", [_rate(a) / _rate(b) for a, b in pairs], 0.95),
            note(f"49k, SmolLM2, {name}: tokens", _tokens(once, counter)),
        ]
    results.append(measured("49k, SmolLM2: unconstrained", [_rate(b) for _, b in pairs], " tokens/s"))
    return results


async def _pairs(answer: Any, count: int) -> list[tuple[Run, Run]]:
    """Held and free answers by turns, after one of each that is not counted."""
    for free in (False, True):
        await answer(free)
    pairs = []
    for number in range(count):
        runs = {free: await answer(free) for free in ((False, True) if number % 2 == 0 else (True, False))}
        pairs.append((runs[False], runs[True]))
    return pairs


def _rate(run: Run) -> float:
    return run.usage.completion_tokens / run.decode_seconds


def _tokens(run: Run, counter: MaskCount) -> str:
    total = run.usage.completion_tokens
    return f"{total} in all, {counter.masked} chosen under a mask, {counter.changed} of them changed by it"


@dataclass(slots=True)
class MaskCount:
    """How many tokens were drawn under a mask, and for how many of them the draw without it would have been another."""

    masked: int = 0
    changed: int = 0


@contextmanager
def mask_counter() -> Iterator[MaskCount]:
    """Count masked draws meanwhile. Slows them down: not for a measurement of time."""
    count = MaskCount()
    draw_masked = BatchSampler.draw_masked

    def counting(self: BatchSampler, logits: mx.array, positions: Any, allowed: mx.array) -> mx.array:
        chosen = draw_masked(self, logits, positions, allowed)
        count.masked += 1
        count.changed += int(mx.sum(chosen != self.draw(logits, positions)).item())
        return chosen

    BatchSampler.draw_masked = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        BatchSampler.draw_masked = draw_masked  # type: ignore[method-assign]


if __name__ == "__main__":
    main(__doc__, SIZES, run)
