"""Drafts: what a row will probably say next, and how much of it is worth a longer pass.

A pass of several tokens costs little more than one of one, and coding agents write what they have just read. A draft is
accepted while it equals the choice that is made at its place, so the answer is the one without drafts; a wrong one costs time
alone, and the length of the next one follows what the last ones brought and what passes of each length take here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SHORTEST_MATCH = 3
"""Tokens that must have been said before in the same order; one more must then come true before anything is drafted."""
_LONGEST_MATCH = 8
_MOST_PLACES = 8
"""Earlier places of the same tokens that are compared."""
_TOKEN_BITS = 21

_FIRST, _LEAST, _MOST = 4, 2, 32
"""Tokens of a row's first draft, of the shortest one and of the longest one."""
_FIRST_NAP, _LONGEST_NAP = 32, 512
"""Tokens for which a row drafts nothing after a draft of which nothing was right; twice as many each time."""
_MEMORY = 0.2
"""Weight of what was seen last in running means."""
_WORTH = 1.02
_SLOPE = 0.1
"""What a token more is guessed to add to a pass, in passes of one token, before any was seen."""


class Index:
    """Finds where the newest tokens of a row stood before. The prompt is sorted once; a token more costs a dict entry."""

    def __init__(self, prompt: np.ndarray) -> None:
        """`prompt` are its ids `[tokens]`."""
        self._prompt, self._said = prompt, list[int]()
        ids = prompt.astype(np.int64)
        keys = ids[SHORTEST_MATCH - 1 :].copy()
        for back in range(1, SHORTEST_MATCH):
            keys |= ids[SHORTEST_MATCH - 1 - back : len(ids) - back] << (_TOKEN_BITS * back)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self._newest: dict[int, int] = {}
        self._before: list[int] = []

    def __len__(self) -> int:
        return len(self._prompt) + len(self._said)

    def __getitem__(self, place: int) -> int:
        """The token at `place` of prompt and answer."""
        first = len(self._prompt)
        return int(self._prompt[place]) if place < first else self._said[place - first]

    def slice(self, lo: int, hi: int) -> list[int]:
        """The tokens `lo..hi`."""
        first = len(self._prompt)
        return self._prompt[lo:hi].tolist() + self._said[max(0, lo - first) : max(0, hi - first)]

    def append(self, token: int) -> None:
        """The row said `token`."""
        self._said.append(token)
        if (key := self._key()) is not None:
            self._before.append(self._newest.get(key, 0))
            self._newest[key] = len(self)
        else:
            self._before.append(0)

    def _key(self) -> int | None:
        if len(self) < SHORTEST_MATCH:
            return None
        key = 0
        for token in self.slice(len(self) - SHORTEST_MATCH, len(self)):
            key = key << _TOKEN_BITS | token
        return key

    def find(self) -> int | None:
        """The place after the longest earlier run of the newest tokens, of equal ones the newest; None where there is none."""
        best, length = None, SHORTEST_MATCH - 1
        for end in self._places():
            found = self._matching(end)
            if found > length:
                best, length = end, found
            if length >= _LONGEST_MATCH:
                break
        return best

    def _places(self) -> list[int]:
        """Where the newest tokens ended before, newest first."""
        key, found = self._key(), list[int]()
        if key is None:
            return found
        first = len(self._prompt)
        end = self._before[-1] if self._said else 0
        while end and len(found) < _MOST_PLACES:
            found.append(end)
            end = self._before[end - first - 1]
        at = int(np.searchsorted(self._keys, key, side="right")) - 1
        while at >= 0 and len(found) < _MOST_PLACES and self._keys[at] == key:
            if (end := int(self._order[at]) + SHORTEST_MATCH) < len(self):
                found.append(end)
            at -= 1
        return found

    def _matching(self, end: int) -> int:
        """How many tokens before `end` equal the newest ones."""
        last, count = len(self), 0
        while count < _LONGEST_MATCH and count < end and self[end - 1 - count] == self[last - 1 - count]:
            count += 1
        return count


class PassCosts:
    """What a pass of n tokens takes, in passes of one: learned from those that were made, for all rows of one model."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def seen(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens of one row took so long."""
        bucket = _bucket(tokens)
        known = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = known + _MEMORY * (seconds - known)

    def of(self, tokens: int) -> float:
        """The cost of a pass of so many tokens; where none was seen, what the nearest shorter ones say."""
        one = self._seconds.get(1)
        bucket = _bucket(tokens)
        if one is None or one <= 0.0:
            return 1.0 + _SLOPE * (tokens - 1)
        if bucket in self._seconds:
            return max(1.0, self._seconds[bucket] / one)
        known = max((size for size in self._seconds if 1 < size < bucket), default=0)
        slope = (self.of(known) - 1.0) / (known - 1) if known else _SLOPE
        return 1.0 + slope * (tokens - 1)

    def best(self, acceptance: float, most: int) -> int:
        """The length of draft, at most `most`, that brings the most tokens for its time when each of its tokens is right with
        probability `acceptance`; 0 where none is worth it.
        """
        best, gain = 0, _WORTH
        length = 1
        while length <= most:
            tokens = sum(acceptance**count for count in range(length + 1))
            if (worth := tokens / self.of(length + 1)) > gain:
                best, gain = length, worth
            length *= 2
        return best


def _bucket(tokens: int) -> int:
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(slots=True, eq=False)
class Draft:
    """What one row drafts: looks up its own context, and learns how much of that comes true.

    `at` is the place of the token that is expected next, None where nothing is; `sure` when the one before it came true.
    """

    index: Index
    drafted: int = 0
    accepted: int = 0
    at: int | None = None
    sure: bool = False
    _length: int = _FIRST
    _acceptance: float = 0.8
    _nap: int = _FIRST_NAP
    _asleep_until: int = field(default=0)

    @property
    def expects(self) -> bool:
        """True when it is worth knowing the next token before another pass is queued."""
        return self.at is not None and len(self.index) >= self._asleep_until

    def told(self, token: int) -> None:
        """The row said `token`."""
        self.sure = self.at is not None and self.index[self.at] == token
        self.index.append(token)
        if self.sure:
            assert self.at is not None
            self.at += 1
        else:
            self.at = self.index.find()

    def propose(self, most: int, costs: PassCosts) -> list[int]:
        """At most `most` tokens that may come next; [] where that is not likely enough."""
        if self.at is None or not self.sure or len(self.index) < self._asleep_until:
            return []
        length = min(self._length, most, costs.best(self._acceptance, _MOST))
        return self.index.slice(self.at, min(self.at + length, len(self.index))) if length > 0 else []

    def judged(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens so many were right."""
        self.drafted += drafted
        self.accepted += accepted
        self._acceptance += _MEMORY * (accepted / drafted - self._acceptance)
        if accepted == drafted:
            self._length, self._nap = min(2 * self._length, _MOST), _FIRST_NAP
        else:
            self._length = max(_LEAST, self._length // 2)
        if not accepted:
            self._asleep_until = len(self.index) + self._nap
            self._nap = min(2 * self._nap, _LONGEST_NAP)
