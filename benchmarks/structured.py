"""Forced calls and JSON from the real small model at temperatures 0 to 2: how many are valid."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.models import small_card, small_folder
from pooled_mlx.core.answer import Answer, fold
from pooled_mlx.core.events import Event
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.request import Request, ResponseFormat, Sampling, Tool, ToolChoice, Turn
from pooled_mlx.engine.engine import LocalEngine

TEMPERATURES = (0.0, 0.5, 1.0, 1.5, 2.0)
TOPICS = ("Paris", "a cat", "the moon", "bread", "chess", "rain", "a train", "Tokyo", "music", "a garden")
BOUNDED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "count": {"type": "integer", "minimum": 0, "maximum": 500},
        "kind": {"enum": ["small", "medium", "large"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
UNBOUNDED = {
    "type": "object",
    "properties": {"story": {"type": "string"}},
    "required": ["story"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("describe", "Describe a thing.", BOUNDED),
    Tool(
        "look_up",
        "Look a thing up.",
        {"type": "object", "properties": {"query": {"type": "string", "maxLength": 30}}, "required": ["query"]},
    ),
)


@dataclass
class Case:
    """One request and its judge."""

    name: str
    request: Request

    def verdict(self, answer: Answer) -> str:
        """`valid`, `length` or what is wrong."""
        if answer.finish_reason in ("length", "context_full"):
            return "length"
        if self.name == "forced call":
            if len(answer.calls) < 1:
                return "no call"
            schemas: dict[str, Any] = {tool.name: tool.parameters for tool in TOOLS}
            pairs = [(schemas[call.name], call.arguments) for call in answer.calls]
        else:
            pairs = [(BOUNDED if self.name == "bounded JSON" else UNBOUNDED, answer.text)]
        for schema, text in pairs:
            try:
                Draft202012Validator(schema).validate(json.loads(text))
            except Exception as error:
                return f"invalid: {type(error).__name__}"
        return "valid"


def cases(count: int) -> list[Case]:
    """`count` requests of each kind over all topics and temperatures."""
    made = []
    for index in range(count):
        topic, temperature = TOPICS[index % len(TOPICS)], TEMPERATURES[(index // len(TOPICS)) % len(TEMPERATURES)]
        sampling = Sampling(temperature=temperature, top_k=40)
        turn = Turn("user", f"Describe {topic}, number {index}.")
        made.append(
            Case(
                "forced call",
                Request(
                    f"call-{index}",
                    (turn,),
                    tools=TOOLS,
                    tool_choice=ToolChoice("required"),
                    sampling=sampling,
                    parallel_tool_calls=False,
                    max_output_tokens=300,
                ),
            )
        )
        for name, schema, most in (("bounded JSON", BOUNDED, 300), ("unbounded JSON", UNBOUNDED, 80)):
            form = ResponseFormat("json_schema", schema, strict=True)
            request = Request(f"{name}-{index}", (turn,), response_format=form, sampling=sampling, max_output_tokens=most)
            made.append(Case(name, request))
    return made


async def answer(room: LocalEngine, case: Case) -> str:
    """The verdict on one answer."""
    prepared = await asyncio.to_thread(room.prepare, case.request)
    events: list[Event] = [event async for event in room.submit(prepared)]
    return case.verdict(fold(events))


async def run_all(room: LocalEngine, todo: list[Case], together: int) -> dict[str, Counter[str]]:
    """Verdicts by kind, `together` requests at a time."""
    verdicts: dict[str, Counter[str]] = {}
    gate = asyncio.Semaphore(together)

    async def one(case: Case) -> None:
        async with gate:
            verdicts.setdefault(case.name, Counter())[await answer(room, case)] += 1

    await asyncio.gather(*(one(case) for case in todo))
    return verdicts


def run(count: int = 100) -> None:
    """Print the table."""
    room = LocalEngine(small_card(), small_folder(), EngineSettings(seed=None, prefill_step=256))
    room.start()
    try:
        if not room.wait_ready(300):
            raise SystemExit(room.health()["reason"])
        for name, counter in asyncio.run(run_all(room, cases(count), 4)).items():
            print(f"{name}: {dict(counter)} of {count}")
    finally:
        room.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    run(parser.parse_args().count)
