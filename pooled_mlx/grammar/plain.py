"""A quick look at a schema: nothing in it that could be broken, large or not enforceable? Then this is its lowered form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pooled_mlx.grammar import lint
from pooled_mlx.grammar.keywords import KEYWORDS, TYPES
from pooled_mlx.grammar.nodes import KINDS, kind_of, kinds_of

_MOST_NODES = 200
_PARTS = frozenset({"items", "additionalProperties"})


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in TYPES


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_choice(value: Any) -> bool:
    return _is_names(value) and 0 < len(value) <= lint.MAX_ENUM_VALUES


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_bound(value: Any) -> bool:
    return type(value) is int and abs(value) <= 2**53


def _is_part(value: Any) -> bool:
    return type(value) is dict or isinstance(value, bool)


_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "required": _is_names,
    "enum": _is_choice,
    "minLength": _is_count,
    "maxLength": _is_count,
    "minItems": _is_count,
    "maxItems": _is_count,
    "minimum": _is_bound,
    "maximum": _is_bound,
    "items": _is_part,
    "additionalProperties": _is_part,
    "properties": lambda value: type(value) is dict and all(map(_is_part, value.values())),
}


class _Unusual(Exception):
    """Something that the quick look leaves to the thorough one."""


def stripped(schema: Any) -> dict[str, Any] | bool | None:
    """The lowered form of a small schema of everyday keywords with sound values; None for any other schema.

    The same that `schema.lower` gives, in a twentieth of its time: most tools have nothing else.
    """
    try:
        return _strip(schema, 0, [0])
    except _Unusual:
        return None


def _strip(schema: Any, depth: int, nodes: list[int]) -> dict[str, Any] | bool:
    if isinstance(schema, bool):
        return schema
    nodes[0] += 1
    if type(schema) is not dict or depth > lint.MAX_DEPTH or nodes[0] > _MOST_NODES:
        raise _Unusual
    found: dict[str, Any] = {}
    for key, value in schema.items():
        check = _PLAIN.get(key)
        if check is None:
            if key in KEYWORDS:
                raise _Unusual
        elif not check(value):
            raise _Unusual
        elif key == "properties":
            found[key] = {name: _strip(part, depth + 1, nodes) for name, part in value.items()}
        elif key in _PARTS:
            found[key] = _strip(value, depth + 1, nodes)
        elif key != "required":
            found[key] = value
        elif value:
            found[key] = list(dict.fromkeys(value))
    return found or True


_RANGES = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
_SIMPLE = frozenset(
    {"type", "items", "properties", "required", "additionalProperties", *(key for pair in _RANGES for key in pair)}
)


def surely_met(node: Mapping[str, Any] | bool) -> bool:
    """True for a lowered schema that some value is certain to meet, as can be seen without looking into expressions.

    The engine leaves out an optional property that nothing meets when it sees the whole object; seen alone it is an error.
    """
    if isinstance(node, bool):
        return node
    listed = [node["const"]] if "const" in node else node.get("enum")
    if listed is not None:
        kinds = kinds_of(node["type"]) if "type" in node else KINDS
        return node.keys() <= {"const", "enum", "type"} and any(kind_of(value) in kinds for value in listed)
    if node.keys() == {"anyOf"}:
        return any(map(surely_met, node["anyOf"]))
    if not node.keys() <= _SIMPLE:
        return False
    for low, high in _RANGES:
        if low in node and high in node and math.ceil(node[low]) > node[high]:
            return False
    if node.get("minItems", 0) > 0 and not surely_met(node.get("items", True)):
        return False
    properties, rest = node.get("properties", {}), node.get("additionalProperties", True)
    return all(surely_met(properties.get(name, rest)) for name in node.get("required", ()))
