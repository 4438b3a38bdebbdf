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
    endings: tuple[str, ...] = ()
    """What ends a value, a call and the row, from any place in them."""

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


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _minimax(calls: Calls) -> str:
    inside = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in given.items())
        + "</invoke>\n"
        for name, given in calls
    )
    return f"<minimax:tool_call>\n{inside}</minimax:tool_call>"


def _dsml(block: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        inside = "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(
                f'<｜DSML｜parameter name="{key}" string="{_json(isinstance(value, str))}">{_text(value)}</｜DSML｜parameter>\n'
                for key, value in given.items()
            )
            + "</｜DSML｜invoke>\n"
            for name, given in calls
        )
        return f"<｜DSML｜{block}>\n{inside}</｜DSML｜{block}>"

    return write


def _seed(calls: Calls) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in given.items())
        + "</function>\n</seed:tool_call>"
        for name, given in calls
    )


def _python(calls: Calls, between: str = ", ") -> str:
    words = {True: "True", False: "False", None: "None"}

    def literal(value: object) -> str:
        return words[value] if value is None or isinstance(value, bool) else _json(value)

    return between.join(
        f"{name}({', '.join(f'{key}={literal(value)}' for key, value in given.items())})" for name, given in calls
    )


def _endings(last: str) -> tuple[str, ...]:
    """All ends of `last`, which ends a value, its call and the row, cut at its tags."""
    at = [place for place, char in enumerate(last) if char == "<" or last[max(0, place - 1) : place] == ">"]
    return (*(last[place:] for place in at), *(last[: place or None] for place in at))


_MORE: dict[str, tuple[Any, ...]] = {
    "deepseek_v32": (
        *(("<think>", "</think>"), "\n\n"),
        _endings("</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
    ),
    "deepseek_v4": (
        *(("<think>", "</think>"), "\n\n"),
        _endings("</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
    ),
    "minimax": (("<think>", "</think>"), "\n\n", _endings("</parameter>\n</invoke>\n</minimax:tool_call>")),
    "seed_oss": (("<seed:think>", "</seed:think>"), "\n", _endings("</parameter>\n</function>\n</seed:tool_call>")),
}
FAMILIES = {
    name: Family(write, tuple(sorted(chat_formats.get(name).tags)), *_MORE.get(name, ()))
    for name, write in {
        "deepseek": _deepseek,
        "deepseek_v32": _dsml("function_calls"),
        "deepseek_v4": _dsml("tool_calls"),
        "kimi": _kimi,
        "lfm2": lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>",
        "olmo3": lambda calls: f"<function_calls>{_python(calls, chr(10))}</function_calls>",
        "minimax": _minimax,
        "seed_oss": _seed,
    }.items()
}
