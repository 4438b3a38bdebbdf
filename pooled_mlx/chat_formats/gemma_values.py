"""Grammar of values in Gemma 4's notation: JSON with bare keys and strings between quote tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.raw_values import regex, text_branches, without
from pooled_mlx.chat_formats.schemas import (
    condition,
    only_types,
    parameters_of,
    possible_shape,
    requirement,
    resolve,
    variants,
)
from pooled_mlx.core.request import Tool
from pooled_mlx.grammar.errors import Unenforced
from pooled_mlx.grammar.lark import SELF, SchemaError

_MAX_DEPTH = 8
_LONGEST_INLINE = 80
_MOST_IN_ANY_ORDER = 60
_NUMBER_RULES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WHY = "Gemma's notation cannot be held to it"
_HELD = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
        *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format", *_NUMBER_RULES),
    }
)


class ValueRules:
    """Values of a schema's types, objects with their declared properties in any order, deeper than `_MAX_DEPTH` anything."""

    def __init__(self, spec: AnswerSpec, lark: GrammarBuilder, quote: str, *, spelled: bool) -> None:
        self._spec = spec
        self._lark = lark
        self._quote = quote
        self._spelled = spelled
        self._known: dict[str, str] = {}
        self._values: dict[tuple[int, int], str] = {}
        self._kept: list[object] = []
        self._any_rule = ""

    def of(self, tool: Tool) -> str:
        """The rule of a tool's arguments as one object."""
        if tool.name in self._spec.degraded:
            return self._any_object()
        schema = rules.arguments_schema(tool)
        key = rules.shape_key(schema)
        if key not in self._known:
            self._values.clear()
            self._kept = [schema]  # values are known by the identity of their schemas
            try:
                where = rules.where_of(tool)
                self._kept += (parts := variants(schema))
                for part in parts:
                    rules.name_unheld(self._lark, part, _HELD - {"anyOf", "oneOf"}, where, _WHY)
                objects = [self._object(part, part, where, 0) for part in parts]
                self._known[key] = objects[0] if len(objects) == 1 else self._lark.rule("object", "\n    | ".join(objects))
            except SchemaError as error:
                self._spec.degraded[tool.name] = str(error)
                return self._any_object()
        return self._known[key]

    def _any_object(self) -> str:
        self._any()
        return f'"{{" ({_KEY} ":" {self._any()} ("," {_KEY} ":" {self._any()})*)? "}}"'

    def _any(self) -> str:
        """Any value."""
        if not self._any_rule:
            key = _KEY
            alternatives = [
                self._string([]),
                r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
                '"true"',
                '"false"',
                '"null"',
                f'"[" ({SELF} ("," {SELF})*)? "]"',
                f'"{{" ({key} ":" {SELF} ("," {key} ":" {SELF})*)? "}}"',
            ]
            self._any_rule = self._lark.rule("any", "\n    | ".join(alternatives))
        return self._any_rule

    def _string(self, expressions: list[str]) -> str:
        lark, quote = self._lark, self._quote
        if expressions:
            held = [*expressions, without('<|"|>')] if self._spelled else expressions
            text = lark.terminal("TEXT", " & ".join(held))
            return f"{quote} {rules.until(lark, quote, text)}" if self._spelled else f"{quote} {text} {quote}"
        # a quote before anything but what follows a value is content
        other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/[,}}\]](?s:.*)/")
        if self._spelled:
            more = lark.rule("more", f'"" | {SELF} {rules.until(lark, quote, other)}')
            return f"{quote} {rules.until(lark, quote)} {more}"
        more = lark.rule("more", f'"" | {SELF} {other} {quote}')
        return f"{quote} {rules.ANY_TEXT} {quote} {more}"

    def _value(self, schema: Any, root: object, where: str, depth: int) -> str:
        schema = resolve(schema, root)
        if not isinstance(schema, Mapping) or not schema or depth > _MAX_DEPTH:
            return self._any()
        key = id(schema), depth
        if key not in self._values:
            body = self._value_of(schema, root, where, depth)
            self._values[key] = body if len(body) <= _LONGEST_INLINE else self._lark.rule("value", body)
        return self._values[key]

    def _value_of(self, schema: Mapping[str, Any], root: object, where: str, depth: int) -> str:
        shape = possible_shape(schema, root)
        if shape is None:
            raise SchemaError(where, "", "no value can meet this schema")
        rules.name_unheld(self._lark, schema, _HELD, where, _WHY)
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return "(" + " | ".join(self._exactly(value) for value in values) + ")"
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                parts = [self._value(branch, root, f"{where}/{word}/{n}", depth + 1) for n, branch in enumerate(schema[word])]
                return "(" + " | ".join(dict.fromkeys(parts)) + ")"
        if "type" not in schema and shape.text_only and not any(key in schema for key in ("pattern", "minLength", "maxLength")):
            return self._any()
        parts = [self._typed(kind, schema, root, where, depth) for kind in sorted(shape.types)]
        return "(" + " | ".join(dict.fromkeys(parts)) + ")"

    def _typed(self, kind: str, schema: Mapping[str, Any], root: object, where: str, depth: int) -> str:
        if kind == "object":
            return self._object(schema, root, where, depth)
        if kind == "array":
            item = self._value(schema.get("items", True), root, f"{where}/items", depth + 1)
            low, high = schema.get("minItems", 0), schema.get("maxItems")
            if high is not None and high < low:
                raise SchemaError(f"{where}/minItems", "minItems", f"minItems is {low}, more than maxItems, {high}")
            more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}' if high is None or high > 1 else ""
            inside = f"{item} {more}" if high != 0 else ""
            return f'"[" {inside} "]"' if low else f'"[" ({inside})? "]"' if inside else '"[" "]"'
        if kind == "string":
            dropped: list[tuple[str, str]] = []
            branches = text_branches(only_types(schema, root, frozenset({"string"})) or {}, root, dropped)
            self._lark.unenforced.extend(Unenforced(f"{where}/{keyword}", keyword, why) for keyword, why in dropped)
            return self._string(branches[0][1] if branches else [])
        if kind in ("integer", "number"):
            held = {"type": kind, **{word: schema[word] for word in _NUMBER_RULES if word in schema}}
            return rules.tool_json(self._lark, held, where)
        return '"null"' if kind == "null" else '("true" | "false")'

    def _object(self, schema: Mapping[str, Any], root: object, where: str, depth: int) -> str:
        declared = parameters_of(schema)
        other = schema.get("additionalProperties", not declared or depth > 0)
        if len(declared) > _MOST_IN_ANY_ORDER:
            self._lark.unenforced.append(Unenforced(f"{where}/properties", "properties", f"{len(declared)} of them"))
            return self._any_object()
        more = "" if other is False else self._value(other, root, f"{where}/additionalProperties", depth + 1)
        if not declared:
            return f'"{{" ({_KEY} ":" {more} ("," {_KEY} ":" {more})*)? "}}"' if more else '"{" "}"'
        names = list(declared)
        complete = condition(names, *requirement(schema))
        pairs = [
            f"{self._lark.text(name + ':')} {self._value(value, root, f'{where}/properties/{name}', depth + 1)}"
            for name, value in declared.items()
        ]
        rest = [f'"}}"{complete}']
        rest += [f'"," {pair} {SELF}::set_bit({bit}) %if bit_clear({bit})' for bit, pair in enumerate(pairs)]
        unlisted = ""
        if more:
            unlisted = f"{self._lark.terminal('KEY', f'{_KEY} & ~/{_any_of(names)}/')} {self._lark.text(':')} {more}"
            rest.append(f'"," {unlisted} {SELF}::_')
        after = self._lark.rule("rest", "\n    | ".join(rest), attributes="::_")
        first = [f"{pair} {after}::{1 << bit:#x}" for bit, pair in enumerate(pairs)]
        if unlisted:
            first.append(f"{unlisted} {after}::0x0")
        if not complete:
            first.append('"}"')
        return self._lark.rule("object", '"{" (' + " | ".join(first) + ")")

    def _exactly(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote} {self._lark.text(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, bool) or value is None:
            return self._lark.text({True: "true", False: "false", None: "null"}[value])
        return rules.tool_json(self._lark, {"const": value}, "")


_KEY = r"/[0-9A-Za-z_\-.$@\/]+/"


def _any_of(names: Iterable[str]) -> str:
    return "|".join(regex(name) for name in names)
