"""Writes the arguments of one call as JSON while its parameters arrive as bare text, typed by the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping

from pooled_mlx.chat_formats.base import CUSTOM_PARAMETER, tool_schema
from pooled_mlx.chat_formats.schemas import Shape, json_of_text, parameters_of, shape_of
from pooled_mlx.chat_formats.tagged import unquoted
from pooled_mlx.core.request import Tool
from pooled_mlx.text.event_writer import SPACE, EventWriter
from pooled_mlx.text.json_stream import JsonStream, quote, quote_inner

_FIRST_OF_TYPE = {"null": "n", "boolean": "tf", "integer": "-0123456789", "number": "-0123456789", "array": "[", "object": "{"}
_LONGEST_SCALAR = 64


class ArgumentsWriter:
    """The arguments of one call.

    `begin(name)`, then `add(text)` as the value's text arrives, then `end()`; `finish()` after the last one. Strings stream
    as they come; other values go out when they are whole, or at once under a grammar, which makes them valid JSON.
    A custom tool's one string is written raw.
    """

    def __init__(self, writer: EventWriter, tool: Tool, constrained: bool) -> None:
        self._writer = writer
        self._tool = tool
        self._constrained = constrained
        self._schema = tool_schema(tool)
        self.declared: Mapping[str, object] = parameters_of(self._schema)
        self.given: set[str] = set()
        schema = self._schema
        free = schema is True or (isinstance(schema, Mapping) and schema.get("additionalProperties") not in (None, False))
        self.open_names: frozenset[str] | None = None if free and not self.declared else frozenset(self.declared)
        """The parameters that may still be given; None: any name, because the schema declares none and allows more."""
        self._shape: Shape | None = None
        self._mode = "skip"
        self._buffer = ""
        self._stream = JsonStream()

    @property
    def followers(self) -> frozenset[str] | None:
        """The parameters whose beginning ends the value: a text yields to none but those that are still open."""
        return None if self._mode == "whole" and self._shape is not None and not self._shape.maybe_text else self.open_names

    @property
    def streaming_json(self) -> bool:
        """True while the value is JSON that a grammar holds: its own syntax says where it ends, see `take_json`."""
        return self._mode == "json"

    @property
    def in_json_string(self) -> bool:
        """True inside a string of such JSON."""
        return self._mode == "json" and self._stream.in_string

    def begin(self, name: str, text: bool | None = None) -> None:
        """A parameter begins. One that was given already is read and dropped; quotes around a declared name are.

        `text` is what the model says of the value, that it is a string or that it is none; it counts where the schema allows
        both.
        """
        if name not in self.declared and unquoted(name) in self.declared:
            name = unquoted(name)
        self._buffer = ""
        if name in self.given:
            self._writer.note(f"parameter {name!r} was given twice; the first value stays")
            self._mode = "skip"
            return
        if self.open_names is not None:
            self.open_names -= {name}
        if self._tool.custom:
            self.given.add(name)
            self._mode = "raw" if name == CUSTOM_PARAMETER else "skip"
            return
        self._write(("{" if not self.given else ", ") + quote(name) + ": ")
        self.given.add(name)
        self._shape = shape_of(self._value_schema(name), self._schema)
        if text is not None and self._shape.maybe_text and self._shape.json_types:
            self._shape = Shape(frozenset({"string"}) if text else self._shape.json_types)
        if self._shape.text_only:
            self._open_string()
        elif self._constrained and not self._shape.maybe_text:
            self._mode, self._stream = "json", JsonStream()
        else:
            self._mode = "whole"

    def add(self, text: str) -> None:
        """The next piece of the value's text."""
        if self._mode == "raw":
            self._write(text)
        elif self._mode == "string":
            self._write(quote_inner(text))
        elif self._mode == "json":
            self._write(self._stream.feed(text)[0])
        elif self._mode == "whole":
            self._buffer += text
            if not self._undecided():
                text, self._buffer = self._buffer, ""
                self._open_string()
                self.add(text)

    def take_json(self, text: str) -> int | None:
        """Copy JSON from the front of `text`. Returns how many characters the value took, None while it goes on."""
        out, used = self._stream.feed(text)
        self._write(out)
        return used if self._stream.done else None

    def end(self) -> None:
        """The value is complete."""
        if self._mode == "string":
            self._write('"')
        elif self._mode == "json":
            self._write(self._stream.close())
        elif self._mode == "whole":
            self._write(self._whole(self._buffer))
        self._mode = "skip"

    def finish(self) -> None:
        """The call has all its parameters."""
        if not self._tool.custom:
            self._write("}" if self.given else "{}")

    def _write(self, text: str) -> None:
        self._writer.call_arguments(text)

    def _open_string(self) -> None:
        self._mode = "string"
        self._write('"')

    def _value_schema(self, name: str) -> object:
        if name in self.declared:
            return self.declared[name]
        return self._schema.get("additionalProperties") if isinstance(self._schema, Mapping) else True

    def _undecided(self) -> bool:
        """Whether a value that may be a string may still turn out to be something else."""
        assert self._shape is not None
        if not self._shape.maybe_text:
            return True
        body = self._buffer.lstrip(SPACE)
        if not body:
            return True
        kinds = [kind for kind in self._shape.json_types if body[0] in _FIRST_OF_TYPE[kind]]
        if body[0] in "[{":
            return bool(kinds)
        return bool(kinds) and len(self._buffer) <= _LONGEST_SCALAR

    def _whole(self, text: str) -> str:
        assert self._shape is not None
        value = json_of_text(text, self._shape)
        if value is None and not self._shape.maybe_text and text.strip(SPACE)[:1] in ("[", "{"):
            stream = JsonStream()
            body = text.strip(SPACE)
            out, used = stream.feed(body)
            if used == len(body):
                value = json_of_text(out + stream.close(), self._shape)
        if value is None:
            if not self._shape.maybe_text:
                self._writer.note("a value that is not of its parameter's type was given as a string")
            return quote(text)
        return value
