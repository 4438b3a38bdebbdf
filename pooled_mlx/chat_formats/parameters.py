"""Grammar of calls that write each argument as bare text between tags of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.raw_values import text_branches
from pooled_mlx.chat_formats.schemas import (
    condition,
    only_types,
    parameters_of,
    part_of,
    possible_shape,
    requirement,
    shape_of,
    variants,
)
from pooled_mlx.core.request import Tool
from pooled_mlx.grammar.closing import runs_on
from pooled_mlx.grammar.errors import Unenforced
from pooled_mlx.grammar.lark import SELF, SchemaError

MOST_IN_ANY_ORDER = 60
"""Parameters of one tool that the grammar engine can count; with more they come in the order of the schema."""

HELD = frozenset({"type", "properties", "required", "additionalProperties", "$ref", "allOf"})
"""What the rules here hold of a tool's schema itself."""

BIT = "\x00bit\x00"
"""Stands for the number of a parameter in the reference to a parametric rule."""


class Value(NamedTuple):
    """A body for a value with its closing tag; where it is raw text in which a closing tag may be content, what that must not
    begin with; whether it is text at all."""

    body: str
    raw: str | None
    text: bool


class ParameterRules(ABC):
    """Parameters in any order, each once, the required ones always, every value of its schema's type.

    A format says how its tags look. `typed`: the tag that opens a value tells whether it is a string. `end` closes the call
    behind the last parameter, `close` a value. `tag` is the text that closes a value, "" where that is a token of its own,
    which no text can be taken for.
    """

    typed = False

    def __init__(self, spec: AnswerSpec, lark: GrammarBuilder, *, end: str, close: str, tag: str) -> None:
        self.spec = spec
        self.lark = lark
        self.end = end
        self.close = close
        self.tag = tag
        self._known: dict[str, str] = {}
        self._raws: dict[str, str] = {}
        self.examples: dict[str, str] = {}
        """By what it must not begin with: a raw text in which an example of a call has begun, and the first closing tag."""

    @abstractmethod
    def head(self, name: str, *, text: bool) -> str:
        """What opens the parameter `name`; `text`: its value is a string."""

    @abstractmethod
    def any_head(self, *, text: bool) -> str:
        """What opens a parameter of any name."""

    @abstractmethod
    def bounded(self, expressions: list[str]) -> str:
        """A text that matches all these regexes, and its closing tag."""

    @abstractmethod
    def write_raw(self, but: str) -> str:
        """The rule that `raw` gives, written."""

    def raw(self, but: str) -> str:
        """Any text, and its closing tag. `but` are characters the text must not begin with, as a regex set without brackets."""
        if but not in self._raws:
            self._raws[but] = self.write_raw(but)
        return self._raws[but]

    def literal(self, text: str) -> str:
        """Exactly this text, and its closing tag."""
        return f"{self.lark.text(text)} {self.close}"

    def more(self, names: list[str], complete: str) -> tuple[str, str]:
        """Rules for what may follow a raw value's closing tag when it was content, and when an example has begun before it; ""
        where it never is content.

        `complete` is the condition under which the call may end. A parametric rule is given with its argument, in which
        `BIT` stands for the number of the parameter.
        """
        return "", ""

    def of(self, tool: Tool) -> str:
        """The rule, with its start value, for everything behind the tool's name."""
        schema = rules.arguments_schema(tool)
        degraded = tool.name in self.spec.degraded
        grammar = (tool.grammar.syntax, tool.grammar.definition) if tool.grammar and not degraded else None
        key = rules.shape_key(schema, grammar, degraded)
        if key not in self._known:
            try:
                shapes = [self._shape(tool, variant) for variant in variants(schema)]
                self._known[key] = shapes[0] if len(shapes) == 1 else self.lark.rule("parameters", "\n    | ".join(shapes))
            except SchemaError as error:
                self.spec.degraded[tool.name] = str(error)
                return self.of(tool)
        return self._known[key]

    def _shape(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        declared = parameters_of(schema)
        rules.name_unheld(self.lark, schema, HELD, rules.where_of(tool), "its format writes each parameter apart")
        if not declared:
            return self._undeclared(tool, schema) if schema.get("additionalProperties") else self.end
        values = {name: self._value(tool, name, value, schema) for name, value in declared.items()}
        if len(declared) > MOST_IN_ANY_ORDER:
            return self._in_order(values, requirement(schema)[0])
        names = list(declared)
        complete = condition(names, *requirement(schema))
        some_raw = any(one.raw is not None for value in values.values() for one in value)
        plain, in_example = self.more(names, complete) if some_raw else ("", "")
        alternatives = [self.end + complete]
        for bit, (name, value) in enumerate(values.items()):
            for body, raw, text in value:
                head, rest = self.head(name, text=text), f"{SELF}::set_bit({bit}) %if bit_clear({bit})"
                after = plain.replace(BIT, str(bit)) + " " if raw is not None else ""
                alternatives.append(f"{head} {body} {after}{rest}")
                if raw is not None and in_example and raw in self.examples:
                    alternatives.append(f"{head} {self.examples[raw]} {in_example.replace(BIT, str(bit))} {rest}")
        return self.lark.rule("parameters", "\n    | ".join(alternatives), attributes="::_") + "::0x0"

    def _in_order(self, values: dict[str, list[Value]], required: frozenset[str]) -> str:
        """In the order of the schema; here a closing tag always closes."""
        parts: list[str] = []
        for name, value in values.items():
            bodies = " | ".join(f"{self.head(name, text=text)} {body}" for body, _, text in value)
            parts.append(f"({bodies})" + ("" if name in required else "?"))
        return self.lark.rule("parameters", f"{' '.join(parts)} {self.end}")

    def _undeclared(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """Any parameters, because the schema declares none and allows them."""
        values = self._value(tool, "", schema["additionalProperties"], schema)
        bodies = [f"{self.any_head(text=text)} {body} {SELF}" for body, _, text in values]
        return self.lark.rule("parameters", "\n    | ".join([self.end, *bodies]))

    def _value(self, tool: Tool, name: str, schema: object, root: Mapping[str, Any]) -> list[Value]:
        where = f"{rules.where_of(tool)}/properties/{name}"
        shape = possible_shape(schema, root)
        if shape is None and tool.name not in self.spec.degraded:
            raise SchemaError(where, "", "no value can meet this schema")
        shape = shape or shape_of(None)
        if tool.name in self.spec.degraded:
            return [Value(self.raw(""), "", True)] if shape.maybe_text else [self._json({"type": sorted(shape.types)}, where)]
        if tool.custom and tool.grammar is not None and tool.grammar.syntax == "lark":
            if self.tag and runs_on(tool.grammar.definition, self.tag):
                raise SchemaError("", "grammar", "its texts run on into the tag that closes them, so that no call could end")
            return [Value(f"%lark {{\n{tool.grammar.definition}\n}} {self.close}", None, True)]
        bodies: list[Value] = []
        written_as_json = shape.json_types
        if shape.maybe_text:
            dropped: list[tuple[str, str]] = []
            opened = False
            for texts, expressions in text_branches(schema, root, dropped):
                if texts is not None:
                    bodies.append(Value("(" + " | ".join(self.literal(text) for text in texts) + ")", None, True))
                elif expressions:
                    bodies.append(Value(self.bounded(expressions), None, True))
                else:
                    opened = True
            self.lark.unenforced.extend(Unenforced(f"{where}/{keyword}", keyword, why) for keyword, why in dropped)
            if opened:
                # a text that reads as a number, a word or null is told from it by the reader: one rule for any text
                if not self.typed:
                    written_as_json &= {"array", "object"}
                but = (
                    ""
                    if self.typed
                    else "".join(mark for kind, mark in (("array", "\\["), ("object", "\\{")) if kind in written_as_json)
                )
                bodies.append(Value(self.raw(but), but, True))
        narrowed = only_types(schema, root, written_as_json) if written_as_json else None
        if narrowed is not None or not bodies:
            bodies.append(self._json(part_of(root, schema if narrowed is None else narrowed), where))
        return bodies

    def _json(self, schema: Any, where: str) -> Value:
        return Value(f"{rules.tool_json(self.lark, schema, where)} {self.close}", None, False)
