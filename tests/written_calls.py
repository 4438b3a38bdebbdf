"""Calls as model families write them: one place for the tests of all formats whose calls stand in a row of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pooled_mlx import chat_formats

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """How a format writes a row of calls, as its template does. `tags` are the tokens of its models, `think` its thoughts."""

    write: Callable[[Calls], str]
    tags: tuple[str, ...]
    think: tuple[str, str] = ("<think>", "</think>")
    gap: str = ""

    def one(self, name: str, /, **arguments: Any) -> str:
        """One call."""
        return self.write([(name, arguments)])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _deepseek(calls: Calls) -> str:
    inside = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


FAMILIES = {
    name: Family(write, tuple(sorted(chat_formats.get(name).tags)))
    for name, write in {
        "deepseek": _deepseek,
        "kimi": _kimi,
    }.items()
}
