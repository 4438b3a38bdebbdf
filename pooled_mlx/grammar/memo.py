"""A bounded memory for grammars and for what they were made of."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

_Thing = TypeVar("_Thing")


class Memo:
    """A bounded memory, least recently used out first: at most `entries` values of `weight` in total. Thread-safe."""

    def __init__(self, entries: int, weight: int) -> None:
        self._entries, self._weight = entries, weight
        self._held = 0
        self._values: OrderedDict[bytes, tuple[object, int]] = OrderedDict()
        self._digests: OrderedDict[int, tuple[object, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> object | None:
        """The value of `key`, None where there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def digest_of(self, thing: _Thing, compute: Callable[[_Thing], bytes]) -> bytes:
        """`compute(thing)`, remembered for this very object: it must never change. Held alive while remembered."""
        with self._lock:
            known = self._digests.get(id(thing))
            if known is not None and known[0] is thing:
                self._digests.move_to_end(id(thing))
                return known[1]
        digest = compute(thing)
        with self._lock:
            self._digests[id(thing)] = (thing, digest)
            while len(self._digests) > self._entries:
                self._digests.popitem(last=False)
        return digest

    def put(self, key: bytes, value: object, weight: int) -> None:
        """Remember `value`; a key that is known keeps what it has."""
        with self._lock:
            if key in self._values:
                return
            self._values[key] = (value, weight)
            self._held += weight
            while len(self._values) > self._entries or (self._held > self._weight and len(self._values) > 1):
                self._held -= self._values.popitem(last=False)[1][1]
