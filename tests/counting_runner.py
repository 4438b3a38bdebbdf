"""A runner that only counts: a cache is a list of ids, a state the ids that it stands for, and every byte is known.

It computes nothing, so what a row says is a pure function of the ids before it, and it refuses whatever a runner of arrays
would do wrongly in silence: a state of other ids, K/V that was given up, a pass on a sealed buffer, a choice that nobody made.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pooled_mlx.core.runner import Mark, Ranges, Run, RunnerFacts, Shape, Span

TOKEN_BYTES, STATE_BYTES = 64, 2048
VOCABULARY = 512
_PERIOD = 12

Ids = tuple[int, ...]


def next_token(ids: Sequence[int]) -> int:
    """What is said after these ids: mostly what was said `_PERIOD` tokens before, as in a copy with changes."""
    digest = hashlib.blake2b(np.asarray(ids, np.uint32).tobytes(), digest_size=4).digest()
    if digest[0] % 9 and len(ids) >= _PERIOD:
        return int(ids[-_PERIOD])
    return int.from_bytes(digest, "big") % VOCABULARY


def answer(ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a cold run says after these ids."""
    said = [int(token) for token in ids]
    for _ in range(count):
        said.append(next_token(said))
    return said[len(ids) :]


class Wrong(BaseException):
    """A command that no runner may be given. No `Exception`: the engine takes those for failures and goes on."""


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


@dataclass(eq=False)
class _Cache:
    """The ids of each row. `held` are the positions whose K/V is still there, None for all; `room` counts those that fit.

    `live`: it has a state of its own, or shares the `frozen` one with that number while that is there.
    """

    rows: list[Ids]
    room: int = 0
    held: set[int] | None = None
    is_open: bool = True
    live: bool = False
    frozen: int | None = None
    logits: bool = False
    chosen: deque[list[int]] = field(default_factory=deque)
    last: list[int] = field(default_factory=list)
    places: int = 1
    point: Ids | None = None
    end: Ids | None = None

    @property
    def ids(self) -> Ids:
        _must(len(self.rows) == 1, "a batch has no spans")
        return self.rows[0]


class CountingRunner:
    """Satisfies `core.runner.Runner`. `fail` is asked before every command that may go wrong, by name, and may raise."""

    def __init__(self, *, divisible: bool, fail: Callable[[str], None] = lambda command: None) -> None:
        self.facts = RunnerFacts(divisible, VOCABULARY)
        self.fail = fail
        self.caches: dict[int, _Cache] = {}
        self.states: dict[int, Ids] = {}
        self._numbers = itertools.count(1)

    @property
    def bytes(self) -> int:
        """Of everything there is, each thing once."""
        states = 0 if self.facts.divisible else STATE_BYTES * len(self.states)
        return sum(map(self.bytes_of, self.caches)) + states

    def _new(self, cache: _Cache) -> int:
        number = next(self._numbers)
        self.caches[number] = cache
        return number

    def _plain(self, number: int, *, is_open: bool = True) -> _Cache:
        cache = self.caches[number]
        _must(cache.is_open is is_open, f"cache {number} is {'open' if cache.is_open else 'sealed'}")
        _must(len(cache.rows) == 1, f"cache {number} is a batch")
        return cache

    def _kv(self, span: Span) -> Ids:
        cache = self.caches[span.buffer]
        missing = [place for place in range(span.lo, span.hi) if cache.held is not None and place not in cache.held]
        _must(not missing, f"{span} was given up")
        _must(span.hi <= len(cache.ids), f"{span} goes beyond its end")
        return cache.ids[span.lo : span.hi]

    def _restored(self, ids: Ids, state: int | None) -> None:
        if not self.facts.divisible and ids:
            _must(state is not None, "nothing to resume from")
            _must(self.states[state] == ids, "the state of other tokens")

    # --- one row's cache

    def open(self, spans: Sequence[Span], state: int | None, room: int, trims: Mapping[int, Ranges]) -> int:
        self.fail("open")
        ids: Ids = ()
        for span in spans:
            _must(span.lo == len(ids), "a path with a gap")
            ids += self._kv(span)
        self._restored(ids, state)
        for number, ranges in trims.items():
            self._keep(number, ranges)
        return self._new(_Cache([ids], max(room, len(ids)), live=bool(ids), frozen=state))

    def reopen(self, buffer: int, state: int | None) -> None:
        self.fail("reopen")
        cache = self._plain(buffer, is_open=False)
        _must(cache.held is None, "a buffer that gave something up")
        self._restored(cache.ids, state)
        cache.is_open, cache.live, cache.frozen = True, True, state
        cache.chosen, cache.last, cache.logits = deque(), [], False

    def room_of(self, cache: int) -> int:
        return self.caches[cache].room

    def grow(self, cache: int, tokens: int) -> None:
        self.fail("grow")
        plain = self._plain(cache)
        plain.room = max(plain.room, tokens)

    def read(self, cache: int, ids: np.ndarray[Any, Any], *, last: bool) -> None:
        self.fail("read")
        plain = self._plain(cache)
        self._append(plain, 0, ids.tolist())
        plain.logits = last

    def _append(self, cache: _Cache, row: int, ids: Sequence[int]) -> None:
        cache.rows[row] += tuple(int(token) for token in ids)
        cache.room = max(cache.room, len(cache.rows[row]))
        cache.live, cache.frozen = True, None

    def mark(self, cache: int, lo: int, hi: int) -> Mark:
        self.fail("mark")
        plain = self._plain(cache)
        _must(hi == len(plain.ids), "a state that is not at the end")
        if self.facts.divisible:
            return Mark(TOKEN_BYTES * (hi - lo), None, 0, True)
        number = next(self._numbers)
        self.states[number], plain.frozen = plain.ids, number
        return Mark(TOKEN_BYTES * (hi - lo), number, STATE_BYTES, True)

    # --- passes

    def step(self, cache: int, runs: Sequence[Run], shapes: Sequence[Shape] | None = None, *, places: int = 1) -> None:
        self.fail("step")
        group = self.caches[cache]
        _must(group.is_open, "a pass on a sealed buffer")
        _must(len(runs) == len(group.rows), "a run for each row")
        _must(len({1 if run is None else len(run) for run in runs}) == 1, "runs of different lengths")
        _must(len(group.chosen) <= 1, "more than one choice is not taken")
        told = runs[0] is not None and len(group.rows) == 1 and len(runs[0]) > 1
        group.point = group.ids if told else None
        _must(places == 1 or (told and places <= len(runs[0] or ())), "logits at tokens that are not read")
        for place, run in enumerate(runs):
            _must(run is not None or not group.chosen or len(group.chosen[-1]) == len(group.rows), "a token nobody chose")
            self._append(group, place, [group.last[place]] if run is None else run)
        group.places = places
        group.logits = True
        if shapes is not None:
            self.choose(cache, shapes)

    def choose(self, cache: int, shapes: Sequence[Shape]) -> None:
        self.fail("choose")
        group = self.caches[cache]
        _must(group.logits, "nothing to choose from")
        rows = group.rows if group.places == 1 else [group.ids[: len(group.ids) - back] for back in range(group.places)][::-1]
        _must(len(shapes) == len(rows), "a shape for each row, or for each place")
        group.last = [
            shape.token if shape.token is not None else next_token(ids) for shape, ids in zip(shapes, rows, strict=True)
        ]
        group.logits = False
        group.chosen.append(group.last)

    def logits(self, cache: int) -> np.ndarray[Any, Any]:
        (ids,) = self.caches[cache].rows
        _must(self.caches[cache].logits, "nothing to choose from")
        return np.eye(VOCABULARY, dtype=np.float32)[next_token(ids)]

    def take(self, cache: int) -> list[int | None]:
        self.fail("take")
        return list(self.caches[cache].chosen.popleft())

    def keep(self, cache: int, tokens: int) -> int:
        plain = self._plain(cache)
        point, plain.point, plain.places = plain.point, None, 1
        _must(point is not None, "nothing was read to keep some of")
        assert point is not None
        read = len(plain.ids) - len(point)
        _must(0 <= tokens <= read, "more than was read")
        kept = tokens if self.facts.divisible or tokens == read else 0
        plain.rows[0] = plain.ids[: len(point) + kept]
        return kept

    # --- batches

    def can_join(self, cache: int, other: int) -> bool:
        return True

    def join(self, cache: int, other: int, trims: Mapping[int, Ranges]) -> int:
        self.fail("join")
        groups = [self.caches[number] for number in (cache, other)]
        _must(all(len(group.chosen) == 1 for group in groups), "a row without exactly one choice that is not taken")
        joined = _Cache([ids for group in groups for ids in group.rows], live=True)
        joined.chosen.append([token for group in groups for token in group.chosen[0]])
        joined.last = joined.chosen[0]
        for number, group in zip((cache, other), groups, strict=True):
            if len(group.rows) > 1:
                del self.caches[number]
            else:
                self._keep(number, trims[number])
                group.is_open, group.live = False, False
        return self._new(joined)

    def leave(self, cache: int, gone: Sequence[int]) -> tuple[list[int], int | None]:
        self.fail("leave")
        group = self.caches[cache]
        if len(group.rows) == 1:
            return [cache], None
        stay = [place for place in range(len(group.rows)) if place not in gone]
        alone = [*gone, *(stay if len(stay) == 1 else ())]
        numbers = [self._new(self._some(group, [place])) for place in alone]
        if len(stay) > 1:
            self.caches[cache] = self._some(group, stay)
            return numbers, cache
        del self.caches[cache]
        return numbers[: len(gone)], numbers[-1] if stay else None

    @staticmethod
    def _some(group: _Cache, places: Sequence[int]) -> _Cache:
        def of(values: Sequence[int]) -> list[int]:
            return [values[place] for place in places]

        rows = [group.rows[place] for place in places]
        some = _Cache(rows, len(rows[0]) if len(rows) == 1 else 0, live=True, logits=group.logits)
        some.last, some.chosen = of(group.last) if group.last else [], deque(of(tokens) for tokens in group.chosen)
        return some

    # --- buffers and states

    def seal(self, cache: int) -> None:
        self.fail("seal")
        plain = self.caches[cache]
        _must(len(plain.rows) == 1, f"cache {cache} is a batch")
        plain.is_open, plain.live = False, False

    def trim(self, buffer: int, ranges: Ranges) -> None:
        self.fail("trim")
        self._plain(buffer, is_open=False)
        self._keep(buffer, ranges)

    def _keep(self, number: int, ranges: Ranges) -> None:
        cache = self.caches[number]
        wanted = {place for lo, hi in ranges for place in range(lo, hi)}
        _must(cache.held is None or wanted <= cache.held, "kept what was given up")
        cache.held = wanted

    def free(self, cache: int) -> None:
        self.caches.pop(cache, None)

    def drop(self, state: int) -> None:
        del self.states[state]

    def finite(self, spans: Sequence[Span], state: int | None) -> bool:
        for span in spans:
            self._kv(span)
        _must(state is None or state in self.states, "a state that was given up")
        return True

    def bytes_of(self, cache: int) -> int:
        group = self.caches[cache]
        tokens = len(group.held) if group.held is not None else group.room
        if len(group.rows) > 1:
            tokens = len(group.rows) * max(map(len, group.rows))
        shared = group.frozen is not None and group.frozen in self.states
        states = 0 if self.facts.divisible or shared or not group.live else STATE_BYTES * len(group.rows)
        return TOKEN_BYTES * tokens + states

    def device_failed(self, error: Exception) -> bool:
        return "device" in str(error)

    def clear_unused(self) -> None:
        pass

    def reset(self, keep: Collection[int]) -> None:
        for number in set(self.caches) - set(keep):
            self.free(number)
