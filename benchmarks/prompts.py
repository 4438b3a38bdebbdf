"""Text for prompts and scripted answers: plain words, about one token each, different for every seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_WORDS = ("time people water house light story music paper river stone garden winter morning letter engine window").split()  # noqa: SIM905

FIRST_WORDS = len(_WORDS)
"""Seeds that differ by a multiple of this begin with the same word, and give the same number of tokens."""


def words(count: int, seed: int = 0) -> str:
    """`count` words, about as many tokens. Two seeds differ from their first words on."""
    names = []
    number = seed
    for _ in range(4):
        names.append(_WORDS[number % len(_WORDS)])
        number //= len(_WORDS)
    rest = [_WORDS[(index * 7 + seed * 13 + index * index * 3) % len(_WORDS)] for index in range(max(0, count - len(names)))]
    return " ".join([*names, *rest][:count])


@cache
def _sources() -> str:
    package = Path(__file__).parents[1] / "pooled_mlx"
    return "".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))


def code(characters: int, place: int) -> str:
    """Program text, about a token for every four characters: the part number `place` of this project's sources."""
    sources = _sources()
    begin = place * characters % max(1, len(sources) - characters)
    return sources[begin : begin + characters]


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def script_text(lines: Sequence[dict[str, Any]]) -> str:
    """Scripted answers as the text of an ANSWERS.jsonl."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_script(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write scripted answers to `path`."""
    path.write_text(script_text(lines), encoding="utf-8")
    return path
