"""Caps on what a client may ask a grammar to hold, checked before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.nodes import Node
from pooled_mlx.grammar.refs import children

MAX_NODES = 10_000
MAX_ENUM_VALUES = 1_000
MAX_BRANCHES = 64
MAX_DEPTH = 32
MAX_MULTIPLE = 10_000
MAX_PATTERN_PROPERTIES = 64
MAX_TOOL_SCHEMA_CHARACTERS = 32_000
MAX_GRAMMAR_BYTES = 4 * 2**20

_LISTS = {
    "enum": MAX_ENUM_VALUES,
    "anyOf": MAX_BRANCHES,
    "oneOf": MAX_BRANCHES,
    "allOf": MAX_BRANCHES,
    "patternProperties": MAX_PATTERN_PROPERTIES,
}


class Measure(NamedTuple):
    """The size of a schema, and whether parts of it have names (`$id`, `$anchor`) that references may use."""

    nodes: int
    named: bool


def check(schema: Any, where: str) -> Measure:
    """The measure of a schema as sent. Raises `SchemaError` over a cap; the message holds the value and the limit.

    Nodes are sub-schemas and the values of enum. The walk is a loop: depth costs no stack.
    """
    nodes = 0
    named = False
    stack: list[tuple[Any, str, int]] = [(schema, where, 0)]
    while stack:
        part, pointer, depth = stack.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise SchemaError(pointer, "", f"schemas are nested {depth} levels deep here (limit {MAX_DEPTH})")
        if nodes > MAX_NODES:
            raise SchemaError(where, "", f"the schema has more than {MAX_NODES} nodes (limit {MAX_NODES})")
        if not isinstance(part, Mapping):
            continue
        named = named or "$id" in part or "$anchor" in part or "$dynamicAnchor" in part
        for key, limit in _LISTS.items():
            value = part.get(key)
            if value is not None and isinstance(value, list | Mapping):
                if len(value) > limit:
                    raise SchemaError(f"{pointer}/{key}", key, f"{key} has {len(value)} entries (limit {limit})")
                if key == "enum":
                    nodes += len(value)
        stack.extend((child, pointer + step, depth + 1) for step, child in children(part))
    return Measure(nodes, named)


def coefficient(multiple: float) -> int:
    """The digits of a `multipleOf` as a whole number: 0.25 → 25. The engine builds that many states."""
    exact = Fraction(repr(multiple)) if isinstance(multiple, float) else Fraction(multiple)
    digits = 0
    while exact.denominator != 1 and digits < 400:
        exact *= 10
        digits += 1
    return int(exact)


def check_multiples(root: Node, definitions: Mapping[str, Node], where: str) -> None:
    """Raise `SchemaError` when a lowered schema makes the engine count by more than 10,000.

    Keywords that meet (allOf, references) count together: their least common multiple.
    """
    memo: dict[int, int] = {}

    def least(node: Node, depth: int) -> int:
        if isinstance(node, bool) or depth > MAX_DEPTH:
            return 1
        known = memo.get(id(node))
        if known is not None:
            return known
        memo[id(node)] = 1
        found = coefficient(node["multipleOf"]) if "multipleOf" in node else 1
        parts = [*node.get("allOf", ())]
        if "$ref" in node:
            parts.append(definitions.get(node["$ref"].rpartition("/")[2], True))
        for part in parts:
            found = math.lcm(found, least(part, depth + 1))
        branches = [least(part, depth + 1) for part in (*node.get("anyOf", ()), *node.get("oneOf", ()))]
        found = max((math.lcm(found, branch) for branch in branches), default=found)
        if found > MAX_MULTIPLE:
            raise SchemaError(where, "multipleOf", f"multipleOf makes the grammar count by {found} (limit {MAX_MULTIPLE})")
        memo[id(node)] = found
        return found

    stack: list[Node] = [root, *definitions.values()]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            least(node, 0)
            stack.extend(child for _, child in children(node))
