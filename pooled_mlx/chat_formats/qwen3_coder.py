"""Qwen XML calls: `<function=name>` with one `<parameter=name>` block for each argument (Qwen3-Coder, Qwen3.5 to 3.8)."""

from __future__ import annotations

import re
from typing import Literal

from pooled_mlx.chat_formats.arguments import ArgumentsWriter
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Step, TaggedParser
from pooled_mlx.core.request import Tool
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_LONGEST_SPACE = 64
_LONGEST_MISSPELLING = 24
_CANDIDATE = re.compile(r"\n|<")
_REMAINS = re.compile(r"(?:</para[^<>\n]{0,32}>?\s*)?(?:</func[^<>\n]{0,32}>?\s*)?$")
_STILL_OPEN = re.compile(r"</parameter>\s*<(?:parameter=|/function>)")

Match = tuple[Literal["no", "more", "end", "close"], int]
"""A possible close of a value: it is none; more text decides; it is one if the call's closing tag comes next; it is one, and
what follows the closing tag begins at this index."""


class QwenXmlReader:
    """Reads one call.

    Where a value ends: at `</parameter>`, when what follows is a parameter that is declared and not yet given, or the end of
    the function with the real closing tag of the call. Anything else that looks like a tag is content. One newline after the
    opening and one before the closing tag belong to the frame. Without a grammar, a missing or misspelt closing tag counts
    too, under the same condition.
    """

    def __init__(self, setup: ParserSetup, calls: Calls, bare: bool) -> None:
        self._writer = setup.writer
        self._constrained = setup.constrained
        self._calls = calls
        self._bare = bare
        self._mode = "name" if bare else "start"
        self._raw: list[str] = []
        self._buffer = ""
        self._tool: Tool | None = None
        self._arguments: ArgumentsWriter | None = None
        self._at_line_start = True
        self._match: Match = ("no", 0)

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._arguments is not None

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if self._arguments is None:
            self._raw.append(text)
        self._buffer += text
        while self._advance():
            if self._mode == "rejected":
                return "rejected", "".join(self._raw)
            if self._mode == "done":
                return "done", self._buffer
        return "open", ""

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """Inside a value a closing tag counts at once only behind the end of the function."""
        if self._mode != "value" or (token and self._constrained):
            return "yes"
        if token:
            return "maybe"
        return "yes" if self._match[0] == "end" else "no"

    @property
    def in_value(self) -> bool:
        """True inside a parameter's value, before anything that may end it."""
        return self._mode == "value" and self._match[0] != "end"

    def refutes(self, text: str) -> bool:
        """A proper end of a parameter after the tag shows that the tag was content."""
        return _STILL_OPEN.search(text) is not None

    def close(self) -> Step:
        """Complete the call with what there is."""
        if self._arguments is None:
            return "rejected", "".join(self._raw)
        if self._mode == "value":
            text = self._buffer
            remains = _REMAINS.search(text)
            if remains is not None:
                text = text[: remains.start()]
            self._content(text.removesuffix("\n"))
        if self._mode in ("value", "frame"):
            self._arguments.end()
        self._end()
        return "done", ""

    def _advance(self) -> bool:
        """One step over the buffer; False when it needs more text."""
        if self._mode == "value":
            return self._value()
        if self._mode == "frame":
            return self._frame()
        if self._mode == "name":
            return self._name()
        self._buffer = self._buffer.lstrip(SPACE)
        text = self._buffer
        if not text:
            return False
        if self._mode == "start":
            return self._opening(FUNCTION, "name") or self._reject_unless(FUNCTION.startswith(text))
        if self._mode == "confirm":
            if text.startswith((PARAMETER, END_FUNCTION)):
                return self._commit()
            return self._reject_unless(PARAMETER.startswith(text) or END_FUNCTION.startswith(text))
        return self._between(text)

    def _opening(self, tag: str, mode: str) -> bool:
        if not self._buffer.startswith(tag):
            return False
        self._buffer = self._buffer[len(tag) :]
        self._mode = mode
        return True

    def _reject_unless(self, possible: bool) -> bool:
        if not possible:
            self._mode = "rejected"
        return not possible

    def _name(self) -> bool:
        name, found, rest = self._buffer.partition(">")
        if not found or "\n" in name:
            return self._reject_unless("\n" not in name and len(name) < 256)
        self._tool = self._calls.find(name.strip(SPACE))
        if self._tool is None:
            return self._reject_unless(False)
        self._buffer = rest
        self._mode = "confirm"
        return True if self._bare else self._commit()

    def _commit(self) -> bool:
        assert self._tool is not None
        self._writer.call_start(self._tool)
        self._arguments = ArgumentsWriter(self._writer, self._tool, self._constrained)
        self._raw.clear()
        self._mode = "between"
        return True

    def _between(self, text: str) -> bool:
        """Between two parameters: the next one, the end of the function, or remains of a mistake, which are dropped."""
        assert self._arguments is not None
        if text.startswith(PARAMETER):
            name, found, rest = text[len(PARAMETER) :].partition(">")
            if not found and "\n" not in name and len(name) < 256:
                return False
            if found and "\n" not in name:
                self._arguments.begin(name.strip(SPACE))
                self._buffer, self._mode = rest, "frame"
                return True
        elif text.startswith(END_FUNCTION):
            self._buffer = text[len(END_FUNCTION) :]
            self._end()
            self._mode = "done"
            return True
        elif any(tag.startswith(text) for tag in (PARAMETER, END_FUNCTION, END_PARAMETER)):
            return False
        following = text.find("<", 1)
        if not text.startswith(END_PARAMETER):
            self._writer.note("text between parameters was dropped")
        elif following < 0 or following > len(END_PARAMETER):
            following = len(END_PARAMETER)
        self._buffer = text[following:] if following >= 0 else ""
        return True

    def _frame(self) -> bool:
        """The newline after a parameter's opening tag."""
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._mode = "value"
        self._at_line_start = True
        self._match = ("no", 0)
        return True

    def _value(self) -> bool:
        assert self._arguments is not None
        if self._arguments.streaming_json:
            used = self._arguments.take_json(self._buffer)
            if used is None:
                self._buffer = ""
                return False
            self._arguments.end()
            self._buffer, self._mode = self._buffer[used:], "between"
            return True
        text, at = self._buffer, 0
        while True:
            found = _CANDIDATE.search(text, at)
            if found is None:
                self._content(text)
                self._buffer, self._match = "", ("no", 0)
                return False
            at = found.start()
            self._match = self._close_at(text, at)
            if self._match[0] == "no":
                at += 1
                continue
            self._content(text[:at])
            if self._match[0] == "close":
                self._arguments.end()
                self._buffer, self._mode = text[self._match[1] :], "between"
                return True
            self._buffer = text[at:]
            return False

    def _content(self, text: str) -> None:
        assert self._arguments is not None
        if text:
            self._at_line_start = text[-1] == "\n"
            self._arguments.add(text)

    def _close_at(self, text: str, at: int) -> Match:
        """Whether a value ends at `at`, where a newline or a `<` stands."""
        line_start = text[at] == "\n"
        tag = at + 1 if line_start else at
        if not line_start:
            line_start = text[at - 1] == "\n" if at else self._at_line_start
        if text.startswith(END_PARAMETER, tag):
            found = self._follows(text, tag + len(END_PARAMETER))
            if found[0] != "no" or self._constrained:
                return found
        if self._constrained:
            return _may_come(text, tag, (END_PARAMETER,))
        if text.startswith(END_PARAMETER[:-1], tag):
            return self._misspelt(text, tag + len(END_PARAMETER) - 1)
        if text.startswith(END_FUNCTION, tag) or (line_start and text.startswith(PARAMETER, tag)):
            found = self._follows(text, tag)
            return ("close", tag) if found[0] == "close" else found
        marks = (END_PARAMETER, END_FUNCTION, PARAMETER) if line_start else (END_PARAMETER, END_FUNCTION)
        return _may_come(text, tag, marks)

    def _misspelt(self, text: str, at: int) -> Match:
        """`at` stands behind `</parameter`: whatever ends the misspelt tag must be followed as a proper one."""
        for end in range(at, min(len(text), at + _LONGEST_MISSPELLING + 1)):
            if text[end] in ">\n":
                return self._follows(text, end + (text[end] == ">"))
            if text[end] == "<":
                return self._follows(text, end)
        return ("more", 0) if len(text) - at <= _LONGEST_MISSPELLING else ("no", 0)

    def _follows(self, text: str, at: int) -> Match:
        """Whether what stands at `at`, behind a closing tag, makes it one."""
        assert self._arguments is not None
        tag = _after_space(text, at)
        if tag is None:
            return "no", 0
        if tag == len(text):
            return ("more" if self._constrained else "end"), 0
        names = self._arguments.open_names
        if text.startswith(PARAMETER, tag):
            name, found, _ = text[tag + len(PARAMETER) : tag + len(PARAMETER) + 257].partition(">")
            if found:
                return ("close", at) if "\n" not in name and (names is None or name in names) else ("no", 0)
            possible = names is None or any(known.startswith(name) for known in names)
            return ("more" if possible and "\n" not in name and len(name) < 257 else "no"), 0
        if text.startswith(END_FUNCTION, tag):
            if self._bare:
                return "close", at
            end = _after_space(text, tag + len(END_FUNCTION))
            return ("end" if end == len(text) else "no"), 0
        return _may_come(text, tag, (PARAMETER, END_FUNCTION))

    def _end(self) -> None:
        assert self._arguments is not None
        self._arguments.finish()
        self._writer.call_end()


def _after_space(text: str, at: int) -> int | None:
    """The index behind the whitespace at `at`; None where there is more of it than a frame ever has."""
    end = at
    while end < len(text) and text[end] in SPACE:
        end += 1
    return end if end - at <= _LONGEST_SPACE else None


def _may_come(text: str, at: int, tags: tuple[str, ...]) -> Match:
    """ "more" where one of `tags` may still come to stand at `at`."""
    rest = text[at : at + 16]
    return ("more" if any(tag.startswith(rest) for tag in tags) else "no"), 0


class Qwen3Coder:
    """Calls in Qwen's XML between `<tool_call>` tags, thinking between `<think>` tags."""

    tags = frozenset({THINK, END_THINK, CALL, END_CALL})

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write `<function=` and `<parameter=`."""
        return 3 if FUNCTION in template_text and PARAMETER in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return QwenXmlReader(setup, calls, bare)

        return TaggedParser(setup, call_tags=(CALL, END_CALL), reader=reader, bare=FUNCTION)


FORMAT = Qwen3Coder()
