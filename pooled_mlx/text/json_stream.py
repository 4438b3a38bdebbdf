"""One JSON value, read in pieces and written on as valid JSON whatever the model got wrong."""

from __future__ import annotations

import json
import re

_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_STRING_STOP = {quote: re.compile(rf"[{quote}\\\x00-\x1f]") for quote in "\"'"}
_ATOM_END = re.compile(r"[,\]}\[{:\"\n]")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")


def quote(text: str) -> str:
    """`text` as a JSON string, characters outside ASCII as they are."""
    return json.dumps(text, ensure_ascii=False)


def quote_inner(text: str) -> str:
    """`text` as the inside of a JSON string; fragments of a text quote to fragments of its quotation."""
    return quote(text)[1:-1]


class JsonStream:
    """Copies one JSON value from `feed` to its return values.

    Valid JSON is copied unchanged, byte for byte, whatever the pieces are. Anything else is repaired, never refused: single
    quotes, bare words, invalid escapes, raw control characters, missing or trailing commas, missing closing brackets,
    Python's True, False and None; an escaped half of a surrogate pair becomes U+FFFD. `done` is set when the value is
    complete, `in_string` while inside a string.
    """

    __slots__ = ("_atom", "_comma", "_escape", "_high", "_mode", "_quote", "_stack", "done", "in_string")

    def __init__(self) -> None:
        self.done = False
        self.in_string = False
        self._stack: list[str] = []
        # What is expected: "value", "key" (or the end of the object), "colon", "next" (comma or end).
        self._mode = "value"
        self._quote = '"'
        self._escape = ""
        self._high = ""
        self._atom: str | None = None
        self._comma = ""

    @property
    def started(self) -> bool:
        """True once the first character of the value was seen."""
        return self.done or self.in_string or bool(self._stack) or self._atom is not None

    def feed(self, text: str) -> tuple[str, int]:
        """Take the next piece; returns the JSON to write and how many characters of `text` belong to the value."""
        out: list[str] = []
        at = 0
        size = len(text)
        while at < size and not self.done:
            if self.in_string:
                at = self._string(text, at, out)
            elif self._atom is not None:
                at = self._bare(text, at, out)
            elif text[at] in _SPACE:
                end = at + 1
                while end < size and text[end] in _SPACE:
                    end += 1
                self._space(text[at:end], out)
                at = end
            else:
                at = self._step(text, at, out)
        return "".join(out), at

    def close(self) -> str:
        """Complete the value: no more input comes. A value that never began becomes null."""
        out: list[str] = []
        if self.in_string:
            if self._escape:
                self._break_escape(out)
            self._end_string(out)
        if self._atom is not None:
            self._end_atom(out)
        while not self.done:
            if self._stack:
                self._close_container(out)
            else:
                self._put_value("null", out)
        return "".join(out)

    def _space(self, space: str, out: list[str]) -> None:
        if self._comma:
            self._comma += space
        elif self._stack:
            out.append(space)

    def _step(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        mode = self._mode
        if char in "}]":
            self._end_bracket(char, out)
            return at + 1
        if mode == "next":
            if char == ":":
                return at + 1
            self._comma = "," if char == "," else ", "
            self._mode = "key" if self._stack[-1] == "{" else "value"
            return at + (char == ",")
        if mode == "colon":
            if char == ",":
                out.append(": null")
                self._comma, self._mode = ",", "key"
                return at + 1
            self._mode = "value"
            out.append(":" if char == ":" else ": ")
            return at + (char == ":")
        if mode == "key":
            if char in "\"'":
                self._open_string(char, out)
            elif char in ",:{[":
                return at + 1
            else:
                self._take_comma(out)
                self._atom = ""
                return at
            return at + 1
        if char in "{[":
            self._take_comma(out)
            out.append(char)
            self._stack.append(char)
            self._mode = "key" if char == "{" else "value"
        elif char in "\"'":
            self._open_string(char, out)
        elif char in ",:":
            if char == "," and self._stack and self._stack[-1] == "{":
                out.append("null")
                self._comma, self._mode = ",", "key"
        else:
            self._take_comma(out)
            self._atom = ""
            return at
        return at + 1

    def _take_comma(self, out: list[str]) -> None:
        if self._comma:
            out.append(self._comma)
            self._comma = ""

    def _open_string(self, mark: str, out: list[str]) -> None:
        self._take_comma(out)
        self._quote = mark
        self.in_string = True
        out.append('"')

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._escape:
            return self._escaped(text, at, out)
        if self._high and text[at] != "\\":
            self._drop_high(out)
        match = _STRING_STOP[self._quote].search(text, at)
        end = match.start() if match else len(text)
        if end > at:
            chunk = text[at:end]
            out.append(chunk if self._quote == '"' else chunk.replace('"', '\\"'))
        if match is None:
            return end
        char = text[end]
        if char == "\\":
            self._escape = char
        elif char == self._quote:
            self._end_string(out)
        else:
            out.append(quote_inner(char))
        return end + 1

    def _escaped(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if self._escape == "\\":
            if char == "u":
                self._escape += char
                return at + 1
            self._drop_high(out)
            self._escape = ""
            if char not in "\"'\\/bfnrt":
                out.append("\\\\")
                return at
            out.append("'" if char == "'" else "\\" + char)
            return at + 1
        if char not in _HEX:
            self._break_escape(out)
            return at
        self._escape += char
        if len(self._escape) == 6:
            self._code_unit(out)
        return at + 1

    def _code_unit(self, out: list[str]) -> None:
        escape, self._escape = self._escape, ""
        unit = int(escape[2:], 16)
        if self._high and 0xDC00 <= unit < 0xE000:
            out.append(self._high + escape)
            self._high = ""
            return
        self._drop_high(out)
        if 0xD800 <= unit < 0xDC00:
            self._high = escape
        else:
            out.append("\\ufffd" if 0xDC00 <= unit < 0xE000 else escape)

    def _drop_high(self, out: list[str]) -> None:
        if self._high:
            out.append("\\ufffd")
            self._high = ""

    def _break_escape(self, out: list[str]) -> None:
        self._drop_high(out)
        out.append("\\" + self._escape)
        self._escape = ""

    def _end_string(self, out: list[str]) -> None:
        self._drop_high(out)
        out.append('"')
        self.in_string = False
        self._value_done()

    def _bare(self, text: str, at: int, out: list[str]) -> int:
        assert self._atom is not None
        match = _ATOM_END.search(text, at)
        end = match.start() if match else len(text)
        self._atom += text[at:end]
        if match is not None:
            self._end_atom(out)
        return end

    def _end_atom(self, out: list[str]) -> None:
        atom, self._atom = self._atom or "", None
        word = atom.rstrip(_SPACE)
        tail = atom[len(word) :]
        if self._mode == "key":
            out.append(quote(word.strip("'")))
        elif word in _WORDS:
            out.append(_WORDS[word])
        else:
            out.append(word if _NUMBER.fullmatch(word) else quote(word))
        inside = bool(self._stack)
        self._value_done()
        if inside:
            self._space(tail, out)

    def _put_value(self, value: str, out: list[str]) -> None:
        self._take_comma(out)
        out.append(value)
        self._value_done()

    def _value_done(self) -> None:
        if self._mode == "key":
            self._mode = "colon"
        elif self._stack:
            self._mode = "next"
        else:
            self.done = True

    def _end_bracket(self, char: str, out: list[str]) -> None:
        opening = "{" if char == "}" else "["
        if opening not in self._stack:
            return
        while self._stack[-1] != opening:
            self._close_container(out)
        self._close_container(out)

    def _close_container(self, out: list[str]) -> None:
        opening = self._stack.pop()
        if opening == "{":
            if self._mode == "colon":
                out.append(": null")
            elif self._mode == "value":
                out.append("null")
            out.append("}")
        else:
            out.append("]")
        self._comma = ""
        self._mode = "value"
        self._value_done()


class StringField:
    """Picks the text of one string property out of a streamed JSON object, decoded."""

    __slots__ = ("_depth", "_escape", "_high", "_in_string", "_key", "_keys", "_name", "_reading")

    def __init__(self, name: str) -> None:
        self._name = name
        self._depth = 0
        self._in_string = False
        self._escape = ""
        self._key = ""
        self._keys = True
        self._reading = False
        self._high = ""

    def feed(self, text: str) -> str:
        """Take the next piece of valid JSON; returns the decoded text of the property in it."""
        out: list[str] = []
        for char in text:
            if self._in_string:
                piece = self._in(char)
                if piece and self._reading:
                    out.append(piece)
                elif piece and self._keys and self._depth == 1:
                    self._key += piece
            elif char == '"':
                self._in_string = True
                self._reading = self._depth == 1 and not self._keys and self._key == self._name
                if self._keys and self._depth == 1:
                    self._key = ""
            elif char in "{[":
                self._depth += 1
                self._keys = char == "{"
            elif char in "}]":
                self._depth -= 1
                self._keys = False
            elif char == ":":
                self._keys = False
            elif char == "," and self._depth == 1:
                self._keys = True
        return "".join(out)

    def _in(self, char: str) -> str:
        if self._escape:
            self._escape += char
            if self._escape[1] == "u" and len(self._escape) < 6:
                return ""
            escape, self._escape = self._escape, ""
            if escape[1] == "u" and 0xD800 <= int(escape[2:], 16) < 0xDC00:
                self._high = escape
                return ""
            escape, self._high = self._high + escape, ""
            return json.loads(f'"{escape}"')
        if char == "\\":
            self._escape = char
            return ""
        if char == '"':
            self._in_string = False
            return ""
        return char
