"""unevaluatedProperties and unevaluatedItems, where what counts as evaluated does not depend on the value.

Both public functions are `keywords.Keyword`s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pooled_mlx.grammar import values
from pooled_mlx.grammar.nodes import Inexact, Node

if TYPE_CHECKING:
    from pooled_mlx.grammar.lowering import Lowering, Place

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class _Names(NamedTuple):
    """Names that count as evaluated: listed ones, expressions, or all of them."""

    listed: frozenset[str] = frozenset()
    expressions: frozenset[str] = frozenset()
    everything: bool = False

    def join(self, other: _Names) -> _Names:
        return _Names(self.listed | other.listed, self.expressions | other.expressions, self.everything or other.everything)


def unevaluated_properties(
    lowering: Lowering, value: Any, schema: Mapping[str, Any], _o: dict[str, Any], place: Place
) -> Sequence[Node]:
    """additionalProperties over everything that the schemas beside it evaluate."""
    keyword = "unevaluatedProperties"
    rest = lowering.node(value, place.down(keyword))
    if rest is True:
        return ()
    try:
        known = _evaluated_names(lowering, schema, place, ())
    except Inexact as reason:
        return [lowering.relaxed(place.at(keyword), keyword, str(reason))]
    if known.everything:
        return ()
    node: dict[str, Any] = {"properties": dict.fromkeys(sorted(known.listed), True), "additionalProperties": rest}
    if known.expressions:
        node["patternProperties"] = dict.fromkeys(sorted(known.expressions), True)
        lowering.patterns += len(known.expressions)
        lowering.joined = True
    lowering.check(lowering.keep(node), place.at(keyword), keyword, node.clear)
    return [node]


def _evaluated_names(lowering: Lowering, schema: Any, place: Place, seen: tuple[int, ...]) -> _Names:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return _Names()
    inner = (*seen, id(schema))
    found = _Names(
        frozenset(values.mapping_at(schema, "properties")),
        everything="additionalProperties" in schema or (bool(seen) and "unevaluatedProperties" in schema),
    )
    for pattern in values.mapping_at(schema, "patternProperties"):
        expression = values.translate(lowering, pattern, place.at("patternProperties"), "patternProperties")
        if expression is None:
            raise Inexact("a pattern beside it cannot be held")
        found = found.join(_Names(expressions=frozenset([expression])))
    for part, at in _always(lowering, schema, place):
        found = found.join(_evaluated_names(lowering, part, at, inner))
    for part in _sometimes(schema):
        if found.join(_evaluated_names(lowering, part, place, inner)) != found:
            raise Inexact("what counts as evaluated depends on the alternatives beside it")
    return found


def unevaluated_items(
    lowering: Lowering, value: Any, schema: Mapping[str, Any], _o: dict[str, Any], place: Place
) -> Sequence[Node]:
    """items after everything that the schemas beside it evaluate."""
    keyword = "unevaluatedItems"
    rest = lowering.node(value, place.down(keyword))
    if rest is True:
        return ()
    try:
        first = _evaluated_items(lowering, schema, place, ())
    except Inexact as reason:
        return [lowering.relaxed(place.at(keyword), keyword, str(reason))]
    if first == math.inf:
        return ()
    node = lowering.keep({"items": rest, **({"prefixItems": [True] * int(first)} if first else {})})
    lowering.check(node, place.at(keyword), keyword, node.clear)
    return [node]


def _evaluated_items(lowering: Lowering, schema: Any, place: Place, seen: tuple[int, ...]) -> float:
    """How many items from the first on count as evaluated."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return 0
    inner = (*seen, id(schema))
    first: float = len(values.list_at(schema, "prefixItems"))
    if isinstance(schema.get("items"), list):
        first = math.inf if "additionalItems" in schema else len(schema["items"])
    elif "items" in schema or (bool(seen) and "unevaluatedItems" in schema):
        first = math.inf
    if "contains" in schema and lowering.draft == "2020-12" and first != math.inf:
        raise Inexact("what contains matches counts as evaluated")
    for part, at in _always(lowering, schema, place):
        first = max(first, _evaluated_items(lowering, part, at, inner))
    for part in _sometimes(schema):
        if _evaluated_items(lowering, part, place, inner) > first:
            raise Inexact("what counts as evaluated depends on the alternatives beside it")
    return first


def _always(lowering: Lowering, schema: Mapping[str, Any], place: Place) -> list[tuple[Any, Place]]:
    """The schemas that hold whenever `schema` does: its allOf and references."""
    found = [(part, place) for part in values.list_at(schema, "allOf")]
    found += [lowering.target(schema[key], key, place) for key in _REFERENCES if isinstance(schema.get(key), str)]
    return found


def _sometimes(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas that hold for some values of `schema`."""
    found = [*values.list_at(schema, "anyOf"), *values.list_at(schema, "oneOf")]
    if "if" in schema:
        found += [schema[key] for key in ("if", "then", "else") if key in schema]
    return found + list(values.mapping_at(schema, "dependentSchemas").values())
