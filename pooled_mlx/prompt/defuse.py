"""Client text never becomes a control token.

Text of a client that is, or could be completed to, the text of a control token goes through the chat template with private-use
characters in its place. What the rendered text then holds of control tokens was written by the template alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pooled_mlx.prompt.tokens import Tokens, alternation

_FIRST_STAND_IN = 0xE000
_LAST_STAND_IN = 0xF8FF
_STAND_IN = re.compile(r"[\ue000-\uf8ff]|\\u(?:e[0-9a-f]|f[0-8])[0-9a-f]{2}", re.IGNORECASE)


class ControlText:
    """What makes a text dangerous, for one vocabulary and template. Immutable."""

    def __init__(self, tokens: Tokens, template_source: str) -> None:
        texts = list(tokens.control)
        self.pattern = tokens.control_pattern
        self.template_stand_ins = frozenset(_stand_ins(template_source))
        self._longest = max(map(len, texts), default=0)
        self._texts = frozenset(texts)
        self._starts = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._ends = frozenset(text[length:] for text in texts for length in range(1, len(text)))
        self._all = "\n".join(texts)

    def is_clean(self, text: str) -> bool:
        """Whether a template can write `text` anywhere without a control token coming out."""
        return self.pattern.search(text) is None and not self.edges(text)

    def is_clean_name(self, name: str) -> bool:
        """As `is_clean`, for a name that a template may put between brackets of its own (`<name>`)."""
        return name not in self._all and self.is_clean(name)

    def edges(self, text: str) -> list[int]:
        """Indices of the characters to hide so that neither end of `text` can be completed to a control token."""
        found: list[int] = []
        stripped = text.rstrip()
        tail = stripped[-self._longest :]
        for place in range(len(tail)):
            if tail[place:] in self._starts:
                found.append(len(stripped) - len(tail) + place)
        lead = len(text) - len(text.lstrip())
        head = text[lead : lead + self._longest]
        for length in range(1, len(head) + 1):
            if head[:length] in self._ends:
                found.append(lead + length - 1)
        return found


class Disguise:
    """The stand-ins of one request. Not thread-safe.

    `strings` are all client texts of the request: a stand-in is a character that none of them holds.
    """

    def __init__(self, control: ControlText, strings: Iterable[str]) -> None:
        self._control = control
        self._taken = set(control.template_stand_ins)
        for text in strings:
            self._taken.update(_stand_ins(text))
        self._next = _FIRST_STAND_IN
        self._hidden = _Way()
        self._tags = _Way()

    def hide(self, text: str) -> str:
        """Client text with everything dangerous replaced."""
        text = self._control.pattern.sub(lambda match: self._stand_in(self._hidden, match[0]), text)
        return self._hide_at(text, self._control.edges(text))

    def hide_name(self, name: str) -> str:
        """`hide` for a name that a template may put between brackets of its own."""
        if self._control.is_clean_name(name) or not name:
            return name
        hidden = self.hide(name)
        return hidden if hidden != name else self._hide_at(name, [0])

    def hide_value(self, value: Any) -> Any:
        """`hide` for every string and key in a JSON value."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self.hide(str(key)): self.hide_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide_value(item) for item in value]
        return value

    def hide_schema(self, value: Any) -> Any:
        """`hide_value` for a JSON schema, the names of its properties hidden as names wherever they stand."""
        if isinstance(value, Mapping):
            hidden: dict[str, Any] = {}
            for key, item in value.items():
                if key == "properties" and isinstance(item, Mapping):
                    hidden[key] = {self.hide_name(str(name)): self.hide_schema(inner) for name, inner in item.items()}
                elif key == "required" and isinstance(item, list):
                    hidden[key] = [self.hide_name(name) if isinstance(name, str) else name for name in item]
                else:
                    hidden[self.hide(str(key))] = self.hide_schema(item)
            return hidden
        if isinstance(value, list | tuple):
            return [self.hide_schema(item) for item in value]
        return self.hide(value) if isinstance(value, str) else value

    def tag(self, text: str) -> str:
        """Text of our own whose control tokens shall be control tokens, in a form that no template looks into."""
        return self._control.pattern.sub(lambda match: self._stand_in(self._tags, match[0]), text)

    def show_tags(self, rendered: str) -> str:
        """The rendered text with our own control tokens in place."""
        return self._tags.back(rendered)

    def show(self, piece: str) -> str:
        """A piece of the rendered text as the client wrote it."""
        return self._hidden.back(piece)

    def _hide_at(self, text: str, places: list[int]) -> str:
        if not places:
            return text
        characters = list(text)
        for place in places:
            if not _FIRST_STAND_IN <= ord(characters[place]) <= _LAST_STAND_IN:
                characters[place] = self._stand_in(self._hidden, characters[place])
        return "".join(characters)

    def _stand_in(self, way: _Way, text: str) -> str:
        known = way.known
        if text not in known:
            while chr(self._next) in self._taken:
                self._next += 1
            known[text] = chr(self._next)
            self._next += 1
        return known[text]


class _Way:
    """Stand-ins and what they stand for; nothing is added once `back` was called."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._both: dict[str, str] | None = None
        self._pattern: re.Pattern[str] | None = None

    def back(self, text: str) -> str:
        """Text with the originals in place."""
        if not self.known:
            return text
        if self._both is None or self._pattern is None:
            self._both = {stand_in: original for original, stand_in in self.known.items()}
            # A template may have written JSON with ASCII only: then the stand-in comes back as an escape.
            self._both |= {json.dumps(stand_in)[1:-1]: json.dumps(original)[1:-1] for original, stand_in in self.known.items()}
            self._pattern = alternation(self._both)
        both = self._both
        return self._pattern.sub(lambda match: both[match[0]], text)


def _stand_ins(text: str) -> set[str]:
    return {match if len(match) == 1 else chr(int(match[2:], 16)) for match in _STAND_IN.findall(text)}


def strings_in(value: Any) -> Iterable[str]:
    """Every string and key in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def property_names(value: Any) -> Iterable[str]:
    """The names of all properties in a JSON schema."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "properties" and isinstance(item, Mapping):
                yield from map(str, item)
                for inner in item.values():
                    yield from property_names(inner)
            else:
                yield from property_names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from property_names(item)
