"""Which types a parameter may have, by its schema alone: the one place where a value's type is decided.

Formats that write values as bare text need it: `5` is a number where the schema says integer and a text where it says
string. Nothing is ever guessed from the text of a value whose schema allows one type only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_IMPLIED = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "format"),
}
_ANNOTATIONS = frozenset({"type", "description", "title", "default", "examples", "deprecated", "$comment", "nullable"})
_STRING_RULES = frozenset({"pattern", "minLength", "maxLength", "format", "enum", "const"})
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The types a value may have.

    `types` are JSON schema type names. `choices` are the only strings allowed, where the schema lists them. `loose` are the
    types that the schema admits without any further rule.
    """

    types: frozenset[str]
    choices: frozenset[str] | None = None
    loose: frozenset[str] = frozenset()

    @property
    def text_only(self) -> bool:
        """True when every value is a string: the text itself, whatever it looks like."""
        return self.types == frozenset({"string"})

    @property
    def maybe_text(self) -> bool:
        """True when a string is among the types."""
        return "string" in self.types

    @property
    def json_types(self) -> frozenset[str]:
        """The types that are written as JSON."""
        return self.types - {"string"}


_TEXT = Shape(frozenset({"string"}), None, frozenset({"string"}))


def shape_of(schema: object, root: object = None) -> Shape:
    """The shape of values of `schema`; local references are looked up in `root`.

    A schema that names no type and implies none takes a string.
    """
    shape = _shape(schema, root, 0)
    return _TEXT if shape is None or not shape.types else shape


def parameters_of(schema: object) -> dict[str, Any]:
    """The declared parameters of a tool's schema in order: its `properties`, through a reference or `allOf` at the root."""
    found: dict[str, Any] = {}
    _collect(schema, schema, found, 0)
    return found


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "required", "default", "examples"})
_NOTES = frozenset(
    {"description", "title", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
)


def loosened(schema: Any) -> Any:
    """`schema` without annotations, every `oneOf` as an `anyOf`: what is enforced of it in tools."""
    if isinstance(schema, list):
        return [loosened(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOTES:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            value = {name: loosened(item) for name, item in value.items()}
        elif key not in _VALUES:
            value = loosened(value)
        result[key] = value
    if isinstance(result.get("oneOf"), list) and isinstance(result.get("allOf", []), list):
        branches = result.pop("oneOf")
        if "anyOf" in result:
            result["allOf"] = [*result.get("allOf", ()), {"anyOf": branches}]
        else:
            result["anyOf"] = branches
    return result


def part_of(root: Mapping[str, Any], schema: object) -> Any:
    """The schema of one parameter as a document of its own, its references into `root` kept working."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    whole = _moved(root)
    return {"$defs": {"tool": whole, "value": _moved(schema)}, "$ref": "#/$defs/value"}


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: "#/$defs/tool" + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in _VALUES
        else _moved(value)
        for key, value in schema.items()
    }


def only_types(schema: Any, root: object, types: frozenset[str]) -> Any:
    """`schema` narrowed to values of `types`; None where none of its values has one of them."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return {"type": sorted(types)}
    result = dict(schema)
    for word in ("anyOf", "oneOf"):
        if isinstance(result.get(word), list):
            narrowed = [only_types(branch, root, types) for branch in result[word] if shape_of(branch, root).types & types]
            if not narrowed:
                return None
            result[word] = narrowed
    if isinstance(result.get("enum"), list):
        result["enum"] = [value for value in result["enum"] if type_name(value) in types]
        if not result["enum"]:
            return None
    named = result.get("type")
    if named is not None or not any(word in result for word in ("anyOf", "oneOf", "enum", "const")):
        listed = named if isinstance(named, list) else [named] if named else sorted(types)
        kept = [kind for kind in listed if isinstance(kind, str) and kind in types]
        if not kept:
            return None
        result["type"] = kept if len(kept) > 1 else kept[0]
    return result


def requirement(schema: Mapping[str, Any]) -> tuple[frozenset[str], list[frozenset[str]]]:
    """The parameters a tool's schema always requires, and sets of which one must be there as a whole (empty: no such rule)."""
    always = set(_names(schema.get("required")))
    choices: list[frozenset[str]] = []
    target = resolve(schema, schema)
    if isinstance(target, Mapping):
        always.update(_names(target.get("required")))
        for branch in _branches(target, "allOf"):
            always.update(_names(branch.get("required")))
        choices = [frozenset(_names(branch.get("required"))) for branch in _branches(target, "anyOf")]
    return frozenset(always), choices if all(choices) else []


def condition(names: Sequence[str], always: frozenset[str], choices: Sequence[frozenset[str]]) -> str:
    """The condition of a parametric rule: bit i of its value says that parameter i was given. "" where nothing is required."""
    parts = [f"bit_set({bit})" for bit, name in enumerate(names) if name in always]
    sets = [_joined("and", [f"bit_set({bit})" for bit, name in enumerate(names) if name in one]) for one in choices]
    if sets and all(sets):
        parts.append(_joined("or", sets))
    return f" %if {_joined('and', parts)}" if parts else ""


def _joined(word: str, parts: Sequence[str]) -> str:
    result = parts[0] if parts else ""
    for part in parts[1:]:
        result = f"{word}({result}, {part})"
    return result


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _branches(schema: Mapping[str, Any], word: str) -> list[Mapping[str, Any]]:
    value = schema.get(word)
    return [branch for branch in value if isinstance(branch, Mapping)] if isinstance(value, list) else []


def resolve(schema: object, root: object) -> object:
    """Follow a local `$ref`; an unknown one gives True."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _lookup(schema["$ref"], root)
    return True


def _collect(schema: object, root: object, found: dict[str, Any], depth: int) -> None:
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        for name, value in properties.items():
            found.setdefault(name, value)
    for word in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            for branch in branches:
                _collect(branch, root, found, depth + 1)


def _lookup(reference: str, root: object) -> object:
    if not reference.startswith("#"):
        return True
    target = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and part in target:
            target = target[part]
        elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            return True
    return target


def _shape(schema: object, root: object, depth: int) -> Shape | None:
    """None: nothing is known of the type."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    shapes = [_by_type(schema), _by_values(schema)]
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            shapes.append(_union([_shape(branch, root, depth + 1) for branch in branches]))
    branches = schema.get("allOf")
    if isinstance(branches, list):
        shapes += [_shape(branch, root, depth + 1) for branch in branches]
    known = [shape for shape in shapes if shape is not None]
    if not known:
        known = [Shape(frozenset({name})) for name, words in _IMPLIED.items() if any(word in schema for word in words)]
        return known[0] if len(known) == 1 else None
    result = known[0]
    for shape in known[1:]:
        result = _intersection(result, shape)
    if schema.get("nullable") is True:
        result = Shape(result.types | {"null"}, result.choices, result.loose | {"null"})
    return result


def _by_type(schema: Mapping[str, Any]) -> Shape | None:
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    types = frozenset(kind for kind in listed if isinstance(kind, str) and kind in ALL_TYPES)
    if not types:
        return None
    ruled = set(schema) - _ANNOTATIONS
    if not ruled:
        return Shape(types, None, types)
    return Shape(types, None, types - {"string"} if ruled <= _STRING_RULES - {"enum", "const"} else frozenset())


def _by_values(schema: Mapping[str, Any]) -> Shape | None:
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    return Shape(
        frozenset(type_name(value) for value in values),
        frozenset(value for value in values if isinstance(value, str)),
    )


def _union(shapes: list[Shape | None]) -> Shape | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    texts = [shape.choices for shape in known if shape.maybe_text]
    listed = [choices for choices in texts if choices is not None]
    return Shape(
        frozenset().union(*(shape.types for shape in known)),
        frozenset().union(*listed) if texts and len(listed) == len(texts) else None,
        frozenset().union(*(shape.loose for shape in known)),
    )


def _intersection(left: Shape, right: Shape) -> Shape:
    types = left.types & right.types
    for one, other in ((left, right), (right, left)):
        if "integer" in one.types and "number" in other.types:
            types |= {"integer"}
    if left.choices is None or right.choices is None:
        choices = right.choices if left.choices is None else left.choices
    else:
        choices = left.choices & right.choices
    return Shape(types, choices, left.loose & right.loose & types)


def type_name(value: object) -> str:
    """The JSON schema type of a decoded JSON value; whole numbers written as such are integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def json_of_text(text: str, shape: Shape) -> str | None:
    """The JSON of a value written as bare text, None where `shape` makes it a string.

    Without a string among the types, the text is JSON of one of them: `5.0` is the integer 5, True and None are accepted in
    any case. With a string among the types, listed strings are strings; an array or object is one where its type is
    allowed; a number, true, false or null is one where it is spelled exactly as JSON spells it.
    """
    word = text.strip()
    if shape.text_only or (shape.choices is not None and shape.maybe_text and text in shape.choices):
        return None
    if not shape.maybe_text and word.lower() in _WORDS:
        word = _WORDS[word.lower()]
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    kind = type_name(value)
    if kind == "number" and value == int(value) and "number" not in shape.types and "integer" in shape.types:
        return None if shape.maybe_text else str(int(value))
    allowed = kind in shape.types or (kind == "integer" and "number" in shape.types)
    if not allowed or kind == "string":
        return None
    if shape.maybe_text and kind not in ("array", "object"):
        if word != text or json.dumps(value) != text:
            return None
        numeric = kind == "integer" and "number" in shape.loose
        if shape.choices is None and "string" in shape.loose and kind not in shape.loose and not numeric and kind != "null":
            return None
    return word


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
