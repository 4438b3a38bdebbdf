"""Which part of the pool goes first. Pure: it reads segments and changes none.

Two things can go: the state of an inner segment (its delta stays for what hangs below) and a leaf as a whole. They are
ordered by tier, then by worth: tokens that would have to be computed again, per byte, fading with age.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence
from enum import IntEnum
from typing import NamedTuple

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.engine.tree import Segment, resume_points

HALF_LIFE_SECONDS = 300.0
"""After this time without use a segment is worth half."""
RECENT_USER_TURNS = 3
RECENT_TURNS = 2
OLD_STATES = 2
"""States of a path that thinning leaves outside of its recent turns, if there are any."""
LEARNED_FORKS = 2
"""States before a fork that thinning treats like the end of system + tools, those worth most."""

_GOOD_FAITH = 4
"""Abandoned that a client may leave behind before it is taken for one that does not come back."""
_REMEMBERED_TAILS = 64
_REMEMBERED_CLIENTS = 256


class Tier(IntEnum):
    """Lower goes first."""

    SIDE = 0
    """A one-off request that nobody came back to."""
    SUPERSEDED = 1
    """An older state of a conversation."""
    RECENT = 2
    """A state at one of the last turns of a conversation."""
    CONVERSATION = 3
    """The newest state of a conversation: its end, or the end of its last prompt."""
    SHARED = 4
    """A prefix of several conversations, learned from where they parted as well, or system + tools."""
    PINNED = 5
    """System + tools of a client that was here lately."""


class Rank(NamedTuple):
    """What goes first compares lowest. `worth` is in tokens per byte, or in tokens within one path."""

    tier: Tier
    worth: float
    last_use: float
    key: bytes


def path_ranks(path: Sequence[Segment], rule: CutRule, pinned: Container[Segment]) -> dict[Segment, Rank]:
    """The ranks of the last resume point of a path and of the states above it, deepest first, worth in expected lost tokens.

    The last resume point is the conversation's newest state. What dropping another one loses is the stretch before it,
    times how likely a later request is to diverge right behind it: near the start (a changed system prompt) or near the end
    (an edited turn). This leaves old states at distances that grow like powers of two.
    """
    points = resume_points(path)
    ranks: dict[Segment, Rank] = {}
    if not points:
        return ranks
    end = path[-1].end
    prompts = users = turns = 0
    index = len(points)
    owed = False
    for segment in reversed(path):
        # A recent turn without a state of its own is reached from the state before it: that one is kept in its place.
        owed = owed or (segment.boundary == "user" and users < RECENT_USER_TURNS)
        owed = owed or (segment.boundary in ("user", "turn") and turns < RECENT_TURNS)
        users += segment.boundary == "user"
        turns += segment.boundary in ("user", "turn")
        if not segment.has_state:
            continue
        index -= 1
        recent, owed = owed, False
        before = points[index - 1].end if index else 0
        last = index == len(points) - 1
        if not last and not segment.state_bytes:
            continue
        behind = points[index + 1].end if not last else end
        if segment in pinned:
            tier = Tier.PINNED
        elif segment.kind == "side" and not segment.hits:
            tier = Tier.SIDE
        elif (segment.children and not _only_child(segment)) or (segment.boundary in ("system", "fork") and not last):
            tier = Tier.SHARED
        elif last or (segment.kind == "prompt" and not prompts):
            tier = Tier.CONVERSATION
        elif recent:
            tier = Tier.RECENT
        else:
            tier = Tier.SUPERSEDED
        prompts += segment.kind == "prompt"
        lost = (segment.end - before) * (1.0 if last else _divergence(segment.end, behind, end, rule))
        ranks[segment] = Rank(tier, lost, segment.last_use, segment.key)
    return ranks


def _divergence(start: int, stop: int, end: int, rule: CutRule) -> float:
    """How likely (a ratio) a later request leaves a conversation of `end` tokens between `start` and `stop`."""
    near = rule.minimum
    from_start = math.log((stop + near) / (start + near))
    from_end = math.log((end - start + near) / (end - stop + near))
    return from_start + from_end


def thinning_victim(path: Sequence[Segment], rule: CutRule, pinned: Container[Segment]) -> Segment | None:
    """The state of `path` to drop when it has too many, None if all are in use. Never the newest one."""
    ranks = path_ranks(path, rule, pinned)
    points = list(ranks)[1:]
    droppable = [
        segment for segment in points if not segment.tips and segment.state_bytes and ranks[segment].tier != Tier.PINNED
    ]
    old = [segment for segment in points if ranks[segment].tier <= Tier.SUPERSEDED]
    forks = sorted((segment for segment in points if segment.boundary == "fork"), key=lambda fork: ranks[fork])[-LEARNED_FORKS:]
    ends = [0, *(point.end for point in resume_points(path))]

    def order(segment: Segment) -> tuple[int, Rank]:
        tier = ranks[segment].tier
        if tier <= Tier.SUPERSEDED:
            group = 0 if len(old) > OLD_STATES else 2
        elif tier == Tier.RECENT:  # one that lies right behind another state is hardly missed
            group = 1 if segment.end - ends[bisect_left(ends, segment.end) - 1] <= rule.minimum else 3
        elif (
            tier == Tier.SHARED and segment.boundary != "system" and segment not in forks
        ):  # an old turn that was answered twice
            group = 2
        else:
            group = 4
        return (group, ranks[segment])

    return min(droppable, key=order, default=None)


def eviction_ranks(
    path: Sequence[Segment], rule: CutRule, pinned: Container[Segment], abandoned: Abandoned, now: float
) -> dict[Segment, Rank]:
    """The rank of everything in a path that could go now: states of inner segments and its leaf, worth per byte and age."""
    ranks: dict[Segment, Rank] = {}
    chance = abandoned.chance(path[-1]) if path else 1.0
    for segment, rank in path_ranks(path, rule, pinned).items():
        size = _freed_bytes(segment)
        if segment.tips or not size:
            continue
        age = max(0.0, now - segment.last_use)
        worth = rank.worth / size * max(1, segment.forks) / (1.0 + age / HALF_LIFE_SECONDS)
        if rank.tier <= Tier.CONVERSATION:
            worth *= chance
        ranks[segment] = Rank(rank.tier, worth, rank.last_use, rank.key)
    return ranks


def _freed_bytes(segment: Segment) -> int:
    """What evicting `segment` frees: the state of one that is needed, a leaf with the links that lead only to it."""
    if not segment.is_leaf or segment.leases:
        return segment.state_bytes
    size = segment.bytes
    above = segment.parent
    while above is not None and above.parent is not None and not above.has_state and not above.leases and _only_child(above):
        size += above.bytes
        above = above.parent
    return size


class Abandoned:
    """How often each client comes back to what it leaves behind.

    A tail is a leaf with everything above it up to the next fork. A client that drops its oldest turns on every request
    leaves a tail behind each time and never comes back to one; its newest must not push out conversations that go on.
    """

    def __init__(self) -> None:
        self._left: Counter[str] = Counter()
        self._reused: Counter[str] = Counter()

    def left(self, segment: Segment) -> None:
        """`segment` is new. It begins a tail if its parent had children before."""
        if segment.parent is None or segment.kind == "side":
            return
        if segment.parent.parent is None or segment.parent.forks > 1:
            if self._left[segment.label] >= _REMEMBERED_TAILS:
                self._left[segment.label] //= 2
                self._reused[segment.label] //= 2
            elif len(self._left) > _REMEMBERED_CLIENTS:
                self._left.clear()
                self._reused.clear()
            self._left[segment.label] += 1

    def reused(self, segment: Segment) -> None:
        """A request comes back to `segment`; call it before that counts as a hit."""
        if _only_child(segment) or segment.is_leaf:
            top = _tail_top(segment)
            if not top.hits and top.kind != "side":
                self._reused[top.label] += 1

    def chance(self, leaf: Segment) -> float:
        """How likely a request comes back to the tail that ends in `leaf`: 1 if one did, else what its client's past says."""
        top = _tail_top(leaf)
        if top.hits:
            return 1.0
        left, reused = self._left[top.label], self._reused[top.label]
        return min(1.0, (reused + _GOOD_FAITH) / (left + _GOOD_FAITH))


def _only_child(segment: Segment) -> bool:
    return len(segment.children) == 1 and sum(1 for _ in segment.each_child()) == 1


def _tail_top(segment: Segment) -> Segment:
    at = segment
    while at.parent is not None and at.parent.parent is not None and _only_child(at.parent):
        at = at.parent
    return at
