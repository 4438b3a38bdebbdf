"""A model for the pool's tests: its caches are the token ids themselves, so that a wrong hit cannot go unseen."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pooled_mlx.core.cuts import CutRule, checkpoints, pieces
from pooled_mlx.engine.pool import Boundary, Kind, Match, Pool, Segment

RULE = CutRule(step=32, spacing=256, minimum=16)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeData:
    """The cache of tokens `start`..`len(prefix)`; its state is the whole prefix."""

    def __init__(
        self, prefix: Sequence[int], start: int, *, divisible: bool = False, kv_bytes: int = 10, state_bytes: int = 1000
    ) -> None:
        self.delta = tuple(prefix[start:])
        self.state: tuple[int, ...] | None = None if divisible else tuple(prefix)
        self.divisible = divisible
        self.delta_bytes = kv_bytes * len(self.delta)
        self._state_bytes = state_bytes
        self.released = False

    @property
    def state_bytes(self) -> int:
        return self._state_bytes if self.state is not None else 0

    @property
    def has_state(self) -> bool:
        return not self.released and (self.divisible or self.state is not None)

    def drop_state(self) -> None:
        assert not self.released
        self.state = None

    def release(self) -> None:
        assert not self.released, "released twice"
        self.released = True


def check_match(pool: Pool, match: Match, ids: Sequence[int]) -> None:
    """Fail unless what `match` would be materialised into is the cache of ids[: match.tokens]."""
    divisible = pool.divisible
    assert 0 <= match.tokens < len(ids)
    assert match.matched >= match.tokens
    cache: list[int] = []
    for segment in match.path:
        assert segment.held
        assert isinstance(segment.data, FakeData)
        assert not segment.data.released
        cache += segment.data.delta
    if match.partial:
        assert divisible
        segment, count = match.partial
        assert isinstance(segment.data, FakeData)
        assert 0 < count <= segment.tokens
        assert count % pool.rule.step == 0
        assert segment.parent is not None
        assert segment.parent.end == len(cache)
        cache += segment.data.delta[:count]
    assert cache == list(ids[: match.tokens]), "a wrong hit"
    if match.path and not divisible:
        data = match.path[-1].data
        assert isinstance(data, FakeData)
        assert data.state == tuple(ids[: match.tokens]), "a wrong state"


def make_pool(budget: int = 10**9, *, divisible: bool = False) -> Pool:
    """A pool with a clock that stands still."""
    return Pool(budget, b"model", divisible=divisible, rule=RULE, clock=Clock())


def put(pool: Pool, parent: Segment, ids: Sequence[int], **options: Any) -> Any:
    """Insert `ids` below `parent`, with their cache unless `data` is given."""
    above = [int(i) for segment in parent.path() for i in segment.ids]
    data = options.pop("data", None) or FakeData([*above, *ids], len(above), divisible=pool.divisible)
    return pool.insert(parent, ids, data, **options)


@dataclass
class FakeModel:
    """Serves requests from a pool as the engine does, and checks everything that it resumes from."""

    pool: Pool
    kv_bytes: int = 10
    state_bytes: int = 1000
    computed: int = field(default=0)

    def serve(
        self,
        ids: Sequence[int],
        boundaries: Mapping[int, Boundary],
        answer: Sequence[int] = (),
        *,
        label: str = "agent",
        kind: Kind = "prompt",
        calls: bool = False,
        cancel_after: int | None = None,
        opening: int | None = None,
    ) -> int:
        """Answer one request and return how many prompt tokens were reused; `computed` grows by the others.

        An answer with `calls` is followed by a tool turn, any other by a user turn. With `cancel_after`, the request ends
        once that many pieces are computed. The first `opening` tokens (None: all) come before the model's first turn.
        """
        pool = self.pool
        match = pool.lookup(ids)
        check_match(pool, match, ids)
        with pool.lease(match, label) as lease:
            parent = match.path[-1] if match.path else pool.root
            cuts = checkpoints(list(boundaries), len(ids), pool.rule)
            plan = pieces(match.tokens, cuts, len(ids), pool.rule)
            fork = pool.learn_fork(match, plan, len(ids), len(ids) if opening is None else opening)
            for number, piece in enumerate(plan):
                if number == cancel_after:
                    return match.tokens
                self.computed += len(piece)
                if piece.checkpoint or piece.end == fork:
                    boundary = boundaries.get(piece.end, "fork" if piece.end == fork else "inside")
                    data = self.data(ids[: piece.end], parent.end)
                    new = pool.insert(
                        parent, ids[parent.end : piece.end], data, kind=kind, boundary=boundary, label=label, lease=lease
                    )
                    parent = new or parent
            if answer:
                whole = [*ids, *answer]
                data = self.data(whole, parent.end)
                after: Kind = "side" if kind == "side" else "answer"
                boundary = "turn" if calls else "user"
                pool.insert(parent, whole[parent.end :], data, kind=after, boundary=boundary, label=label, lease=lease)
        return match.tokens

    def data(self, prefix: Sequence[int], start: int) -> FakeData:
        """The cache of the tokens from `start` to the end of `prefix`."""
        return FakeData(prefix, start, divisible=self.pool.divisible, kv_bytes=self.kv_bytes, state_bytes=self.state_bytes)


class Chat:
    """A conversation as ids: system + tools, then turns. Every turn of every text has ids of its own."""

    HEADER = (1, 2, 3)
    """What a prompt ends with, before the answer."""

    def __init__(self, system: Sequence[int]) -> None:
        self.turns: list[tuple[Boundary, list[int]]] = []
        self.system = list(system)

    def user(self, ids: Sequence[int]) -> Chat:
        """Add a user turn."""
        self.turns.append(("user", list(ids)))
        return self

    def tool(self, ids: Sequence[int]) -> Chat:
        """Add a tool result."""
        self.turns.append(("turn", list(ids)))
        return self

    def answer(self, ids: Sequence[int]) -> Chat:
        """Add an assistant turn."""
        self.turns.append(("turn", [*self.HEADER, *ids]))
        return self

    def copy(self) -> Chat:
        """An independent copy."""
        chat = Chat(self.system)
        chat.turns = [(kind, list(ids)) for kind, ids in self.turns]
        return chat

    def prompt(self) -> tuple[list[int], dict[int, Boundary]]:
        """Ids with the generation prompt, and the boundaries before each turn."""
        ids = list(self.system)
        boundaries: dict[int, Boundary] = {}
        for number, (kind, turn) in enumerate(self.turns):
            boundaries[len(ids)] = kind if number else "system"
            ids += turn
        boundaries[len(ids)] = "turn"
        return [*ids, *self.HEADER], boundaries


def words(text: str, count: int) -> list[int]:
    """`count` ids that belong to `text` alone."""
    base = 10 + zlib.crc32(text.encode()) % 400_000 * 10_000
    return [base + number for number in range(count)]
