"""Where a value written as bare text ends in calls of XML tags: the one rule that reader and grammar share.

A value ends at its closing tag, when what follows, after whitespace, is a parameter that is declared and not yet given, or the
end of the function with what may stand behind it: the closing tag of the call, or another function where one call may hold
several. Anything else is content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pooled_mlx.chat_formats.tagged import END_THINK, THINK, unquoted
from pooled_mlx.text.event_writer import SPACE

LONGEST_SPACE = 64
"""Whitespace that may stand between two tags of a call."""

_LONGEST_MISSPELLING = 24
_LONGEST_NAME = 256
_QUOTED = re.compile(r"""["']?([^"']*)["']?(?:\s+string=["']?(true|false)["']?)?""")


@dataclass(frozen=True, slots=True)
class Notation:
    """The tags of one family.

    `function` and `parameter` are opening tags up to the name. `quoted`: the name stands in quotes; `typed`: behind it an
    attribute tells whether the value is a string. `frame` stands inside a parameter's tags and belongs to no value.
    `several`: one call may hold several functions. `mark` is a part of every tag that may be a token of its own.
    """

    call: str = "<tool_call>"
    end_call: str = "</tool_call>"
    function: str = "<function="
    end_function: str = "</function>"
    parameter: str = "<parameter="
    end_parameter: str = "</parameter>"
    frame: str = "\n"
    quoted: bool = False
    typed: bool = False
    several: bool = False
    mark: str = ""
    think_tags: tuple[str, str] = (THINK, END_THINK)
    gap: str = "\n\n"

    def name(self, text: str) -> str:
        """The name in what stands between `function` or `parameter` and the end of the tag."""
        found = _QUOTED.match(text.strip(SPACE)) if self.quoted else None
        return found[1] if found else text.strip(SPACE)

    def is_text(self, text: str) -> bool | None:
        """What an opening tag of a parameter says of its value: a string, another type, or nothing."""
        found = _QUOTED.match(text.strip(SPACE)) if self.typed else None
        return None if found is None or found[2] is None else found[2] == "true"

    def opening(self, tag: str, name: str, *, text: bool = True) -> str:
        """The opening tag `tag` of `name`; `text`: its value is a string."""
        if not self.quoted:
            return f"{tag}{name}>"
        return f'{tag}"{name}"' + (f' string="{str(text).lower()}"' if self.typed and tag == self.parameter else "") + ">"


Match = tuple[Literal["no", "more", "end", "close"], int]
"""A possible end of a value: it is none; more text decides; it is one if the call's closing tag comes next; it is one, and
what follows the closing tag of the value begins at this index."""


class ValueEnd:
    """Recognises the end of a value. Not `constrained`, a missing or misspelt closing tag counts too, under the same
    condition. `bare`: the call has no tags of its own, so the end of the function alone ends it.
    """

    def __init__(self, notation: Notation, constrained: bool, bare: bool) -> None:
        self._notation = notation
        self._constrained = constrained
        self._bare = bare

    def match(self, text: str, at: int, at_line_start: bool, names: frozenset[str] | None) -> Match:
        """Whether a value ends at `at`, where a newline or a `<` stands.

        `at_line_start` tells of the start of `text`; `names` are the parameters that may follow, None for any.
        """
        notation = self._notation
        line_start = text[at] == "\n"
        tag = at + 1 if line_start else at
        framed = bool(notation.frame) or not line_start  # else the newline belongs to the value, unless its end was forgotten
        if not line_start:
            line_start = text[at - 1] == "\n" if at else at_line_start
        if framed and text.startswith(notation.end_parameter, tag):
            found = self._follows(text, tag + len(notation.end_parameter), names)
            if found[0] != "no" or self._constrained:
                return found
        if self._constrained:
            return _may_come(text, tag, (notation.end_parameter,))
        if framed and text.startswith(notation.end_parameter[:-1], tag):
            return self._misspelt(text, tag + len(notation.end_parameter) - 1, names)
        if text.startswith(notation.end_function, tag) or (line_start and text.startswith(notation.parameter, tag)):
            found = self._follows(text, tag, names)
            return ("close", tag) if found[0] == "close" else found
        marks = (notation.end_parameter, notation.end_function) if framed else (notation.end_function,)
        return _may_come(text, tag, (*marks, notation.parameter) if line_start else marks)

    def _misspelt(self, text: str, at: int, names: frozenset[str] | None) -> Match:
        """`at` stands behind `</parameter`: whatever ends the misspelt tag must be followed as a proper one."""
        for end in range(at, min(len(text), at + _LONGEST_MISSPELLING + 1)):
            if text[end] in ">\n":
                return self._follows(text, end + (text[end] == ">"), names)
            if text[end] == "<":
                return self._follows(text, end, names)
        return ("more", 0) if len(text) - at <= _LONGEST_MISSPELLING else ("no", 0)

    def _follows(self, text: str, at: int, names: frozenset[str] | None) -> Match:
        """Whether what stands at `at`, behind a closing tag, makes it one."""
        notation = self._notation
        tag = _after_space(text, at)
        if tag is None:
            return "no", 0
        if tag == len(text):
            return ("more" if self._constrained else "end"), 0
        if text.startswith(notation.parameter, tag):
            start = tag + len(notation.parameter)
            name, found, _ = text[start : start + _LONGEST_NAME + 1].partition(">")
            if found:
                given = notation.name(name)
                known = names is None or given in names or (not self._constrained and unquoted(given) in names)
                return ("close", at) if "\n" not in name and known else ("no", 0)
            begun = name if self._constrained and not notation.quoted else name.lstrip("\"'")
            begun = re.split("[\"']", begun, maxsplit=1)[0] if notation.quoted else begun.rstrip("\"'")
            possible = names is None or any(known.startswith(begun) for known in names)
            return ("more" if possible and "\n" not in name and len(name) <= _LONGEST_NAME else "no"), 0
        if text.startswith(notation.end_function, tag):
            if self._bare:
                return "close", at
            end = _after_space(text, tag + len(notation.end_function))
            if end is None or end == len(text):
                return ("no" if end is None else "end"), 0
            if notation.several and text.startswith(notation.function, end):
                return "close", at
            return _may_come(text, end, (notation.function,)) if notation.several else ("no", 0)
        return _may_come(text, tag, (notation.parameter, notation.end_function))


def _after_space(text: str, at: int) -> int | None:
    """The index behind the whitespace at `at`; None where there is more of it than a frame ever has."""
    end = at
    while end < len(text) and text[end] in SPACE:
        end += 1
    return end if end - at <= LONGEST_SPACE else None


def _may_come(text: str, at: int, tags: tuple[str, ...]) -> Match:
    """Gives "more" where one of `tags` may still come to stand at `at`."""
    rest = text[at : at + 32]
    return ("more" if any(tag.startswith(rest) for tag in tags) else "no"), 0
