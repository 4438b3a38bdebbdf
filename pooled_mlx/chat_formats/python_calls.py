"""Calls as Python writes them: `name(key="value", number=2)`, several in a list or one a line (LFM2, Olmo 3, Llama 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import CUSTOM_PARAMETER, AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.hermes import HermesReader
from pooled_mlx.chat_formats.parameters import HELD, MOST_IN_ANY_ORDER
from pooled_mlx.chat_formats.schemas import (
    condition,
    only_types,
    parameters_of,
    part_of,
    possible_shape,
    requirement,
    variants,
)
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Step, TaggedParser, unquoted
from pooled_mlx.core.request import Tool
from pooled_mlx.grammar.lark import SELF, SchemaError
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE
from pooled_mlx.text.json_stream import JsonStream, StringField, quote

_LONGEST_NAME = 256
_KEY = re.compile(r"[\w.\-$@/]+")
_KEY_RULE = r"/[0-9A-Za-z_.\-$@\/]{1,128}/"
_IN_STRING = re.compile(r"\\|[\"']")
_WORDS = {True: "True", False: "False", None: "None"}


@dataclass(frozen=True, slots=True)
class Row:
    """How a family writes its calls: between tags ("" for none: the calls are the whole answer), in brackets or one a line."""

    call: str
    end_call: str
    brackets: bool = True
    gap: str = ""


class PythonReader:
    """Reads one call of a row and hands its arguments on as JSON. Lists and objects may be JSON or Python.

    Where no grammar holds the answer, a quote ends a string only before the next argument or the end of the call: some
    templates write strings without escapes. A call object in JSON is read too.
    """

    def __init__(self, setup: ParserSetup, calls: Calls, lines: bool) -> None:
        """`lines`: calls stand one a line."""
        self._writer = setup.writer
        self._lines = lines
        self._constrained = setup.constrained
        self._calls = calls
        self._json = HermesReader(setup, calls, frozenset({"name"}), frozenset({"arguments", "parameters"}))
        self._raw: list[str] = []
        self._buffer = ""
        self._mode = "start"
        """"start", "name", "first" (behind the bracket), "key", "value", "string", "container", "next", "json", "done"."""
        self._tool: Tool | None = None
        self._custom: StringField | None = None
        self._given: set[str] = set()
        self._dropped = False
        self._quote = ""
        self._pending = False
        self._bracket = False
        self._value = JsonStream()
        self._committed = False

    @property
    def committed(self) -> bool:
        """True once a callable tool's name and the beginning of its arguments were read."""
        return self._committed or self._json.committed

    @property
    def in_value(self) -> bool:
        """True inside a string that has not met a quote which may end it."""
        if self._mode == "json":
            return self._json.in_value
        return (self._mode == "string" and not self._pending) or (self._mode == "container" and self._value.in_string)

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """Inside a string a closing tag is content if the string goes on."""
        return "yes" if not self.in_value else "maybe" if token else "no"

    def refutes(self, text: str) -> bool:
        """Any text after the tag shows that the string went on."""
        return bool(text.strip(SPACE))

    def tag(self, name: str) -> Step:
        """No tag stands inside a call but as content."""
        return self.feed(name)

    def feed(self, text: str) -> Step:
        """The next piece of the row."""
        if not self.committed:
            self._raw.append(text)
        self._buffer += text
        while self._buffer and self._advance(final=False):
            pass
        return self._step()

    def close(self) -> Step:
        """Complete the call with what there is."""
        while self._buffer and self._mode not in ("rejected", "done") and self._advance(final=True):
            pass
        if self._mode == "json":
            step = self._json.close()
            return step if step[0] == "done" else ("rejected", "".join(self._raw))
        if self._mode in ("rejected", "done") or not self._committed:
            return self._step() if self._mode == "done" else ("rejected", "".join(self._raw))
        if self._mode in ("value", "string", "container"):
            self._write(self._value.close())
        self._end()
        return "done", ""

    def _step(self) -> Step:
        if self._mode == "rejected":
            return "rejected", "".join(self._raw)
        return ("done", self._buffer) if self._mode == "done" else ("open", "")

    def _advance(self, *, final: bool) -> bool:
        """One step over the buffer; False when it needs more text, or nothing is left to do."""
        if self._mode in ("rejected", "done"):
            return False
        if self._mode == "json":
            return self._as_json()
        if self._mode == "string":
            return self._string(final)
        if self._mode == "container":
            out, used = self._value.feed(self._buffer)
            self._write(out)
            self._buffer = self._buffer[used:]
            if self._value.done:
                self._mode = "next"
            return True
        self._buffer = self._buffer.lstrip(SPACE)
        if not self._buffer:
            return False
        if self._mode == "start":
            if self._buffer[0] == "[" and not self._bracket:
                self._buffer, self._bracket = self._buffer[1:], True
            else:
                self._mode = "json" if self._buffer[0] == "{" else "name"
            return True
        if self._mode == "name":
            return self._name()
        if self._mode in ("first", "key"):
            return self._key()
        return self._begin_value(final) if self._mode == "value" else self._next()

    def _as_json(self) -> bool:
        text, self._buffer = self._buffer, ""
        state, rest = self._json.feed(text)
        if state != "open":
            self._mode = state
        if state == "done":
            self._buffer = rest
        return False

    def _name(self) -> bool:
        name, found, rest = self._buffer.partition("(")
        name = name.strip(SPACE)
        if len(name) > _LONGEST_NAME or any(char in name for char in "\n[]{},"):
            self._mode = "rejected"
        elif found:
            self._tool = self._calls.find(name) if name else None
            self._mode, self._buffer = ("first" if self._tool else "rejected"), rest
        return bool(found)

    def _key(self) -> bool:
        if self._buffer[0] == ")":
            self._buffer = self._buffer[1:]
            self._commit()
            self._end()
            return True
        key, found, rest = self._buffer.partition("=")
        name = unquoted(key)
        if _KEY.fullmatch(name) and not found:
            return False
        if not _KEY.fullmatch(name) or rest.startswith("=") or len(key) > _LONGEST_NAME:
            if not self._committed:
                self._mode = "rejected"
                return True
            self._writer.note("text between arguments was dropped")
            self._buffer = self._buffer[1:]
            return True
        if found and not rest and not self._committed:
            return False  # "==" would show that this is no call
        self._commit()
        self._dropped = name in self._given
        if self._dropped:
            self._writer.note(f"argument {name!r} was given twice; the first value stays")
        else:
            self._write(("{" if not self._given else ", ") + quote(name) + ": ")
            self._given.add(name)
        self._buffer, self._mode, self._value = rest, "value", JsonStream()
        return True

    def _begin_value(self, final: bool) -> bool:
        text = self._buffer
        if text[0] in "\"'":
            if len(text) < 3 and text == text[0] * len(text) and not final:
                return False
            self._quote = text[:3] if text[:3] == text[0] * 3 else text[0]
            self._buffer, self._mode = text[len(self._quote) :], "string"
            self._write(self._value.feed('"')[0])
            return self._string(final)
        if text[0] in "[{":
            self._mode = "container"
            return True
        end = next((at for at, char in enumerate(text) if char in ",)"), len(text))
        if end == len(text) and not final:
            return False
        self._write(self._value.feed(text[:end])[0] + self._value.close())
        self._buffer, self._mode = text[end:], "next"
        return True

    def _string(self, final: bool) -> bool:
        """Inside a string: content up to the quote that ends it."""
        text, at = self._buffer, 0
        self._pending = False
        while found := _IN_STRING.search(text, at):
            place = found.start()
            if text[place] == "\\":
                if place + 1 == len(text) and not final:
                    return self._content(text, place)
                at = place + 2
            elif text[place] != self._quote[0]:
                at = place + 1
            else:
                ends = self._ends(text, place, final)
                if ends is None:
                    self._pending = True
                    return self._content(text, place)
                if ends:
                    self._content(text, place)
                    self._write(self._value.feed('"')[0])
                    self._buffer, self._mode = text[place + len(self._quote) :], "next"
                    return True
                at = place + 1
        return self._content(text, len(text))

    def _content(self, text: str, end: int) -> bool:
        """`text` up to `end` belongs to the string; the rest waits."""
        body = re.sub(r'\\.|"', lambda found: found[0] if len(found[0]) > 1 else '\\"', text[:end], flags=re.DOTALL)
        self._write(self._value.feed(body)[0])
        self._buffer = text[end:]
        return False

    def _ends(self, text: str, place: int, final: bool) -> bool | None:
        """Whether the quote at `place` ends the string, None while that cannot be told."""
        if not text.startswith(self._quote, place):
            waits = self._quote.startswith(text[place:]) and not final
            return None if waits else False
        if self._constrained:
            return True
        return _goes_on(text, place + len(self._quote), final, self._lines)

    def _next(self) -> bool:
        """Behind a value: the next one, or the end of the call."""
        char, self._buffer = self._buffer[0], self._buffer[1:]
        if char == ",":
            self._mode = "key"
        elif char == ")":
            self._end()
        else:
            self._writer.note("text between arguments was dropped")
        return True

    def _commit(self) -> None:
        assert self._tool is not None
        if not self._committed:
            self._committed = True
            self._raw.clear()
            self._writer.call_start(self._tool)
            self._custom = StringField(CUSTOM_PARAMETER) if self._tool.custom else None

    def _write(self, out: str) -> None:
        if not self._dropped:
            self._writer.call_arguments(out if self._custom is None else self._custom.feed(out))

    def _end(self) -> None:
        self._dropped = False
        if self._custom is None:
            self._write("}" if self._given else "{}")
        self._writer.call_end()
        self._mode = "done"


def _goes_on(text: str, at: int, final: bool, lines: bool) -> bool | None:
    """Whether what stands at `at` follows a value: the next argument or the end of the call. None while that cannot be told."""
    unknown = True if final else None
    place = _after_space(text, at)
    if place == len(text):
        return unknown
    following = _after_space(text, place + 1)
    if text[place] == ")":
        if lines and "\n" in text[place + 1 : following]:
            return True
        return unknown if following == len(text) else text[following] in "],<"
    if text[place] != ",":
        return False
    if following == len(text):
        return unknown
    key = _KEY.match(text, following)
    if key is None:
        return text[following] == ")"
    behind = _after_space(text, key.end())
    return unknown if behind == len(text) else text[behind] == "="


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


class _Arguments:
    """Keyword arguments in any order, each once, the required ones always, every value of its schema's type."""

    def __init__(self, spec: AnswerSpec, lark: GrammarBuilder) -> None:
        self._spec = spec
        self._lark = lark

    def of(self, tool: Tool) -> str:
        """The rule for everything behind the tool's bracket."""
        where = rules.where_of(tool)
        if tool.name not in self._spec.degraded:
            try:
                schema = rules.arguments_schema(tool)
                shapes = [self._shape(part, where) for part in variants(schema)]
            except SchemaError as error:
                self._spec.degraded[tool.name] = str(error)
            else:
                if tool.grammar is not None and tool.grammar.syntax == "lark":
                    self._spec.degraded[tool.name] = "a Lark grammar cannot be held inside a string"
                return shapes[0] if len(shapes) == 1 else self._lark.rule("arguments", " | ".join(shapes))
        return self._any({"type": "string"} if tool.custom else True, where)

    def _any(self, schema: Any, where: str) -> str:
        pair = f'{_KEY_RULE} "=" {self._value(schema, schema, where)}'
        return f'({pair} (", " {pair})*)? ")"'

    def _shape(self, schema: Mapping[str, Any], where: str) -> str:
        declared = parameters_of(schema)
        rules.name_unheld(self._lark, schema, HELD, where, "its format writes each argument apart")
        if not declared:
            return self._any(schema["additionalProperties"], where) if schema.get("additionalProperties") else '")"'
        if len(declared) > MOST_IN_ANY_ORDER:
            raise SchemaError(where, "properties", f"{len(declared)} parameters are more than can be held in any order")
        odd = next((name for name in declared if not _KEY.fullmatch(name)), None)
        if odd is not None:
            raise SchemaError(f"{where}/properties", odd, "its name cannot be written as that of an argument")
        names = list(declared)
        complete = condition(names, *requirement(schema))
        pairs = [
            f"{self._lark.text(name + '=')} {self._value(value, schema, f'{where}/properties/{name}')}"
            for name, value in declared.items()
        ]
        rest = [f'")"{complete}']
        rest += [f'", " {pair} {SELF}::set_bit({bit}) %if bit_clear({bit})' for bit, pair in enumerate(pairs)]
        after = self._lark.rule("rest", "\n    | ".join(rest), attributes="::_")
        first = [f"{pair} {after}::{1 << bit:#x}" for bit, pair in enumerate(pairs)]
        return self._lark.rule("arguments", "\n    | ".join(first if complete else [*first, '")"']))

    def _value(self, schema: Any, root: Any, where: str) -> str:
        """A value: words as Python spells them, everything else JSON."""
        shape = possible_shape(schema, root)
        if shape is None and isinstance(schema, Mapping):
            raise SchemaError(where, "", "no value can meet this schema")
        types = frozenset({"string", "number", "boolean", "null", "array", "object"})
        if isinstance(schema, Mapping) and (schema.keys() - {"description"}) and shape is not None:
            types = shape.types
        bodies: list[str] = []
        for kind, values in (("boolean", (True, False)), ("null", (None,))):
            narrowed = only_types(schema, root, frozenset({kind})) if kind in types else None
            if narrowed is not None:
                listed = narrowed.get("enum", [narrowed["const"]] if "const" in narrowed else values)
                bodies += [self._lark.text(_WORDS[value]) for value in values if value in listed]
        others = types - {"boolean", "null"}
        narrowed = only_types(schema, root, others) if others else None
        if narrowed is not None or not bodies:
            value = schema if narrowed is None else narrowed
            bodies.append(rules.tool_json(self._lark, part_of(root, value) if isinstance(root, Mapping) else value, where))
        return "(" + " | ".join(bodies) + ")"


class PythonCalls:
    """A chat format of such rows, thinking between `<think>` tags. `marks` are what a template of the family writes."""

    def __init__(self, row: Row, marks: tuple[str, ...]) -> None:
        self._row = row
        self._marks = marks
        self.tags = frozenset({THINK, END_THINK, row.call, row.end_call} - {""})
        self.end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write the family's marks."""
        return 3 if all(mark in template_text for mark in self._marks) else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls, row = Calls(setup), self._row

        def reader(bare: bool) -> CallReader:
            return PythonReader(setup, calls, not row.brackets)

        return TaggedParser(
            setup,
            call_tags=(row.call, row.end_call),
            calls=calls,
            reader=reader,
            again=("{", *(f"{tool.name}(" for tool in setup.request.callable_tools)),
            first=None if row.call else "[",
        )

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """As many calls as the request allows. Without tags a text cannot begin with a bracket where a call may be made."""
        row, calls = self._row, ""
        if spec.tools and spec.request.call_limit:
            arguments = _Arguments(spec, lark)
            one = lark.rule(
                "tools", "\n    | ".join(f"{lark.text(tool.name + '(')} {arguments.of(tool)}" for tool in spec.tools)
            )
            calls = rules.several(one, lark.text(", " if row.brackets else "\n"), spec.request.call_limit)
            calls = f'"[" {calls} "]"' if row.brackets else calls
        if row.call:
            body = f"{calls} {rules.tag(spec, lark, row.end_call)}" if calls else ""
            return lark.build(rules.answer(spec, lark, open_tag=row.call, call_body=body, separator="", most=1, gap=row.gap))
        if not calls:
            return lark.build(rules.answer(spec, lark))
        if spec.request.tool_choice.mode in ("required", "named"):
            return lark.build(calls)
        other = lark.terminal("TEXT", rules.text_but("\\[")) if spec.json_schema is None else lark.json(spec.json_schema, "")
        return lark.build(f"{other} | {calls}")
