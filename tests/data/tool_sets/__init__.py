"""Tool sets for the compile bars, made here; the sets of real agents are read out of the shared traces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pooled_mlx.core.request import Tool

SIZES: Mapping[str, int] = {"ten": 10, "hundred": 100, "shapes": 1024, "distinct": 1024}
"""Sets by name. `shapes` has 1024 tools of 30 shapes, as MCP servers offer them; all others differ in every schema."""

_WORDS = (
    *("path", "query", "limit", "offset", "owner", "repo", "branch", "title", "body", "labels", "state", "sort", "page"),
    *("user", "team", "channel", "text", "since", "until"),
)
_KINDS: tuple[Mapping[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer", "minimum": 1, "maximum": 100},
    {"type": "array", "items": {"type": "string"}},
    {"type": "boolean", "default": False},
    {"type": "string", "enum": ["open", "closed", "all"]},
    {
        "type": "object",
        "properties": {"key": {"type": "string"}, "value": {"type": "number"}},
        "required": ["key"],
        "additionalProperties": False,
    },
)


def tool_set(name: str) -> tuple[Tool, ...]:
    """The tools of one set, always the same."""
    if name == "shapes":
        return tuple(_tool(number, number % 30, None) for number in range(SIZES[name]))
    return tuple(_tool(number, number, number) for number in range(SIZES[name]))


def _tool(number: int, shape: int, own: int | None) -> Tool:
    properties: dict[str, Any] = {}
    for place in range(4 + shape % 5):
        word = _WORDS[(shape * 7 + place) % len(_WORDS)]
        about = f"What {word} means for tool {number}: " + "some sentence that explains it. " * 2
        properties[word] = {**_KINDS[(shape // 2 + place) % len(_KINDS)], "description": about.strip()}
    if own is not None:
        properties[f"option_{own}"] = {"type": "string", "maxLength": 100 + own, "description": "Its own."}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": list(properties)[:2],
        "additionalProperties": False,
    }
    return Tool(f"server_{number % 12}__tool_{number}", "Does one thing well. " * 10, schema)


def agent_sets(traces: Path) -> dict[str, tuple[Tool, ...]]:
    """The largest tool set of each client in the shared traces, by the client's name."""
    found: dict[str, tuple[Tool, ...]] = {}
    for path in sorted(traces.glob("*.jsonl")):
        best: tuple[Tool, ...] = ()
        for line in path.read_text(encoding="utf-8").splitlines():
            body = json.loads(line).get("body")
            tools = tuple(_read(body)) if isinstance(body, dict) else ()
            best = max(best, tools, key=len)
        if best:
            found[path.stem] = best
    return found


def _read(body: Mapping[str, Any]) -> list[Tool]:
    listed: list[Any] = []
    for tool in body.get("tools") or ():
        listed += tool["tools"] if tool.get("type") == "namespace" else [tool]
    tools: dict[str, Tool] = {}
    for tool in listed:
        function = tool.get("function", tool)
        schema = function.get("parameters", function.get("input_schema"))
        if isinstance(schema, dict) and isinstance(function.get("name"), str):
            tools.setdefault(function["name"], Tool(function["name"], function.get("description", ""), schema))
    return list(tools.values())
