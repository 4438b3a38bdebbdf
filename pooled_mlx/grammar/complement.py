"""The complement of a lowered schema, where it can be written exactly, and proofs that two schemas share no value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pooled_mlx.grammar import patterns
from pooled_mlx.grammar.nodes import (
    KINDS,
    NUMBERS,
    Inexact,
    Node,
    intersection,
    item_at,
    kind_of,
    kinds_of,
    presences,
    property_of,
    type_node,
    union,
)

_MAX_STEPS = 2_000
_MAX_LITERAL_CHARACTERS = 2_000
_MAX_ITEMS = 16
_MAX_PRESENCE_NAMES = 4


class Algebra:
    """Complements and disjointness over one document's lowered schemas.

    `resolve` gives the lowered schema of a `$ref` value; `settle` completes a schema that is still being built and raises
    `Inexact` where it does not stand for exactly what was asked.
    """

    def __init__(self, resolve: Callable[[str], Node], settle: Callable[[dict[str, Any]], None]) -> None:
        self._resolve = resolve
        self._settle = settle
        self._open: list[str] = []
        self._steps = 0

    def complement(self, node: Node, kinds: frozenset[str] = KINDS) -> Node:
        """The schema met by exactly those values of `kinds` that do not meet `node`. Raises `Inexact`.

        Values of other kinds may or may not meet the result: the caller has excluded them.
        """
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise Inexact("its complement is too large")
        if isinstance(node, bool):
            return not node
        self._settle(node)
        alternatives: list[Node] = []
        for key, value in node.items():
            write = _WRITERS.get(key)
            if write is None:
                raise Inexact(f"the complement of {key} cannot be written")
            alternatives.extend(write(self, value, node, kinds))
        return union(alternatives)

    def complement_of(self, reference: str, kinds: frozenset[str]) -> Node:
        """The complement of the target of a reference."""
        if reference in self._open:
            raise Inexact("it refers to itself")
        self._open.append(reference)
        try:
            return self.complement(self._resolve(reference), kinds)
        finally:
            self._open.pop()

    def kinds(self, node: Node) -> frozenset[str]:
        """A superset of the kinds of the values that meet `node`."""
        if isinstance(node, bool):
            return KINDS if node else frozenset()
        found = KINDS
        if "type" in node:
            found = kinds_of(node["type"])
        listed = _listed(node)
        if listed is not None:
            found &= frozenset(map(kind_of, listed))
        if "anyOf" in node:
            found &= frozenset[str]().union(*(self.kinds(item) for item in node["anyOf"]))
        for item in node.get("allOf", ()):
            found &= self.kinds(item)
        reference = node.get("$ref")
        if reference is not None and reference not in self._open:
            self._open.append(reference)
            found &= self.kinds(self._resolve(reference))
            self._open.pop()
        return found

    def disjoint(self, one: Node, other: Node, kinds: frozenset[str] = KINDS, required: Iterable[str] = ()) -> bool:
        """True when it is certain that no value meets both, among those of `kinds` that have the `required` properties."""
        one, other = self._target(one), self._target(other)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        shared = self.kinds(one) & self.kinds(other) & kinds
        if not shared:
            return True
        mine, theirs = _listed(one), _listed(other)
        if mine is not None and theirs is not None:
            return not any(a == b for a in mine for b in theirs)
        if shared <= {"object"}:
            return self._objects_disjoint(one, other, required)
        if shared <= NUMBERS:
            return _apart(one, other) or _apart(other, one)
        return False

    def _objects_disjoint(self, one: Mapping[str, Any], other: Mapping[str, Any], required: Iterable[str]) -> bool:
        for closed, asking in ((one, other), (other, one)):
            if closed.get("additionalProperties") is False and "patternProperties" not in closed:
                known = closed.get("properties", {})
                if any(known.get(name, False) is False for name in (*asking.get("required", ()), *required)):
                    return True
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        present = (set(one.get("required", ())) & set(other.get("required", ()))) | set(required)
        tags = present & set(mine) & set(theirs)
        return any(self.disjoint(mine[tag], theirs[tag]) for tag in tags)

    def _target(self, node: Node) -> Node:
        for _ in range(8):
            if isinstance(node, bool) or set(node) != {"$ref"}:
                break
            node = self._resolve(node["$ref"])
        return node


_Writer = Callable[[Algebra, Any, dict[str, Any], frozenset[str]], Sequence[Node]]
"""(algebra, value of the keyword, its schema, kinds in question) → the alternatives in which that keyword alone fails."""


def _type(_: Algebra, value: Any, _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [type_node(kinds - kinds_of(value))]


def _all_of(algebra: Algebra, value: list[Node], _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [algebra.complement(item, kinds) for item in value]


def _any_of(algebra: Algebra, value: list[Node], _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [intersection([algebra.complement(item, kinds) for item in value])]


def _ref(algebra: Algebra, value: str, _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [algebra.complement_of(value, kinds)]


def _properties(algebra: Algebra, value: dict[str, Node], _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [property_of(name, algebra.complement(item)) for name, item in value.items()] if "object" in kinds else []


def _required(_: Algebra, value: list[str], _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [{"type": "object", "properties": {name: False}} for name in value] if "object" in kinds else []


def _additional(_: Algebra, value: Node, node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    if "object" not in kinds or value is True:
        return []
    names = list(node.get("properties", {}))
    if value is not False or "patternProperties" in node or len(names) > _MAX_PRESENCE_NAMES:
        raise Inexact("the complement of additionalProperties cannot be written")
    return [
        {"type": "object", "required": present, "properties": absent, "minProperties": len(present) + 1}
        for present, absent in presences(names)
    ]


def _items(algebra: Algebra, value: Node, node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    if "array" not in kinds or value is True:
        return []
    first = len(node.get("prefixItems", ()))
    if value is False:
        return [{"type": "array", "minItems": first + 1}]
    last = node.get("maxItems")
    if last is None or last > _MAX_ITEMS:
        raise Inexact(f"the complement of items needs maxItems up to {_MAX_ITEMS}")
    other = algebra.complement(value)
    return [item_at(index, other) for index in range(first, last)]


def _prefix_items(algebra: Algebra, value: list[Node], _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return [item_at(index, algebra.complement(item)) for index, item in enumerate(value)] if "array" in kinds else []


def _const(_: Algebra, value: Any, _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return _other_values([value], kinds)


def _enum(_: Algebra, value: list[Any], _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
    return _other_values(value, kinds)


def _count(kind: str, other: str, step: int) -> _Writer:
    def write(_: Algebra, value: int, _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
        return [{"type": kind, other: value + step}] if kind in kinds and value + step >= 0 else []

    return write


def _bound(other: str) -> _Writer:
    def write(_: Algebra, value: float, _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
        return [{"type": _number_type(kinds), other: value}] if kinds & NUMBERS else []

    return write


def _unless(keyword: str, kinds_held: frozenset[str]) -> _Writer:
    def write(_: Algebra, _value: Any, _node: dict[str, Any], kinds: frozenset[str]) -> list[Node]:
        if kinds & kinds_held:
            raise Inexact(f"the complement of {keyword} cannot be written")
        return []

    return write


_WRITERS: dict[str, _Writer] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "allOf": _all_of,
    "anyOf": _any_of,
    "$ref": _ref,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "patternProperties": _unless("patternProperties", frozenset({"object"})),
    "minProperties": _count("object", "maxProperties", -1),
    "maxProperties": _count("object", "minProperties", 1),
    "items": _items,
    "prefixItems": _prefix_items,
    "minItems": _count("array", "maxItems", -1),
    "maxItems": _count("array", "minItems", 1),
    "minLength": _count("string", "maxLength", -1),
    "maxLength": _count("string", "minLength", 1),
    "pattern": _unless("pattern", frozenset({"string"})),
    "format": _unless("format", frozenset({"string"})),
    "minimum": _bound("exclusiveMaximum"),
    "maximum": _bound("exclusiveMinimum"),
    "exclusiveMinimum": _bound("maximum"),
    "exclusiveMaximum": _bound("minimum"),
    "multipleOf": _unless("multipleOf", NUMBERS),
}


def _other_values(values: Sequence[Any], kinds: frozenset[str]) -> list[Node]:
    """Alternatives for every value of `kinds` but these."""
    by_kind: dict[str, list[Any]] = {}
    for item in values:
        kind = kind_of(item)
        by_kind.setdefault("number" if kind in NUMBERS else kind, []).append(item)
    found: list[Node] = []
    untouched = {kind for kind in kinds if ("number" if kind in NUMBERS else kind) not in by_kind}
    found.append(type_node(untouched))
    if "boolean" in kinds and "boolean" in by_kind:
        found += [{"enum": [item]} for item in (True, False) if item not in by_kind["boolean"]]
    if "string" in kinds and "string" in by_kind:
        if sum(map(len, by_kind["string"])) > _MAX_LITERAL_CHARACTERS:
            raise Inexact("the excluded strings are too long together")
        found.append({"type": "string", "pattern": patterns.none_of(by_kind["string"])})
    if "number" in by_kind and kinds & NUMBERS:
        found += _other_numbers(by_kind["number"], _number_type(kinds))
    if "array" in kinds and "array" in by_kind:
        found.append(intersection([union(_other_array(item)) for item in by_kind["array"]]))
    if "object" in kinds and "object" in by_kind:
        found.append(intersection([union(_other_object(item)) for item in by_kind["object"]]))
    return found


def _other_numbers(values: Sequence[float], name: str) -> list[Node]:
    found: list[Node] = []
    ordered = sorted(set(values))
    for low, high in zip([None, *ordered], [*ordered, None], strict=True):
        if low is not None and high is not None and name == "integer" and math.floor(low) + 1 >= high:
            continue
        bounds: dict[str, Any] = {"type": name}
        if low is not None:
            bounds["exclusiveMinimum"] = low
        if high is not None:
            bounds["exclusiveMaximum"] = high
        found.append(bounds)
    return found


def _other_array(value: list[Any]) -> list[Node]:
    if len(value) > _MAX_ITEMS:
        raise Inexact(f"the excluded array has {len(value)} items (limit {_MAX_ITEMS})")
    found: list[Node] = [{"type": "array", "minItems": len(value) + 1}]
    if value:
        found.append({"type": "array", "maxItems": len(value) - 1})
    return found + [item_at(index, union(_other_values([item], KINDS))) for index, item in enumerate(value)]


def _other_object(value: dict[str, Any]) -> list[Node]:
    if len(value) > _MAX_ITEMS:
        raise Inexact(f"the excluded object has {len(value)} properties (limit {_MAX_ITEMS})")
    found: list[Node] = [{"type": "object", "properties": {name: False}} for name in value]
    found += [property_of(name, union(_other_values([item], KINDS))) for name, item in value.items()]
    if value:
        # all listed properties are there, and one more
        found.append({"type": "object", "required": list(value), "minProperties": len(value) + 1})
    else:
        found.append({"type": "object", "minProperties": 1})
    return found


def _number_type(kinds: frozenset[str]) -> str:
    return "number" if "fraction" in kinds else "integer"


def _listed(node: Mapping[str, Any]) -> list[Any] | None:
    return [node["const"]] if "const" in node else node.get("enum")


def _apart(low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    """True when every number of `low` is below every number of `high`."""
    end = min(low.get("maximum", math.inf), low.get("exclusiveMaximum", math.inf))
    start = max(high.get("minimum", -math.inf), high.get("exclusiveMinimum", -math.inf))
    is_open = low.get("exclusiveMaximum") == end or high.get("exclusiveMinimum") == start
    return end < start or (end == start and is_open and math.isfinite(end))
