"""Keywords about how many and which names or items there are, written case by case where that is exact and bounded.

Each public function is a `keywords.Keyword`; what it cannot write goes through `Lowering.relaxed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pooled_mlx.grammar import patterns, values
from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.nodes import (
    MAX_ALTERNATIVES,
    Inexact,
    Node,
    intersection,
    is_false,
    kind_of,
    kinds_of,
    presences,
    union,
)
from pooled_mlx.grammar.rewrites import any_of

if TYPE_CHECKING:
    from pooled_mlx.grammar.lowering import Lowering, Place

_MAX_UNIQUE_VALUES = 5
_MAX_CONTAINS_ITEMS = 8
_NO_ARRAY = ("boolean", "null", "number", "object", "string")
_NOT_FOR_STRINGS = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems"),
        *("maxItems", "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    }
)


def property_names(lowering: Lowering, value: Any, _s: Mapping[str, Any], _o: dict[str, Any], place: Place) -> Sequence[Node]:
    """A closed object whose names match what the schema of names says."""
    names = lowering.node(value, place.down("propertyNames"))
    if names is True:
        return ()
    return [lowering.hole(lambda: _named(lowering, names), place.at("propertyNames"), "propertyNames")]


def _named(lowering: Lowering, names: Node) -> Node:
    """Objects all of whose names meet a schema."""
    if isinstance(names, bool):
        return names or {"maxProperties": 0}
    lowering.settle(names)
    found: list[Node] = []
    for key, value in names.items():
        if key == "allOf":
            found.extend(_named(lowering, item) for item in value)
        elif key == "$ref":
            found.append(_named(lowering, lowering.resolved(value)))
        elif key == "anyOf":
            listed = [_texts(lowering, item) for item in value]
            found.append(_only([text for texts in listed for text in texts]))
        elif key == "type":
            found.append("string" in kinds_of(value) or {"maxProperties": 0})
        elif key in ("enum", "const"):
            found.append(_only(value if key == "enum" else [value]))
        elif key in ("pattern", "minLength", "maxLength"):
            found.append(_matching(lowering, key, value))
        elif key not in _NOT_FOR_STRINGS:
            raise Inexact(f"names cannot be held to {key}")
    return intersection(found)


def _texts(lowering: Lowering, node: Node) -> list[Any]:
    found = finite(lowering, node)
    if found is None:
        raise Inexact("names cannot be held to anyOf unless all alternatives list their values")
    return found


def _only(listed: Sequence[Any]) -> Node:
    return {"properties": {name: True for name in listed if isinstance(name, str)}, "additionalProperties": False}


def _matching(lowering: Lowering, key: str, value: Any) -> Node:
    lowering.patterns += 1
    lowering.joined = True
    if key != "pattern":
        value = patterns.length(value, None) if key == "minLength" else patterns.length(0, value)
    return {"patternProperties": {value: True}, "additionalProperties": False}


def property_count(
    lowering: Lowering, _value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place
) -> Sequence[Node]:
    """minProperties and maxProperties together. Open objects with optional names go case by case."""
    first = "minProperties" if "minProperties" in schema else "maxProperties"
    low = values.count(schema.get("minProperties", 0), "minProperties", place)
    high = values.count(schema["maxProperties"], "maxProperties", place) if "maxProperties" in schema else None
    needed = {name for name in values.list_at(schema, "required") if isinstance(name, str)}
    listed = values.mapping_at(schema, "properties")
    optional = [name for name in listed if name not in needed and listed[name] is not False]
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    bounds: dict[str, Any] = {"minProperties": low} if low > len(needed) else {}
    if high is not None and not (closed and high >= len(needed) + len(optional)):
        bounds["maxProperties"] = high
    if not bounds:
        return ()
    if not closed and low > len(needed) + 1:
        why = "names that are not listed could repeat, and count once"
        lowering.relaxed(place.at("minProperties"), "minProperties", why)
    if not optional or closed or 2 ** len(optional) > MAX_ALTERNATIVES:
        out.update(bounds)
        for key in bounds:
            lowering.check(out, place.at(key), key, lambda key=key: out.pop(key, None))
        return ()
    cases: list[dict[str, Any]] = []
    for present, absent in presences(optional):
        if high is None or len(present) <= high:
            cases.append({"required": present, "properties": absent, **bounds})
    node = lowering.keep({"anyOf": cases})
    lowering.check(node, place.at(first), first, node.clear)
    return [node]


def most_properties(
    lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place
) -> Sequence[Node]:
    """maxProperties where there is no minProperties, which would have done both."""
    return () if "minProperties" in schema else property_count(lowering, value, schema, out, place)


def unique_items(
    lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place
) -> Sequence[Node]:
    """Exact where items have few possible values: every arrangement is written out."""
    if not isinstance(value, bool):
        raise SchemaError(place.at("uniqueItems"), "uniqueItems", f"uniqueItems must be true or false, not {value!r:.60}")
    if not value or "array" not in lowering.kinds_here(schema):
        return ()

    def compute() -> Node:
        most = out.get("maxItems")
        if most is not None and most <= 1:
            return True
        listed = None if "prefixItems" in out else finite(lowering, out.get("items", True))
        if listed is None:
            raise Inexact("only items with few listed values can be kept unique")
        if len(listed) > _MAX_UNIQUE_VALUES:
            raise Inexact(f"its items have {len(listed)} possible values (limit {_MAX_UNIQUE_VALUES})")
        sizes = range(out.get("minItems", 0), (len(listed) if most is None else min(len(listed), most)) + 1)
        arrays = [list(chosen) for size in sizes for chosen in itertools.permutations(listed, size)]
        return union([{"type": list(_NO_ARRAY)}, {"enum": arrays} if arrays else False])

    return [lowering.hole(compute, place.at("uniqueItems"), "uniqueItems")]


def finite(lowering: Lowering, node: Node) -> list[Any] | None:
    """All values of a schema, each once, where they are listed in it and none is an array or object."""
    if isinstance(node, bool):
        return None if node else []
    lowering.settle(node)
    if set(node) == {"$ref"}:
        return finite(lowering, lowering.resolved(node["$ref"]))
    if not set(node) <= {"const", "enum", "type"}:
        return None
    kinds = lowering.algebra.kinds(node)
    listed = [node["const"]] if "const" in node else node.get("enum")
    if listed is None and kinds <= {"boolean", "null"}:
        listed = [*([True, False] if "boolean" in kinds else []), *([None] if "null" in kinds else [])]
    if listed is None or ("const" in node and "enum" in node) or any(isinstance(item, list | dict) for item in listed):
        return None
    distinct = {(kind_of(item), item): item for item in listed if kind_of(item) in kinds}
    return list(distinct.values())


def contains(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    """Exact where it is a plain count, or where the array is short: by the places of the items that match."""
    low = values.count(schema.get("minContains", 1), "minContains", place)
    high = values.count(schema["maxContains"], "maxContains", place) if "maxContains" in schema else None
    item = lowering.node(value, place.down("contains"))
    if lowering.draft not in ("2020-12", "2019-09"):
        low, high = 1, None
    if item is True:
        return [lowering.keep({"minItems": low, **({} if high is None else {"maxItems": high})})]
    if (low == 0 and high is None) or "array" not in lowering.kinds_here(schema):
        return ()
    if is_false(item):
        return [lowering.keep({"type": list(_NO_ARRAY)})] if low else ()

    def compute() -> Node:
        most = out.get("maxItems")
        if most is None or most > _MAX_CONTAINS_ITEMS:
            raise Inexact(f"it needs maxItems up to {_MAX_CONTAINS_ITEMS}")
        cases: list[Node] = [{"type": list(_NO_ARRAY)}]
        if high is None:
            cases += [_containing(chosen, item) for chosen in itertools.combinations(range(most), low)]
        else:
            other = lowering.algebra.complement(item)
            for size in range(most + 1):
                cases += [
                    _marked(marks, item, other)
                    for marks in itertools.product((True, False), repeat=size)
                    if low <= sum(marks) <= high
                ]
        if len(cases) > MAX_ALTERNATIVES:
            raise Inexact(f"it needs {len(cases)} alternatives (limit {MAX_ALTERNATIVES})")
        return any_of(cases)

    return [lowering.hole(compute, place.at("contains"), "contains")]


def _containing(chosen: tuple[int, ...], item: Node) -> Node:
    parts = [item if index in chosen else True for index in range(chosen[-1] + 1)]
    return {"type": "array", "prefixItems": parts, "minItems": len(parts)}


def _marked(marks: tuple[bool, ...], item: Node, other: Node) -> Node:
    if not marks:
        return {"type": "array", "maxItems": 0}
    if is_false(other) and not all(marks):
        return False
    parts = [item if mark else other for mark in marks]
    return {"type": "array", "prefixItems": parts, "minItems": len(marks), "maxItems": len(marks)}
