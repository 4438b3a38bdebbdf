"""Saying a scripted text under a request's grammar: the tokens that do it, or the place where it cannot be done."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pooled_mlx.grammar.match import Constraint

_WHITE_SPACE = (b"\n", b" ")
_MOST_ADDED = 4
"""White space that is tried at one place: the formats want a line break or two there."""


class CannotFollow(Exception):
    """The grammar does not take the text. `said_bytes` of it were; `wanted` is what must come there, b"" where that is open."""

    def __init__(self, said_bytes: int, wanted: bytes = b"") -> None:
        super().__init__(f"the grammar does not take what follows byte {said_bytes}")
        self.said_bytes = said_bytes
        self.wanted = wanted


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What following a text needs of a tokenizer: id -> bytes, bytes -> id of an ordinary token, and the end tokens."""

    bytes_of: Sequence[bytes]
    ordinary: Mapping[bytes, int]
    longest_bytes: int
    eos_ids: frozenset[int]


def follow(ids: Sequence[int], constraint: Constraint, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Tokens that say the text of `ids` (its last one an end token) under `constraint`, which is used up.

    The text stays as it is; where the grammar takes it only with white space at some place, that is added there. Raises
    `CannotFollow`.
    """
    return _Follower(ids, constraint, vocabulary).run()


class _Follower:
    def __init__(self, ids: Sequence[int], constraint: Constraint, vocabulary: Vocabulary) -> None:
        self._constraint, self._vocabulary = constraint, vocabulary
        self._ids, self._end = ids[:-1], ids[-1]
        said = [vocabulary.bytes_of[index] for index in self._ids]
        self._text = b"".join(said)
        self._ends = list(accumulate(map(len, said)))
        self._done = 0
        self._out: list[int] = []

    def run(self) -> tuple[int, ...]:
        while True:
            # As the row will: what the grammar forces comes first, in its own tokens.
            if forced := self._constraint.forced():
                for token in forced:
                    self._take_forced(token, forced)
            elif self._done == len(self._text) and self._constraint.may_end():
                return (*self._out, self._end)
            elif (token := self._next(self._constraint)) is not None:
                self._done += len(self._vocabulary.bytes_of[token])
                self._take(token)
            else:
                for token in self._white_space():
                    self._take(token)

    def _take(self, token: int) -> None:
        self._constraint.consume(token)
        self._out.append(token)

    def _take_forced(self, token: int, forced: Sequence[int]) -> None:
        """Go over a forced token byte by byte: of what the text does not have there, only white space may be added."""
        done = self._done
        for byte in self._vocabulary.bytes_of[token]:
            if self._text[done : done + 1] == bytes([byte]):
                done += 1
            elif not bytes([byte]).isspace():
                raise CannotFollow(self._done, b"".join(self._vocabulary.bytes_of[index] for index in forced))
        self._done = done
        self._take(token)

    def _next(self, constraint: Constraint) -> int | None:
        """The scripted token at this place or, where that is not allowed, the longest ordinary one that is."""
        place = bisect_left(self._ends, self._done + 1)
        if place == len(self._ids):
            return None
        starts = self._ends[place - 1] if place else 0
        if starts == self._done and constraint.allows(self._ids[place]):
            return self._ids[place]
        most = min(self._done + self._vocabulary.longest_bytes, self._ends[place])
        for end in range(most, self._done, -1):
            token = self._vocabulary.ordinary.get(self._text[self._done : end])
            if token is not None and constraint.allows(token):
                return token
        return None

    def _white_space(self) -> list[int]:
        """The least white space after which the text can go on, or end. Raises `CannotFollow`."""
        known = [self._vocabulary.ordinary[text] for text in _WHITE_SPACE if text in self._vocabulary.ordinary]
        tried = deque([(list[int](), self._constraint)])
        while tried:
            added, before = tried.popleft()
            for token in known:
                if len(added) == _MOST_ADDED or not before.allows(token):
                    continue
                after = before.copy()
                after.consume(token)
                over = self._done == len(self._text)
                if after.may_end() if over else self._next(after) is not None:
                    return [*added, token]
                tried.append(([*added, token], after))
        raise CannotFollow(self._done)
