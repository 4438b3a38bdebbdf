"""Stop strings over a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Finds the first stop string to be completed, whatever the pieces are.

    "First" is by its end, as if the characters arrived one by one; of two that end together the longer one. Only the
    longest suffix that may still become a stop string is held back. Empty stop strings are ignored.
    """

    __slots__ = ("_held", "_longest", "_prefixes", "_stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._prefixes = frozenset(stop[:n] for stop in self._stops for n in range(1, len(stop)))
        self._longest = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; returns the text that may go out and the stop string that ends it, if one did."""
        text = self._held + text
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            self._held = ""
            return text[: found[1]], found[2]
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                self._held = text[start:]
                return text[:start], None
        self._held = ""
        return text, None

    def end(self) -> str:
        """The text still held back; nothing follows it."""
        held, self._held = self._held, ""
        return held
