"""Caps on what a client may ask a grammar to hold, checked while a schema is read, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

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


def check_entries(count: int, limit: int, pointer: str, keyword: str) -> None:
    """Raise `SchemaError` when a list of a schema is longer than `limit`."""
    if count > limit:
        raise SchemaError(pointer, keyword, f"{keyword} has {count} entries (limit {limit})")


def check_nodes(count: int, where: str) -> None:
    """Raise `SchemaError` when a schema has too many nodes: sub-schemas and values of enum."""
    if count > MAX_NODES:
        raise SchemaError(where, "", f"the schema has more than {MAX_NODES} nodes (limit {MAX_NODES})")


def check_depth(depth: int, pointer: str) -> None:
    """Raise `SchemaError` when schemas are nested too deep, references not counted."""
    if depth > MAX_DEPTH:
        raise SchemaError(pointer, "", f"schemas are nested {depth} levels deep here (limit {MAX_DEPTH})")


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
