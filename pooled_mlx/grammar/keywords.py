"""The keywords of JSON schema, one function each: check the value, write what the grammar engine takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from pooled_mlx.grammar import counting, formats, lint, rewrites, unevaluated
from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.nodes import NUMBERS, Node, intersection
from pooled_mlx.grammar.refs import escape
from pooled_mlx.grammar.values import broken, count, mapping, names, schemas, translate

if TYPE_CHECKING:
    from pooled_mlx.grammar.lowering import Lowering, Place

Keyword: TypeAlias = Callable[["Lowering", Any, Mapping[str, Any], dict[str, Any], "Place"], Sequence[Node]]
"""(lowering, value, schema around it, lowered schema to write into, place) → further schemas that must hold as well."""

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_SAFE_INTEGER = 2**53
"""The engine computes with 64-bit floats: whole numbers beyond are not spelled exactly."""

_LARGEST_BOUND = 9.2e18
_STRING_KEYWORDS = frozenset({"minLength", "maxLength", "format"})
_MAX_VALUE_DEPTH = 32


def _type(_: Lowering, value: Any, _schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise broken(place, "type", "a type or a list of types", value)
    for name in listed:
        if not isinstance(name, str) or name not in TYPES:
            raise broken(place, "type", f"one of {', '.join(sorted(TYPES))}", name)
    out["type"] = listed[0] if len(listed) == 1 else list(dict.fromkeys(listed))
    return ()


def _enum(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    if not isinstance(value, list):
        raise broken(place, "enum", "a list of values", value)
    lint.check_entries(len(value), lint.MAX_ENUM_VALUES, place.at("enum"), "enum")
    lowering.add_nodes(len(value))
    return _values(lowering, value, "enum", out, place)


def _const(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    return _values(lowering, [value], "const", out, place)


def _values(lowering: Lowering, values: list[Any], keyword: str, out: dict[str, Any], place: Place) -> Sequence[Node]:
    for value in values:
        why = _unspeakable(value, 0)
        if why:
            return [lowering.relaxed(place.at(keyword), keyword, why)]
    if not values:
        return [False]
    if keyword == "const":
        out["const"] = values[0]
    else:
        out["enum"] = values
    return ()


def _unspeakable(value: Any, depth: int) -> str:
    """Why a value cannot be forced exactly; "" where it can."""
    if depth > _MAX_VALUE_DEPTH:
        return f"a value is nested deeper than {_MAX_VALUE_DEPTH} levels"
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, int | float):
        return "" if abs(value) <= _SAFE_INTEGER else f"the number {value!r:.40} is not exact in 64-bit floating point"
    if isinstance(value, str):
        return "" if _is_text(value) else "a string contains half of a surrogate pair"
    if isinstance(value, list):
        return next(filter(None, (_unspeakable(item, depth + 1) for item in value)), "")
    if isinstance(value, Mapping):
        return next(filter(None, (_unspeakable(part, depth + 1) for pair in value.items() for part in pair)), "")
    return f"{type(value).__name__} is no JSON value"


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _length(keyword: str) -> Keyword:
    def lower(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
        out[keyword] = count(value, keyword, place)
        if keyword == "maxLength" and isinstance(schema.get("minLength"), int) and schema["minLength"] > out[keyword]:
            lowering.check(out, place.at(keyword), keyword, lambda: out.pop(keyword, None))
        return ()

    return lower


def _pattern(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    translated = translate(lowering, value, place.at("pattern"), "pattern")
    if translated is None:
        return ()
    lowering.patterns += 1
    lowering.joined |= bool(schema.keys() & _STRING_KEYWORDS)
    out["pattern"] = translated
    lowering.check(out, place.at("pattern"), "pattern", lambda: out.pop("pattern", None))
    return ()


def _format(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    if not isinstance(value, str):
        raise broken(place, "format", "a string", value)
    kinds = lowering.kinds_here(schema)
    if value in formats.NATIVE:
        out["format"] = value
        lowering.check(out, place.at("format"), "format", lambda: out.pop("format", None))
        return ()
    if value in formats.PATTERNS:
        held: dict[str, Any] = {"pattern": formats.PATTERNS[value]}
        if value in formats.MAX_LENGTHS:
            held["maxLength"] = formats.MAX_LENGTHS[value]
        if out.keys() & {"pattern"} or "pattern" in schema or ("maxLength" in held and "maxLength" in schema):
            lowering.patterns += 1
            return [lowering.keep(held)]
        lowering.patterns += 1
        lowering.joined |= bool(schema.keys() & _STRING_KEYWORDS)
        out.update(held)
        lowering.check(out, place.at("format"), "format", lambda: out.pop("pattern", None))
        return ()
    if value in formats.RANGES and kinds & NUMBERS:
        return [lowering.keep({key: _inward(bound, upward=key == "minimum")}) for key, bound in formats.RANGES[value].items()]
    lowering.annotated(place.at("format"), "format", f"the format {value[:60]!r} is not known")
    return ()


def _bound(keyword: str) -> Keyword:
    upward = keyword in ("minimum", "exclusiveMinimum")

    def lower(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
        if isinstance(value, bool) and keyword.startswith("exclusive") and lowering.draft == "draft-04":
            return ()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise broken(place, keyword, "a number", value)
        name = keyword
        if lowering.draft == "draft-04" and schema.get("exclusive" + keyword[0].upper() + keyword[1:]) is True:
            name = "exclusive" + keyword[0].upper() + keyword[1:]
        inward = _inward(value, upward=upward)
        if inward is None:
            return [lowering.relaxed(place.at(keyword), keyword, f"the bound {value!r:.40} is beyond 64-bit integers")]
        out[name] = inward
        lowering.bounds += name.startswith("exclusive")
        lowering.check(out, place.at(keyword), keyword, lambda: _unbound(out, name))
        return ()

    return lower


def _unbound(out: dict[str, Any], name: str) -> None:
    """Drop a bound, also in the form that `numbers` may have given it."""
    if out.pop(name, None) is None:
        out.pop({"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}.get(name, name), None)


def _inward(value: float, *, upward: bool) -> float | None:
    """The bound as a float, moved into the allowed range where it is not one exactly; None where the engine has no such range.

    The ends of the 64-bit ranges, as generated schemas spell "any integer", move in to 9.2e18.
    """
    if abs(value) <= _SAFE_INTEGER:
        return value
    near = float(value)
    if Fraction(near) != Fraction(value) and (near < value) == upward:
        near = math.nextafter(near, math.inf if upward else -math.inf)
    if abs(near) <= _LARGEST_BOUND:
        return near
    return math.copysign(_LARGEST_BOUND, near) if abs(value) <= 2**64 and (value < 0) == upward else None


def _multiple(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise broken(place, "multipleOf", "a number over 0", value)
    lowering.multiples += 1
    out["multipleOf"] = value
    lowering.check(out, place.at("multipleOf"), "multipleOf", lambda: out.pop("multipleOf", None))
    return ()


def _properties(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    inner = place.down("properties")
    node = lowering.node
    out["properties"] = {
        name: node(item, inner.beside(escape(name))) for name, item in mapping(value, "properties", place).items()
    }
    return ()


def _pattern_properties(
    lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place
) -> Sequence[Node]:
    found: dict[str, Node] = {}
    inner = place.down("patternProperties")
    at = place.at("patternProperties")
    lint.check_entries(len(mapping(value, "patternProperties", place)), lint.MAX_PATTERN_PROPERTIES, at, "patternProperties")
    for pattern, item in value.items():
        at = inner.beside(escape(pattern))
        translated = translate(lowering, pattern, at.pointer, "patternProperties")
        lowered = lowering.node(item, at)
        if translated is None:
            # names that match it would count as additional ones: nothing about those can be said either
            out["additionalProperties"] = True
        elif translated in found:
            found[translated] = intersection([found[translated], lowered])
        else:
            found[translated] = lowered
    if found:
        out["patternProperties"] = found
        lowering.patterns += len(found)
        lowering.joined |= len(found) > 1 or "properties" in schema
        lowering.check(out, place.at("patternProperties"), "patternProperties", lambda: _open(out))
    return ()


def _open(out: dict[str, Any]) -> None:
    out.pop("patternProperties", None)
    out.pop("additionalProperties", None)


def _additional(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    lowered = lowering.node(value, place.down("additionalProperties"))
    if "additionalProperties" not in out:
        out["additionalProperties"] = lowered
    return ()


def _required(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    if isinstance(value, bool) and lowering.tool:
        return ()  # draft 3 wrote it inside the property; tools still do
    listed = names(value, "required", place)
    if listed:
        out["required"] = listed
    return ()


def _items(lowering: Lowering, value: Any, schema: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    if isinstance(value, list):
        if lowering.draft == "2020-12" and not lowering.tool:
            raise SchemaError(
                place.at("items"),
                "items",
                "items is one schema in draft 2020-12; use prefixItems, or declare an older draft in $schema",
            )
        inner = place.down("items")
        out["prefixItems"] = [lowering.node(item, inner.beside(str(index))) for index, item in enumerate(value)]
        if "additionalItems" in schema:
            out["items"] = lowering.node(schema["additionalItems"], place.down("additionalItems"))
        return ()
    out["items"] = lowering.node(value, place.down("items"))
    return ()


def _prefix_items(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    if lowering.draft != "2020-12":
        return ()
    inner = place.down("prefixItems")
    listed = schemas(value, "prefixItems", place)
    out["prefixItems"] = [lowering.node(item, inner.beside(str(index))) for index, item in enumerate(listed)]
    return ()


def _count(keyword: str) -> Keyword:
    def lower(_: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
        out[keyword] = count(value, keyword, place)
        return ()

    return lower


def _all_of(lowering: Lowering, value: Any, _s: Mapping[str, Any], _out: dict[str, Any], place: Place) -> Sequence[Node]:
    inner = place.down("allOf")
    return [lowering.node(item, inner.beside(str(index))) for index, item in enumerate(schemas(value, "allOf", place))]


def _any_of(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    inner = place.down("anyOf")
    listed = [lowering.node(item, inner.beside(str(index))) for index, item in enumerate(schemas(value, "anyOf", place))]
    return rewrites.either(lowering, listed, out)


def _ref(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    return [lowering.reference(value, place)]


def _dynamic_ref(lowering: Lowering, value: Any, _s: Mapping[str, Any], out: dict[str, Any], place: Place) -> Sequence[Node]:
    return [lowering.reference(value, place, keyword="$dynamicRef")]


def _recursive_ref(lowering: Lowering, value: Any, _s: Mapping[str, Any], _o: dict[str, Any], place: Place) -> Sequence[Node]:
    if lowering.draft != "2019-09":
        return ()
    return [lowering.reference(value, place, keyword="$recursiveRef")]


KEYWORDS: Mapping[str, Keyword] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "minLength": _length("minLength"),
    "maxLength": _length("maxLength"),
    "pattern": _pattern,
    "format": _format,
    "minimum": _bound("minimum"),
    "maximum": _bound("maximum"),
    "exclusiveMinimum": _bound("exclusiveMinimum"),
    "exclusiveMaximum": _bound("exclusiveMaximum"),
    "multipleOf": _multiple,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "required": _required,
    "minProperties": counting.property_count,
    "maxProperties": counting.most_properties,
    "items": _items,
    "prefixItems": _prefix_items,
    "minItems": _count("minItems"),
    "maxItems": _count("maxItems"),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": rewrites.one_of,
    "not": rewrites.not_,
    "if": rewrites.if_,
    "$ref": _ref,
    "$dynamicRef": _dynamic_ref,
    "$recursiveRef": _recursive_ref,
    "dependentRequired": rewrites.dependent_required,
    "dependentSchemas": rewrites.dependent_schemas,
    "dependencies": rewrites.dependencies,
    "propertyNames": counting.property_names,
    "contains": counting.contains,
    "uniqueItems": counting.unique_items,
    "unevaluatedProperties": unevaluated.unevaluated_properties,
    "unevaluatedItems": unevaluated.unevaluated_items,
}
"""Everything that asserts. Other keywords are annotations or unknown, and JSON schema gives both no force."""
