"""Which types a parameter may have, by its schema alone: the one place where a value's type is decided.

Formats that write values as bare text need it: `5` is a number where the schema says integer and a text where it says
string. Nothing is ever guessed from the text of a value whose schema allows one type only.
"""

from __future__ import annotations

import json
import math
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
_MAX_PARTS = 256


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
    return possible_shape(schema, root) or _TEXT


def possible_shape(schema: object, root: object = None) -> Shape | None:
    """`shape_of`, but None where no type is left for a value of `schema`."""
    shape = _shape(schema, root, {})
    return _TEXT if shape is None else shape if shape.types else None


def parameters_of(schema: object) -> dict[str, Any]:
    """The parameters of a tool's schema in order: its `properties`, through references and alternatives at the root.

    What several parts say of one parameter is joined: all of it in `allOf`, any of it in alternatives. A name that is required
    and declared nowhere may have any value.
    """
    found = _collected(schema, schema, set())
    target = resolve(schema, schema)
    if isinstance(target, Mapping) and target.get("additionalProperties") is not False:
        other = target.get("additionalProperties")
        for name in sorted(requirement(target)[0] - found.keys()):
            found[name] = other if isinstance(other, Mapping) else {}
    return found


MOST_VARIANTS = 8
"""Alternatives of a tool's schema that are held one by one."""


def variants(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a tool's schema, each with what stands beside them; the schema alone where there are none.

    Only alternatives that declare parameters count: those that merely require some are a condition. Too many of them are left
    together.
    """
    target = resolve(schema, schema)
    if not isinstance(target, Mapping):
        return [schema]
    words = [word for word in ("anyOf", "oneOf") if any("properties" in one for one in _targets(target, word, schema))]
    if len(words) != 1 or not len(target[words[0]]) <= MOST_VARIANTS:
        return [schema]
    base = {key: value for key, value in target.items() if key != words[0]}
    for word in ("$defs", "definitions"):
        if word in schema:
            base[word] = schema[word]
    return [_merged(base, branch) for branch in _targets(target, words[0], schema)]


def _targets(schema: Mapping[str, Any], word: str, root: object) -> list[Mapping[str, Any]]:
    listed = schema.get(word)
    found = [resolve(branch, root) for branch in listed] if isinstance(listed, list) else []
    return [branch for branch in found if isinstance(branch, Mapping)]


def _merged(base: Mapping[str, Any], branch: Mapping[str, Any]) -> Mapping[str, Any]:
    result = {**branch, **base}
    result["properties"] = _both(_mapping(base.get("properties")), _mapping(branch.get("properties")))
    result["required"] = list(dict.fromkeys([*_names(base.get("required")), *_names(branch.get("required"))]))
    if isinstance(base.get("allOf"), list) and isinstance(branch.get("allOf"), list):
        result["allOf"] = [*base["allOf"], *branch["allOf"]]
    if branch.get("additionalProperties") is False:
        result["additionalProperties"] = False
    return result


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The parameters of two parts that both hold."""
    shared = {name: {"allOf": [one[name], other[name]]} for name in one if name in other and one[name] != other[name]}
    return {**one, **other, **shared}


def _collected(schema: object, root: object, above: set[int]) -> dict[str, Any]:
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or id(schema) in above or len(above) > _MAX_PARTS:
        return {}
    above.add(id(schema))
    found = _mapping(schema.get("properties"))
    for branch in _targets(schema, "allOf", root):
        found = _both(found, _collected(branch, root, above))
    for word in ("anyOf", "oneOf"):
        listed: dict[str, list[Any]] = {}
        for branch in _targets(schema, word, root):
            for name, value in _collected(branch, root, above).items():
                if value not in listed.setdefault(name, []):
                    listed[name].append(value)
        found = _both(found, {name: values[0] if len(values) == 1 else {"anyOf": values} for name, values in listed.items()})
    return found


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "required", "default", "examples"})
_NOTES = frozenset(
    {"description", "title", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
)


def loosened(schema: Any) -> Any:
    """`schema` without annotations: what is enforced of it in tools."""
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
    return result


def part_of(root: Mapping[str, Any], schema: object) -> Any:
    """The schema of one parameter as a document of its own, its references into `root` kept working."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    whole = _moved(root)
    return {"$defs": {"tool": whole, "value": _moved(schema)}, "$ref": "#/$defs/value"}


def _moved(schema: Any, *, root: bool = True) -> Any:
    """`schema` below `#/$defs/tool`. What has an id of its own inside is a document of its own, and its references stay."""
    if isinstance(schema, list):
        return [_moved(item, root=False) for item in schema]
    if not isinstance(schema, Mapping) or (not root and "$id" in schema):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$id":
            continue
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            value = "#/$defs/tool" + value[1:]
        elif key in _NAMED and isinstance(value, Mapping):
            value = {name: _moved(item, root=False) for name, item in value.items()}
        elif key not in _VALUES:
            value = _moved(value, root=False)
        result[key] = value
    return result


def only_types(schema: Any, root: object, types: frozenset[str]) -> Any:
    """`schema` narrowed to values of `types`; None where none of its values has one of them."""
    return _narrowed(schema, root, types, Alternatives())


class Alternatives:
    """A walk through alternatives of alternatives. One that is its own alternative adds nothing, nor does what comes after
    the first few hundred: alternatives that lead to each other have as many ways through them as there are orders of them.
    """

    MOST = 512

    def __init__(self) -> None:
        self._above: list[int] = []
        self._seen = 0
        self._shapes: dict[int, Shape] = {}

    def shape(self, schema: object, root: object) -> Shape:
        """`shape_of`, once for each schema of the walk."""
        if id(schema) not in self._shapes:
            self._shapes[id(schema)] = shape_of(schema, root)
        return self._shapes[id(schema)]

    def enter(self, schema: object) -> bool:
        """False where the walk should not go on into `schema`; else `leave` must be called behind it."""
        self._seen += 1
        if id(schema) in self._above or self._seen > self.MOST or len(self._above) > _MAX_DEPTH:
            return False
        self._above.append(id(schema))
        return True

    def leave(self) -> None:
        """The walk comes back from the schema entered last."""
        self._above.pop()


def _narrowed(schema: Any, root: object, types: frozenset[str], walk: Alternatives) -> Any:
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return {"type": sorted(types)}
    if not walk.enter(schema):
        return None
    try:
        return _narrowed_here(schema, root, types, walk)
    finally:
        walk.leave()


def _narrowed_here(schema: Mapping[str, Any], root: object, types: frozenset[str], walk: Alternatives) -> Any:
    result = dict(schema)
    for word in ("anyOf", "oneOf"):
        if isinstance(result.get(word), list):
            kept = [branch for branch in result[word] if walk.shape(branch, root).types & types]
            narrowed = [one for one in (_narrowed(branch, root, types, walk) for branch in kept) if one is not None]
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
        word = "anyOf" if "anyOf" in target else "oneOf"
        choices = [frozenset(_names(branch.get("required"))) for branch in _branches(target, word)]
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


def _shape(schema: object, root: object, known: dict[int, Shape | None]) -> Shape | None:
    """None: nothing is known of the type. `known` are the schemas seen on this walk, each looked at once."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return None
    if id(schema) not in known:
        known[id(schema)] = None  # what refers to itself says nothing more
        known[id(schema)] = _shape_here(schema, root, known)
    return known[id(schema)]


def _shape_here(schema: Mapping[str, Any], root: object, seen: dict[int, Shape | None]) -> Shape | None:
    shapes = [_by_type(schema), _by_values(schema)]
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            shapes.append(_union([_shape(branch, root, seen) for branch in branches]))
    branches = schema.get("allOf")
    if isinstance(branches, list):
        shapes += [_shape(branch, root, seen) for branch in branches]
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
        value = json.loads(word, parse_constant=_refuse, parse_float=_finite)
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


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond 64-bit floating point")
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
