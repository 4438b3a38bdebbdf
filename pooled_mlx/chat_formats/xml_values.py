"""Where a value written as bare text ends in Qwen's XML: the one rule that reader and grammar share.

A value ends at `</parameter>`, when what follows, after whitespace, is a parameter that is declared and not yet given, or the
end of the function with the closing tag of the call. Anything else is content.
"""

from __future__ import annotations

from typing import Literal

from pooled_mlx.chat_formats.tagged import unquoted
from pooled_mlx.text.event_writer import SPACE

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

LONGEST_SPACE = 64
"""Whitespace that may stand between two tags of a call."""

_LONGEST_MISSPELLING = 24
_LONGEST_NAME = 256

Match = tuple[Literal["no", "more", "end", "close"], int]
"""A possible end of a value: it is none; more text decides; it is one if the call's closing tag comes next; it is one, and
what follows the closing tag of the value begins at this index."""


class ValueEnd:
    """Recognises the end of a value. Not `constrained`, a missing or misspelt closing tag counts too, under the same
    condition. `bare`: the call has no tags of its own, so the end of the function alone ends it.
    """

    def __init__(self, constrained: bool, bare: bool) -> None:
        self._constrained = constrained
        self._bare = bare

    def match(self, text: str, at: int, at_line_start: bool, names: frozenset[str] | None) -> Match:
        """Whether a value ends at `at`, where a newline or a `<` stands.

        `at_line_start` tells of the start of `text`; `names` are the parameters that may follow, None for any.
        """
        line_start = text[at] == "\n"
        tag = at + 1 if line_start else at
        if not line_start:
            line_start = text[at - 1] == "\n" if at else at_line_start
        if text.startswith(END_PARAMETER, tag):
            found = self._follows(text, tag + len(END_PARAMETER), names)
            if found[0] != "no" or self._constrained:
                return found
        if self._constrained:
            return _may_come(text, tag, (END_PARAMETER,))
        if text.startswith(END_PARAMETER[:-1], tag):
            return self._misspelt(text, tag + len(END_PARAMETER) - 1, names)
        if text.startswith(END_FUNCTION, tag) or (line_start and text.startswith(PARAMETER, tag)):
            found = self._follows(text, tag, names)
            return ("close", tag) if found[0] == "close" else found
        marks = (END_PARAMETER, END_FUNCTION, PARAMETER) if line_start else (END_PARAMETER, END_FUNCTION)
        return _may_come(text, tag, marks)

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
        tag = _after_space(text, at)
        if tag is None:
            return "no", 0
        if tag == len(text):
            return ("more" if self._constrained else "end"), 0
        if text.startswith(PARAMETER, tag):
            name, found, _ = text[tag + len(PARAMETER) : tag + len(PARAMETER) + _LONGEST_NAME + 1].partition(">")
            if found:
                known = names is None or name in names or (not self._constrained and unquoted(name) in names)
                return ("close", at) if "\n" not in name and known else ("no", 0)
            start = name if self._constrained else name.lstrip("\"'")
            possible = names is None or any(known.startswith(start.rstrip("\"'")) for known in names)
            return ("more" if possible and "\n" not in name and len(name) <= _LONGEST_NAME else "no"), 0
        if text.startswith(END_FUNCTION, tag):
            if self._bare:
                return "close", at
            end = _after_space(text, tag + len(END_FUNCTION))
            return ("end" if end == len(text) else "no"), 0
        return _may_come(text, tag, (PARAMETER, END_FUNCTION))


def _after_space(text: str, at: int) -> int | None:
    """The index behind the whitespace at `at`; None where there is more of it than a frame ever has."""
    end = at
    while end < len(text) and text[end] in SPACE:
        end += 1
    return end if end - at <= LONGEST_SPACE else None


def _may_come(text: str, at: int, tags: tuple[str, ...]) -> Match:
    """Gives "more" where one of `tags` may still come to stand at `at`."""
    rest = text[at : at + 16]
    return ("more" if any(tag.startswith(rest) for tag in tags) else "no"), 0
