"""The nodes of the pool: immutable segments of token ids with the cached arrays that belong to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.prompt.exact_ids import Ids, agreement

Kind = Literal["prompt", "answer", "side"]
"""What a segment came from: a prompt, a generated answer, or a one-off side request (a title, a summary)."""

Boundary = Literal["system", "user", "turn", "inside", "fork"]
"""What ends at a segment's end: system + tools, everything before a user turn, before another turn, or none of these.

"fork" is a place inside one of them behind which two conversations were seen to part.
"""


class SegmentData(Protocol):
    """The arrays of one segment, opaque to the pool, which owns them from insertion on.

    A state that was dropped counts 0 bytes. `has_state` is always True on a divisible model, which needs no state.
    """

    @property
    def delta_bytes(self) -> int:
        """Bytes of the tokens' own arrays."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of the state at the end."""
        ...

    @property
    def has_state(self) -> bool:
        """True when a request may resume at the end."""
        ...

    def drop_state(self) -> None:
        """Free the state and keep the delta for descendants."""
        ...

    def release(self) -> None:
        """Free everything."""
        ...


class Segment:
    """Tokens `start`..`end` of a path. Identity counts; ids and place never change; only the pool writes its fields.

    `leases` counts the running requests whose path goes through it, `tips` those that need the state at its end. `hits`
    counts the requests that reused it, `forks` the children it ever had. `held` is False once it left the pool.
    """

    __slots__ = (
        "boundary",
        "bytes",
        "children",
        "created",
        "data",
        "end",
        "forks",
        "held",
        "hits",
        "ids",
        "key",
        "kind",
        "label",
        "last_use",
        "leases",
        "parent",
        "start",
        "tips",
    )

    def __init__(
        self,
        parent: Segment | None,
        ids: Ids,
        data: SegmentData,
        *,
        kind: Kind = "prompt",
        boundary: Boundary = "turn",
        label: str = "",
        now: float = 0.0,
        root_key: bytes = b"",
    ) -> None:
        self.parent = parent
        self.ids = ids
        self.start = parent.end if parent is not None else 0
        self.end = self.start + len(ids)
        self.key = hashlib.sha256(parent.key + ids.astype("<u4").tobytes()).digest() if parent is not None else root_key
        self.data = data
        self.kind: Kind = kind
        self.boundary: Boundary = boundary
        self.label = label
        self.created = self.last_use = now
        self.hits = 0
        self.forks = 0
        self.leases = 0
        self.tips = 0
        self.held = True
        self.bytes = 0
        self.children: dict[int, list[Segment]] = {}

    def __repr__(self) -> str:
        return f"Segment({self.start}..{self.end}, {self.kind}, {self.boundary}, {self.bytes} bytes)"

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return len(self.ids)

    @property
    def is_leaf(self) -> bool:
        """True when nothing extends it."""
        return not self.children

    @property
    def has_state(self) -> bool:
        """True when a request may resume at its end."""
        return self.data.has_state

    @property
    def state_bytes(self) -> int:
        """Bytes that dropping its state alone would free."""
        return self.data.state_bytes if self.data.has_state else 0

    def each_child(self) -> Iterator[Segment]:
        """All children."""
        for same_first_id in self.children.values():
            yield from same_first_id

    def path(self) -> tuple[Segment, ...]:
        """From the first segment after the root to this one."""
        path: list[Segment] = []
        at = self
        while at.parent is not None:
            path.append(at)
            at = at.parent
        return tuple(reversed(path))

    def resume_point(self) -> Segment:
        """The nearest segment, upwards from this one, at whose end a request may resume; the root at last."""
        at = self
        while at.parent is not None and not at.has_state:
            at = at.parent
        return at

    def subtree(self) -> Iterator[Segment]:
        """This segment and everything below it, parents first."""
        waiting: list[Segment] = [self]
        while waiting:
            segment = waiting.pop()
            yield segment
            waiting.extend(segment.each_child())


class NoData:
    """The payload of a root: nothing, and a request may always begin there."""

    delta_bytes = 0
    state_bytes = 0
    has_state = True

    def drop_state(self) -> None:
        """Nothing to free."""

    def release(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the pool has of a prompt.

    Resume at token `tokens` from the segments of `path` and, on divisible models, the first `partial[1]` tokens of
    `partial[0]`. `matched` ids agree with some stored path in all; beyond `tokens` there is no resume point.
    """

    path: tuple[Segment, ...] = ()
    tokens: int = 0
    partial: tuple[Segment, int] | None = None
    matched: int = 0

    @property
    def parent(self) -> Segment | None:
        """The segment that the next one hangs on, None for the root. It ends before `tokens` when there is a `partial`."""
        return self.path[-1] if self.path else None

    @property
    def tips(self) -> tuple[Segment, ...]:
        """The segments that a request which resumes here stands on."""
        return (*self.path[-1:], *((self.partial[0],) if self.partial is not None else ()))

    def parted_at(self, length: int) -> int | None:
        """The token at which a prompt of `length` tokens left every stored path, None where it goes on from the end of one."""
        at_an_end = self.matched == self.tokens and (self.parent is None or self.parent.is_leaf)
        return None if at_an_end or self.matched >= length else self.matched


def longest_match(root: Segment, ids: Ids, limit: int, rule: CutRule, *, divisible: bool) -> Match:
    """The resume point closest to `limit` among all stored paths that agree with `ids` that far."""
    matched = tokens = 0
    deepest = root
    partial: tuple[Segment, int] | None = None
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.end == len(ids):
            continue
        for child in node.children.get(int(ids[node.end]), ()):
            common = agreement(child.ids, ids[child.start :])
            matched = max(matched, child.start + common)
            whole = common == child.tokens
            if whole:
                waiting.append(child)
            if whole and child.end <= limit:
                if child.end > tokens and child.has_state:
                    deepest, tokens, partial = child, child.end, None
            elif divisible:
                usable = rule.floor(child.start, min(child.start + common, limit)) - child.start
                if child.start + usable > tokens and usable > 0:
                    deepest, tokens, partial = node, child.start + usable, (child, usable)
    return Match(deepest.path(), tokens, partial, matched)


def newest_leaf(segment: Segment) -> Segment:
    """The leaf below `segment` that the most recently used children lead to."""
    while not segment.is_leaf:
        segment = max(segment.each_child(), key=lambda child: (child.last_use, child.key))
    return segment


def resume_points(path: Sequence[Segment]) -> list[Segment]:
    """The segments of a path at whose end a request may resume."""
    return [segment for segment in path if segment.has_state]


def frozen(ids: Any) -> Ids:
    """A private read-only copy of token ids."""
    copy = np.array(ids, dtype=np.uint32)
    copy.flags.writeable = False
    return copy
