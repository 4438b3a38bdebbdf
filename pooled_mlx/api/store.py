"""A bounded in-memory store: what an API keeps between requests, and never more than it may."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

MAX_RECORDS = 256
MAX_BYTES = 64 << 20
IDLE_SECONDS = 3600.0

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A value that several records may share; its bytes are counted once however many records hold it."""

    value: Any
    size_bytes: int


@dataclass(slots=True)
class _Entry(Generic[Record]):
    record: Record
    pieces: tuple[Piece, ...]
    last_use_seconds: float


class BoundedStore(Generic[Record]):
    """Records by id, least recently used dropped first, an hour after last use at the latest.

    Bytes are those of the pieces a record is stored with: a conversation that grows turn by turn shares the pieces of its
    earlier turns, so its length is not counted again for each of them. All methods may be called from any thread.
    """

    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._entries: OrderedDict[str, _Entry[Record]] = OrderedDict()
        self._holders: dict[Piece, int] = {}
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces held, each counted once."""
        with self._lock:
            self._expire()
            return self._bytes

    def put(self, key: str, record: Record, pieces: Sequence[Piece]) -> bool:
        """Store `record`; False when it alone is over the byte limit and was not kept."""
        with self._lock:
            self._expire()
            self._drop(key)
            self._entries[key] = _Entry(record, tuple(pieces), self._clock())
            for piece in pieces:
                held = self._holders.get(piece, 0)
                self._holders[piece] = held + 1
                self._bytes += 0 if held else piece.size_bytes
            while self._entries and (len(self._entries) > self._max_records or self._bytes > self._max_bytes):
                self._drop(next(iter(self._entries)))
            return key in self._entries

    def get(self, key: str) -> Record | None:
        """The record of `key`, which counts as a use of it; None when there is none (any more)."""
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.last_use_seconds = self._clock()
            self._entries.move_to_end(key)
            return entry.record

    def find(self, wanted: Callable[[Record], bool]) -> Record | None:
        """The most recently used record that `wanted` accepts; looking does not count as a use."""
        with self._lock:
            self._expire()
            return next((entry.record for entry in reversed(self._entries.values()) if wanted(entry.record)), None)

    def delete(self, key: str) -> bool:
        """Forget `key`; False when it was not there."""
        with self._lock:
            self._expire()
            return self._drop(key)

    def _expire(self) -> None:
        limit = self._clock() - self._idle_seconds
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.last_use_seconds > limit:
                return
            self._drop(key)

    def _drop(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        for piece in entry.pieces:
            self._holders[piece] -= 1
            if not self._holders[piece]:
                del self._holders[piece]
                self._bytes -= piece.size_bytes
        return True
