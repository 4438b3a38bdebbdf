"""JSON schema → the part of it that the grammar engine enforces exactly, and a list of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Unenforced(NamedTuple):
    """A keyword that no rule enforces: its JSON pointer, its name, and why."""

    pointer: str
    keyword: str
    why: str


class SchemaError(Exception):
    """A schema that is broken, over a limit, or (strict) not enforceable. `pointer` is the JSON pointer of the keyword."""

    def __init__(self, pointer: str, keyword: str, message: str) -> None:
        super().__init__(f"{pointer or '#'}: {message}")
        self.pointer = pointer
        self.keyword = keyword
        self.message = message


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schema that the grammar engine takes as it is."""

    schema: Mapping[str, Any]
    unenforced: tuple[Unenforced, ...] = ()


_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "required"})
ANNOTATIONS = frozenset(
    {"description", "title", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "x-guidance"}
)


def clean(schema: Any) -> Any:
    """`schema` without annotations. Names of properties, values of enum and const are never touched."""
    if isinstance(schema, list):
        return [clean(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value
        if key in _VALUES
        else {name: clean(item) for name, item in value.items()}
        if key in _NAMES and isinstance(value, Mapping)
        else clean(value)
        for key, value in schema.items()
        if key not in ANNOTATIONS
    }


def lower(schema: Mapping[str, Any] | bool, *, strict: bool, where: str = "") -> Lowered:
    """Clean and lower one schema. Raises `SchemaError`."""
    if schema is True:
        return Lowered({})
    if schema is False:
        raise SchemaError(where, "", "the schema false allows no value")
    if not isinstance(schema, Mapping):
        raise SchemaError(where, "", f"a schema is an object or a boolean, not {type(schema).__name__}")
    return Lowered(clean(schema))
