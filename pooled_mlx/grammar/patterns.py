"""Regular expressions of JSON schema (ECMA 262) in the dialect of the grammar engine (Rust's regex syntax).

The two look alike and differ silently: `[[a]` is a set of two characters in one and a nested set in the other, `.` stops at
different characters, `\\<` is a letter or a word boundary. So a pattern is read as ECMA 262 and written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

MAX_PATTERN_LENGTH = 4_000
MAX_REPEAT_PRODUCT = 100_000

_SPARE = 0x1F
"""The engine (1.9) gets one thing wrong inside JSON strings: a set that holds all control characters but lacks the quotation
mark or the backslash accepts them all the same. Such sets lose one control character that no text uses."""

_WILDCARD = r"[^\n\r\x{2028}\x{2029}]"
_ANY = r"(?s:.)"
_NOTHING = r"[^\s\S]"
_SPACE = r"\t-\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_ODD_SPACE = r"\x{1C}-\x{1F}\x{85}"
"""Characters that are space to others (Unicode, Python) and not to ECMA 262: neither `\\s` nor `\\S` takes them."""

_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACE}]",
    "S": f"[^{_SPACE}{_ODD_SPACE}]",
}
_EXCLUDED = {"s": f"[{_SPACE}{_ODD_SPACE}]", "S": f"[^{_SPACE}]"}
"""The same inside a set that excludes them."""

_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_QUANTIFIER = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_FLAGS = re.compile(r"\?[ims]*(?:-[ims]+)?:|\?[ims]+\)")
_NAME = re.compile(r"\?P?<([A-Za-z_][0-9A-Za-z_]*)>")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")


class PatternError(Exception):
    """A pattern that cannot be used.

    `broken`: it is no regular expression. `over_limit`: it is larger than a cap. Otherwise it is one that no grammar can hold.
    """

    def __init__(self, why: str, *, broken: bool = False, over_limit: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.broken = broken
        self.over_limit = over_limit


@lru_cache(maxsize=1024)
def translate(pattern: str) -> str:
    """`pattern` in the engine's dialect, unanchored as before. Raises `PatternError`."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(f"the pattern has {len(pattern)} characters (limit {MAX_PATTERN_LENGTH})", over_limit=True)
    translated = _Translation(pattern).run()
    if translated.guarded and translated.spare_used:
        translated = _Translation(pattern, without_spare=True).run()
    if translated.repeats > MAX_REPEAT_PRODUCT:
        raise PatternError(
            f"the pattern's counted repeats multiply to {translated.repeats} (limit {MAX_REPEAT_PRODUCT})", over_limit=True
        )
    return "".join(translated.out)


class _Translation:
    """One pass over a pattern. `repeats` is the largest product of nested counted repeats.

    `guarded`: a set lost the spare character. `spare_used`: another part has it, and the engine joins alternatives into one
    set; `without_spare` takes it from there too.
    """

    def __init__(self, pattern: str, *, without_spare: bool = False) -> None:
        self.pattern = pattern
        self.guarded = False
        self.spare_used = False
        self._without_spare = without_spare
        self._negated = False
        self.at = 0
        self.out: list[str] = []
        self.repeats = 1
        # one frame per open group: [product inside it, product of the atom just read]
        self._frames: list[list[int]] = [[1, 0]]

    def run(self) -> _Translation:
        while self.at < len(self.pattern):
            self._item(self.pattern[self.at])
        if len(self._frames) > 1:
            raise PatternError("a group of the pattern is not closed", broken=True)
        self.repeats = self._frames[0][0]
        return self

    def _item(self, char: str) -> None:
        if char == "\\":
            self._atom(self._escape(inside=False))
        elif char == "[":
            self._atom(self._set())
        elif char == "(":
            self._open()
        elif char == ")":
            self._close()
        elif char == ".":
            self.at += 1
            self._atom(_WILDCARD)
        elif char in "*+?":
            self.at += 1
            self._quantify(char, 1)
        elif char == "{" and (counted := _QUANTIFIER.match(self.pattern, self.at)):
            self.at = counted.end()
            low, high = int(counted[1]), int(counted[3]) if counted[3] else int(counted[1])
            if counted[2] and counted[3] and high < low:
                raise PatternError(f"the repeat {counted[0]} is out of order", broken=True)
            self._quantify(counted[0], max(low, high, 1))
        elif char in "^$|":
            self.at += 1
            self.out.append(char)
            self._frames[-1][1] = 0
        else:
            self.at += 1
            self._atom(self._one(ord(char)))

    def _one(self, code: int) -> str:
        """A single character outside of sets."""
        if code == _SPARE:
            self.spare_used = True
            if self._without_spare:
                return _NOTHING
        return code_point(code)

    def _atom(self, text: str) -> None:
        self.out.append(text)
        self._frames[-1][1] = 1

    def _quantify(self, text: str, count: int) -> None:
        frame = self._frames[-1]
        if not frame[1]:
            raise PatternError(f"nothing to repeat before {text!r}", broken=True)
        if self.pattern.startswith("?", self.at):
            self.at += 1
        elif self.pattern.startswith(("*", "+"), self.at):
            raise PatternError(f"two repeats in a row at {self.at}", broken=True)
        frame[1] *= count
        frame[0] = max(frame[0], frame[1])
        self.out.append(text)

    def _open(self) -> None:
        self.at += 1
        rest = self.pattern[self.at : self.at + 3]
        if rest.startswith(("?=", "?!", "?<=", "?<!")):
            raise PatternError("look-around is not supported")
        if named := _NAME.match(self.pattern, self.at):
            self.at = named.end()
            self.out.append("(?:")
        elif flags := _FLAGS.match(self.pattern, self.at):
            self.at = flags.end()
            self.out.append("(" + flags[0])
            if flags[0].endswith(")"):
                self._frames[-1][1] = 0
                return
        elif rest.startswith("?"):
            raise PatternError(f"unknown group ({rest}", broken=True)
        else:
            self.out.append("(?:")
        self._frames.append([1, 0])

    def _close(self) -> None:
        if len(self._frames) == 1:
            raise PatternError("a group of the pattern is closed and was never opened", broken=True)
        self.at += 1
        inside = self._frames.pop()[0]
        self.out.append(")")
        frame = self._frames[-1]
        frame[1] = inside
        frame[0] = max(frame[0], inside)

    def _escape(self, *, inside: bool) -> str:
        self.at += 1
        char = self.pattern[self.at : self.at + 1]
        if not char:
            raise PatternError("the pattern ends with a backslash", broken=True)
        self.at += 1
        if char in _CLASSES:
            return _EXCLUDED.get(char, _CLASSES[char]) if inside and self._negated else _CLASSES[char]
        if char in "pP":
            named = _PROPERTY.match(self.pattern, self.at - 1)
            if named is None:
                raise PatternError(f"\\{char} needs a property name in braces", broken=True)
            self.at = named.end()
            return "\\" + named[0] if inside else self._guard(f"[\\{named[0]}]")
        if char in "123456789k" and not inside:
            raise PatternError("references to groups are not supported")
        if char in "bB" and not inside:
            raise PatternError("word boundaries are not supported")
        code = self._code(char, inside)
        return code_point(code) if inside else self._one(code)

    def _code(self, char: str, inside: bool) -> int:
        """The character that an escape stands for; `self.at` is behind `char`."""
        if char == "b" and inside:
            return 0x08
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "c":
            letter = self._take(r"[A-Za-z]", "\\c needs a letter")
            return ord(letter) % 32
        if char == "x":
            return int(self._take(r"[0-9A-Fa-f]{2}", "\\x needs two hex digits"), 16)
        if char == "u":
            return self._unicode()
        if char.isascii() and char.isalnum():
            raise PatternError(f"unknown escape \\{char}", broken=True)
        return ord(char)

    def _unicode(self) -> int:
        if self.pattern.startswith("{", self.at):
            value = int(self._take(r"\{[0-9A-Fa-f]+\}", "\\u{ needs hex digits").strip("{}"), 16)
        else:
            value = int(self._take(r"[0-9A-Fa-f]{4}", "\\u needs four hex digits"), 16)
            if 0xD800 <= value < 0xDC00 and re.match(r"\\u[dD][c-fC-F]", self.pattern[self.at : self.at + 4]):
                self.at += 2
                low = int(self._take(r"[0-9A-Fa-f]{4}", "\\u needs four hex digits"), 16)
                value = 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise PatternError(f"U+{value:04X} is no character", broken=True)
        return value

    def _take(self, form: str, complaint: str) -> str:
        found = re.compile(form).match(self.pattern, self.at)
        if found is None:
            raise PatternError(complaint, broken=True)
        self.at = found.end()
        return found[0]

    def _guard(self, found: str) -> str:
        """A set without the spare character."""
        self.guarded = True
        return f"[{found}--[{code_point(_SPARE)}]]"

    def _set(self) -> str:
        self.at += 1
        negated = self._negated = self.pattern.startswith("^", self.at)
        if negated:
            self.at += 1
        parts: list[str] = []
        held: list[_Held] = []
        while not self.pattern.startswith("]", self.at):
            part, holds = self._range()
            parts.append(part)
            held.append(holds)
        self.at += 1
        if not parts:
            return _ANY if negated else _NOTHING
        found = ("[^" if negated else "[") + "".join(parts) + "]"
        known = all(holds is not None for holds in held)

        def has(code: int) -> bool:
            return any(holds is not None and holds(code) for holds in held) != negated

        if known and has(ord('"')) and has(ord("\\")):
            return found
        if known and not has(_SPARE):
            return found
        self.spare_used |= known and not all(map(has, _CONTROL))
        if not known or all(map(has, _CONTROL)) or self._without_spare:
            return self._guard(found)
        return found

    def _range(self) -> tuple[str, _Held]:
        low, holds = self._set_item()
        if not self.pattern.startswith("-", self.at) or self.pattern.startswith("-]", self.at):
            return low, holds
        self.at += 1
        high, other = self._set_item()
        first, last = _character(low), _character(high)
        if first is None or last is None:
            return low + literal("-") + high, _any_of((holds, _equals(ord("-")), other))
        if first > last:
            raise PatternError("a range of the pattern is out of order", broken=True)
        return f"{low}-{high}", lambda code: first <= code <= last

    def _set_item(self) -> tuple[str, _Held]:
        char = self.pattern[self.at : self.at + 1]
        if not char:
            raise PatternError("a set of the pattern is not closed", broken=True)
        if char != "\\":
            self.at += 1
            return literal(char), _equals(ord(char))
        letter = self.pattern[self.at + 1 : self.at + 2]
        item = self._escape(inside=True)
        code = _character(item)
        return item, _equals(code) if code is not None else _CLASS_HOLDS.get(letter)


_Held: TypeAlias = "Callable[[int], bool] | None"
"""Whether part of a set holds a character of ASCII; None where that is not known."""

_CONTROL = [code for code in range(0x20) if code != 0x0A]


def _equals(wanted: int) -> Callable[[int], bool]:
    return lambda code: code == wanted


def _any_of(held: Sequence[_Held]) -> _Held:
    known = [holds for holds in held if holds is not None]
    return (lambda code: any(holds(code) for holds in known)) if len(known) == len(held) else None


def _is_word(code: int) -> bool:
    return chr(code).isalnum() or code == ord("_")


def _is_digit(code: int) -> bool:
    return 0x30 <= code <= 0x39


def _is_space(code: int) -> bool:
    return 0x09 <= code <= 0x0D or code == 0x20


_CLASS_HOLDS: Mapping[str, _Held] = {
    "d": _is_digit,
    "D": lambda code: not _is_digit(code),
    "w": _is_word,
    "W": lambda code: not _is_word(code),
    "s": _is_space,
    "S": lambda code: not _is_space(code) and not 0x1C <= code <= 0x1F,
}


def literal(text: str) -> str:
    """`text` as a regular expression that matches exactly it, in the engine's dialect; also valid inside a set."""
    return "".join(char if char.isascii() and char.isalnum() else code_point(ord(char)) for char in text)


def code_point(code: int) -> str:
    """One character, given as its number, in the engine's dialect."""
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def one_of(texts: Iterable[str]) -> str:
    """An anchored expression for exactly these texts."""
    return f"^(?:{'|'.join(literal(text) for text in texts)})$"


def none_of(texts: Iterable[str]) -> str:
    """An anchored expression for every text but these (the complement, written out along their tree)."""
    tree: dict[str, dict] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^(?:{_others(tree)})$"


def length(low: int, high: int | None) -> str:
    """An anchored expression for every text of `low` to `high` characters."""
    return f"^{_ANY}{{{low},{'' if high is None else high}}}$"


def _others(tree: dict[str, dict]) -> str:
    following = [char for char in tree if char]
    alternatives = [] if "" in tree else [""]
    # from here on: a character no listed text has, then anything; or a listed one, then the rest must differ
    if following:
        first = "".join(literal(char) for char in following)
        alternatives.append(f"[^{first}{code_point(_SPARE)}]{_ANY}*")
        if chr(_SPARE) not in following:
            alternatives.append(f"{code_point(_SPARE)}{_ANY}*")
        alternatives += [f"{literal(char)}(?:{_others(tree[char])})" for char in following]
    else:
        alternatives.append(f"{_ANY}+")
    return "|".join(alternatives)


def _character(item: str) -> int | None:
    """The code of a part of a set that is a single character."""
    if item.startswith("\\x{"):
        return int(item[3:-1], 16)
    return ord(item) if len(item) == 1 else None
