"""Lowered schemas as values: kinds of values they admit, unions, intersections.

A lowered schema (`Node`) is a boolean or an object of keywords that the grammar engine takes. `NEVER` is the false schema
where an object is needed. An empty object is one that is still to be completed, so only `True` counts as the true schema.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

Node: TypeAlias = dict[str, Any] | bool

# JSON's types, with numbers split in two: what `not integer` leaves of them has no schema of its own.
KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
NUMBERS = frozenset({"integer", "fraction"})
_KINDS_OF = {"number": ("integer", "fraction")}

MAX_ALTERNATIVES = 64


class Inexact(Exception):
    """What was asked cannot be written exactly, or not within bounds."""


def never() -> dict[str, Any]:
    """A false schema in object form; a new one each time, because lowered objects are completed in place."""
    return {"enum": []}


def is_false(node: Node) -> bool:
    """True for the two spellings of the schema of no value."""
    return node is False or node == {"enum": []}


def kinds_of(types: str | Sequence[str]) -> frozenset[str]:
    """The kinds that the value of a `type` keyword names."""
    names = [types] if isinstance(types, str) else types
    return frozenset(kind for name in names for kind in _KINDS_OF.get(name, (name,)))


def kind_of(value: Any) -> str:
    """The kind of one JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def type_node(kinds: Iterable[str]) -> Node:
    """The schema of all values of these kinds. Raises `Inexact` for fractions without integers."""
    left = set(kinds)
    if "fraction" in left:
        if "integer" not in left:
            raise Inexact("numbers that are not integers have no schema of their own")
        left -= NUMBERS
        left.add("number")
    if not left:
        return False
    names = sorted(left)
    return {"type": names[0] if len(names) == 1 else names}


def union(nodes: Iterable[Node]) -> Node:
    """The schema that is met where one of `nodes` is. Raises `Inexact` over 64 alternatives."""
    parts: list[dict[str, Any]] = []
    for node in nodes:
        if node is True:
            return True
        if is_false(node):
            continue
        assert isinstance(node, dict)
        parts.extend(node["anyOf"] if set(node) == {"anyOf"} else [node])
    if len(parts) > MAX_ALTERNATIVES:
        raise Inexact(f"it needs {len(parts)} alternatives (limit {MAX_ALTERNATIVES})")
    return False if not parts else parts[0] if len(parts) == 1 else {"anyOf": parts}


def intersection(nodes: Iterable[Node]) -> Node:
    """The schema that is met where all of `nodes` are."""
    parts: list[Node] = []
    for node in nodes:
        if is_false(node):
            return False
        if node is not True:
            parts.append(node)
    return True if not parts else parts[0] if len(parts) == 1 else {"allOf": parts}


def item_at(index: int, node: Node) -> Node:
    """Arrays whose item `index` exists and meets `node`."""
    if is_false(node):
        return False
    return {"type": "array", "prefixItems": [{} for _ in range(index)] + [node], "minItems": index + 1}


def property_of(name: str, node: Node) -> Node:
    """Objects whose property `name` exists and meets `node`."""
    if is_false(node):
        return False
    return {"type": "object", "properties": {name: node}, "required": [name]}


def presences(names: Sequence[str]) -> Iterator[tuple[list[str], dict[str, Node]]]:
    """Every way in which `names` may be present: (the present ones, false schemas for the absent ones)."""
    for choice in itertools.product((True, False), repeat=len(names)):
        present = [name for name, there in zip(names, choice, strict=True) if there]
        yield present, {name: False for name, there in zip(names, choice, strict=True) if not there}
