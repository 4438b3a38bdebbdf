"""Checks of keyword values, shared by everything that reads a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pooled_mlx.grammar import lint, patterns
from pooled_mlx.grammar.errors import SchemaError

if TYPE_CHECKING:
    from pooled_mlx.grammar.lowering import Lowering, Place


def json_type(value: Any) -> str:
    """The name of the JSON type of `value`, for messages."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def broken(place: Place, keyword: str, expected: str, value: Any) -> SchemaError:
    """The error for a value that is not what its keyword takes."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return SchemaError(place.at(keyword), keyword, f"{keyword} must be {expected}, not {shown}")


def count(value: Any, keyword: str, place: Place) -> int:
    """A number of things: a whole number from 0, also spelled 2.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
        raise broken(place, keyword, "a whole number from 0", value)
    return int(value)


def names(value: Any, keyword: str, place: Place) -> list[str]:
    """A list of property names, each once."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise broken(place, keyword, "a list of strings", value)
    return list(dict.fromkeys(value))


def schemas(value: Any, keyword: str, place: Place) -> list[Any]:
    """A list of schemas that is not empty."""
    if not isinstance(value, list) or not value:
        raise broken(place, keyword, "a list of schemas that is not empty", value)
    if keyword.endswith("Of"):
        lint.check_entries(len(value), lint.MAX_BRANCHES, place.at(keyword), keyword)
    return value


def mapping(value: Any, keyword: str, place: Place) -> Mapping[str, Any]:
    """An object of schemas."""
    if not isinstance(value, Mapping):
        raise broken(place, keyword, "an object", value)
    return value


def translate(lowering: Lowering, pattern: Any, pointer: str, keyword: str) -> str | None:
    """The engine's form of a pattern; None where it cannot be enforced (and that is noted). Raises `SchemaError`."""
    if not isinstance(pattern, str):
        raise SchemaError(pointer, keyword, f"{keyword} must be a regular expression, not {json_type(pattern)}")
    try:
        return patterns.translate(pattern)
    except patterns.PatternError as error:
        if error.broken:
            raise SchemaError(pointer, keyword, f"{keyword} is no regular expression: {error.why}") from error
        if error.over_limit and not lowering.tool:
            raise SchemaError(pointer, keyword, error.why) from error
        lowering.relaxed(pointer, keyword, error.why)
        return None


def mapping_at(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`, an empty one for anything else: its own keyword complains about that."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def list_at(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list at `key`, an empty one for anything else."""
    value = schema.get(key)
    return value if isinstance(value, list) else []
