"""What an answer's ids really were.

Text that is tokenized anew often gives other ids than those that were sampled, and clients send tool calls back in another
serialisation. This map leads from (ids of the history, meaning of the answer) to the sampled ids, so that a resent answer is
rendered as it was generated and the cache behind it stays valid.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pooled_mlx.core.request import ToolCall

Ids = np.ndarray[Any, np.dtype[np.uint32]]

_ENTRY_BYTES = 400
"""What Python's own objects add to one entry, reckoned."""
_MOST_VARIANTS = 4
_EXACT_INTEGERS = 2**53


def as_ids(ids: Sequence[int] | np.ndarray[Any, Any]) -> Ids:
    """Token ids as a contiguous uint32 array [tokens]."""
    return np.ascontiguousarray(ids, dtype=np.uint32)


_GLANCE = 32


def agreement(a: Ids, b: Ids) -> int:
    """How many leading ids two arrays share."""
    length = min(len(a), len(b))
    glance = min(length, _GLANCE)
    # Siblings mostly differ early: do not compare thousands of ids to learn that.
    for part in (slice(0, glance), slice(glance, length)):
        differences = np.flatnonzero(a[part] != b[part])
        if len(differences):
            return int(part.start + differences[0])
    return length


class HistoryHash:
    """`history_digest` of a growing history, without hashing its beginning again."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, ids: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Append token ids."""
        self._hash.update(np.ascontiguousarray(ids, dtype="<u4").tobytes())

    def digest(self) -> bytes:
        """The digest of all ids added so far, 32 bytes."""
        return self._hash.copy().digest()


def history_digest(ids: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    """sha256 over the ids as little-endian uint32, 32 bytes."""
    history = HistoryHash()
    history.add(ids)
    return history.digest()


@dataclass(frozen=True, slots=True)
class CanonicalAnswer:
    """An answer reduced to what a client may not change without editing it. `calls` are (name, canonical arguments)."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> bytes:
        """sha256, 32 bytes."""
        return hashlib.sha256(json.dumps([self.text, self.calls]).encode()).digest()


def canonical_answer(text: str, calls: Sequence[ToolCall]) -> CanonicalAnswer:
    """Text in NFC without outer whitespace; calls by name and parsed arguments, their ids left out."""
    return CanonicalAnswer(
        text=unicodedata.normalize("NFC", text).strip(),
        calls=tuple((call.name, call.arguments if call.custom else _canonical_json(call.arguments)) for call in calls),
    )


def canonical_reasoning(reasoning: str) -> str:
    """Reasoning as it is compared: NFC, no outer whitespace."""
    return unicodedata.normalize("NFC", reasoning).strip()


@dataclass(frozen=True, slots=True)
class Known:
    """The sampled ids [tokens] of an answer, with its end token where it had one, and its reasoning text."""

    ids: Ids
    reasoning: str = ""


@dataclass(slots=True)
class _Entry:
    variants: list[Known] = field(default_factory=list[Known])
    settled: Known | None = None
    size_bytes: int = _ENTRY_BYTES


class ExactIds:
    """(history digest, canonical answer) -> `Known`, the least recently used forgotten first. Safe to use from any thread.

    One answer may have been given after different reasoning. `find` without reasoning settles on one of these, and the
    turn is rendered that way from then on, as long as it is remembered.
    """

    def __init__(self, budget_bytes: int = 64 << 20) -> None:
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def remember(self, history: bytes, answer: CanonicalAnswer, known: Known) -> None:
        """Keep the ids of an answer that was given after `history`. What is known already stays as it is.

        An answer larger than the whole budget is not kept.
        """
        ids = as_ids(known.ids).copy()
        ids.flags.writeable = False
        known = Known(ids, known.reasoning)
        cost = ids.nbytes + 4 * len(known.reasoning)
        if cost + _ENTRY_BYTES > self.budget_bytes:
            return
        wanted = canonical_reasoning(known.reasoning)
        with self._lock:
            entry = self._touch(_key(history, answer), create=True)
            if any(canonical_reasoning(variant.reasoning) == wanted for variant in entry.variants):
                return
            if len(entry.variants) == _MOST_VARIANTS:
                oldest = next(variant for variant in entry.variants if variant is not entry.settled)
                entry.variants.remove(oldest)
                self._grow(entry, -(oldest.ids.nbytes + 4 * len(oldest.reasoning)))
            entry.variants.append(known)
            self._grow(entry, cost)
            while self._bytes > self.budget_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].size_bytes

    def find(self, history: bytes, answer: CanonicalAnswer, reasoning: str | None = None) -> Known | None:
        """The ids that `answer` had after `history`, or None.

        With `reasoning`, only an answer that was given after that very reasoning. Without it, the way this turn was
        rendered before, else the way it was generated last.
        """
        with self._lock:
            key = _key(history, answer)
            if key not in self._entries:
                return None
            entry = self._touch(key)
            if reasoning is None:
                entry.settled = entry.settled or entry.variants[-1]
                return entry.settled
            wanted = canonical_reasoning(reasoning)
            for variant in entry.variants:
                if canonical_reasoning(variant.reasoning) == wanted:
                    return variant
            return None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes held, never more than `budget_bytes`."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def _touch(self, key: bytes, *, create: bool = False) -> _Entry:
        if create and key not in self._entries:
            self._entries[key] = _Entry()
            self._bytes += _ENTRY_BYTES
        self._entries.move_to_end(key)
        return self._entries[key]

    def _grow(self, entry: _Entry, size_bytes: int) -> None:
        entry.size_bytes += size_bytes
        self._bytes += size_bytes


def _key(history: bytes, answer: CanonicalAnswer) -> bytes:
    return hashlib.sha256(history + answer.digest).digest()


def _canonical_json(arguments: str) -> str:
    """Sorted, compact, numbers by value; text that is not JSON as it is. No arguments at all mean an empty object."""
    if not arguments.strip():
        return "{}"
    try:
        value = json.loads(arguments, parse_float=_number, parse_constant=_not_json)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def _number(literal: str) -> int | float:
    # JavaScript clients write 1.0 back as 1; both are the same number.
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal} is out of range")
    return int(value) if value.is_integer() and abs(value) < _EXACT_INTEGERS else value


def _not_json(literal: str) -> Any:
    raise ValueError(f"{literal} is not JSON")
