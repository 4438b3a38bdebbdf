"""Text for prompts and scripted answers: plain words, about one token each, different for every seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WORDS = ("time people water house light story music paper river stone garden winter morning letter engine window").split()  # noqa: SIM905


def words(count: int, seed: int = 0) -> str:
    """`count` words, about as many tokens. Two seeds differ from their first words on."""
    names = []
    number = seed
    for _ in range(4):
        names.append(_WORDS[number % len(_WORDS)])
        number //= len(_WORDS)
    rest = [_WORDS[(index * 7 + seed * 13 + index * index * 3) % len(_WORDS)] for index in range(max(0, count - len(names)))]
    return " ".join([*names, *rest][:count])


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
