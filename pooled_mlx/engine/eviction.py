"""Which part of the pool goes first. Pure: it reads segments and changes none.

Two things can go: the state of an inner segment (its delta stays for what hangs below) and a leaf as a whole. They are
ordered by tier, then by worth: tokens that would have to be computed again, per byte, fading with age.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from pooled_mlx.engine.cuts import CutRule
from pooled_mlx.engine.segment_tree import Segment, resume_points

HALF_LIFE_SECONDS = 300.0
"""After this time without use a segment is worth half."""
RECENT_USER_TURNS = 3
RECENT_TURNS = 2
OLD_STATES = 2
"""States of a path that thinning leaves outside of its recent turns, if there are any."""
LIVING_TAILS = 8
"""Newest tails of one client that count as conversations although no request has come back to them yet."""


class Tier(IntEnum):
    """Lower goes first."""

    SIDE = 0
    """A one-off request that nobody came back to."""
    DEAD_TAIL = 1
    """A tail that nobody came back to, with many newer ones of the same client beside it."""
    SUPERSEDED = 2
    """An older state of a conversation."""
    RECENT = 3
    """A state at one of the last turns of a conversation."""
    CONVERSATION = 4
    """The newest state of a conversation: its end, or the end of its last prompt."""
    SHARED = 5
    """A prefix of several conversations, or system + tools."""
    PINNED = 6
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
    for index in range(len(points) - 1, -1, -1):
        segment = points[index]
        before = points[index - 1].end if index else 0
        last = index == len(points) - 1
        if not last and not segment.state_bytes:
            continue
        behind = points[index + 1].end if not last else end
        if segment in pinned:
            tier = Tier.PINNED
        elif segment.kind == "side" and not segment.hits:
            tier = Tier.SIDE
        elif len(list(segment.each_child())) > 1 or (segment.boundary == "system" and not last):
            tier = Tier.SHARED
        elif last or (segment.kind == "prompt" and not prompts):
            tier = Tier.CONVERSATION
        elif (segment.boundary == "user" and users < RECENT_USER_TURNS) or (
            segment.boundary in ("user", "turn") and turns < RECENT_TURNS
        ):
            tier = Tier.RECENT
        else:
            tier = Tier.SUPERSEDED
        prompts += segment.kind == "prompt"
        users += segment.boundary == "user"
        turns += segment.boundary in ("user", "turn")
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

    def order(segment: Segment) -> tuple[bool, Rank]:
        spared = ranks[segment].tier <= Tier.SUPERSEDED and len(old) <= OLD_STATES
        return (spared or ranks[segment].tier > Tier.RECENT, ranks[segment])

    return min(droppable, key=order, default=None)


def eviction_ranks(
    path: Sequence[Segment], rule: CutRule, pinned: Container[Segment], dead: Container[Segment], now: float
) -> dict[Segment, Rank]:
    """The rank of everything in a path that could go now: states of inner segments and its leaf, worth per byte and age."""
    ranks: dict[Segment, Rank] = {}
    for segment, rank in path_ranks(path, rule, pinned).items():
        size = segment.bytes if segment.is_leaf else segment.state_bytes
        if segment.tips or (segment.is_leaf and segment.leases) or not size:
            continue
        tier = rank.tier
        if segment in dead and Tier.SIDE < tier < Tier.SHARED:
            tier = Tier.DEAD_TAIL
        ranks[segment] = Rank(tier, rank.worth * _lasting(segment, now) / size, rank.last_use, rank.key)
    return ranks


def _lasting(segment: Segment, now: float) -> float:
    age = max(0.0, now - segment.last_use)
    return max(1, segment.forks) / (1.0 + age / HALF_LIFE_SECONDS)


def dead_tails(leaves: Iterable[Segment]) -> set[Segment]:
    """The segments of tails that no request came back to, except for each client's newest `LIVING_TAILS`.

    A tail is a leaf with everything above it up to the next fork. A client that drops its oldest turns on every request
    leaves one such tail behind each time.
    """
    dead: set[Segment] = set()
    seen: Counter[str] = Counter()
    for leaf in sorted(leaves, key=lambda segment: (-segment.created, segment.key)):
        tail: list[Segment] = []
        at: Segment | None = leaf
        while at is not None and at.parent is not None and (at is leaf or len(list(at.each_child())) == 1):
            tail.append(at)
            at = at.parent
        if any(segment.hits for segment in tail):
            continue
        seen[leaf.label] += 1
        if seen[leaf.label] > LIVING_TAILS:
            dead.update(tail)
    return dead
