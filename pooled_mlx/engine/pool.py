"""The pool of prompt caches: a tree of immutable segments under one budget in bytes.

Pure policy over an abstract payload. Owned by the engine thread; nothing here is safe to call from another one.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from pooled_mlx.core.cuts import CutRule, Piece
from pooled_mlx.engine.eviction import Abandoned, Rank, Tier, eviction_ranks, thinning_victim
from pooled_mlx.engine.tree import (
    Boundary,
    Kind,
    Match,
    NoData,
    Segment,
    SegmentData,
    frozen,
    longest_match,
    newest_leaf,
)
from pooled_mlx.prompt.exact_ids import Ids, as_ids

__all__ = ["Boundary", "Kind", "Lease", "Match", "Pool", "Segment", "SegmentData"]

MOST_STATES = 8
"""States that one conversation keeps."""
MOST_PINS = 4


class Lease:
    """What one running request stands on: while it is held, its segments and the state at its tip stay in the pool."""

    def __init__(self, pool: Pool, tips: Sequence[Segment]) -> None:
        self._pool = pool
        self._tips: list[tuple[Segment, Segment]] = []
        self._hold(tips)

    def extend(self, tip: Segment) -> None:
        """The request now stands at the end of `tip`; what does not lead there is given back."""
        before = self._tips
        self._hold([tip])
        self._pool._unhold(before)

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        before, self._tips = self._tips, []
        self._pool._unhold(before)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _hold(self, tips: Sequence[Segment]) -> None:
        self._tips = [(tip, tip.resume_point()) for tip in tips]
        for tip, resume in self._tips:
            resume.tips += 1
            for segment in tip.path():
                segment.leases += 1


class Beside(Protocol):
    """What lies in memory beside the pool's segments."""

    @property
    def live_bytes(self) -> int:
        """What running requests hold."""
        ...

    @property
    def slack_bytes(self) -> int:
        """What can be freed without forgetting anything."""
        ...

    def trim(self, target_bytes: int) -> None:
        """Free slack until the pool uses at most `target_bytes`, as far as there is any."""
        ...


class Nothing:
    """There is nothing beside the segments."""

    live_bytes = 0
    slack_bytes = 0

    def trim(self, target_bytes: int) -> None:
        """Nothing to free."""


class Pool:
    """Finds, keeps and forgets segments. `used_bytes` never exceeds `budget_bytes` but for what is leased or live.

    `fingerprint` stands for everything that makes caches interchangeable (weights, dtype, versions, cut rule). `divisible`
    says that the model's cache can be cut at any token. `clock` gives seconds and never goes back. `counters` only grow.
    """

    def __init__(
        self,
        budget_bytes: int,
        fingerprint: bytes,
        *,
        divisible: bool,
        rule: CutRule,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.divisible = divisible
        self.rule = rule
        self.clock = clock
        self.root = Segment(None, frozen([]), NoData(), root_key=hashlib.sha256(fingerprint).digest())
        self.segment_bytes = 0
        self.beside: Beside = Nothing()
        self.counters: Counter[str] = Counter()
        self.pins: OrderedDict[str, Segment] = OrderedDict()
        self._highest = Tier.PINNED
        self._abandoned = Abandoned()

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, and of what running requests and sealed buffers take beside them."""
        return self.segment_bytes + self.beside.live_bytes + self.beside.slack_bytes

    def segments(self) -> Iterator[Segment]:
        """All segments, parents first, without the root."""
        tree = self.root.subtree()
        next(tree)
        return tree

    def leaves(self) -> list[Segment]:
        """The ends of all stored conversations."""
        return [segment for segment in self.segments() if segment.is_leaf]

    def lookup(self, ids: Sequence[int] | np.ndarray[Any, Any]) -> Match:
        """The longest stored beginning of a prompt that it can resume from, not all of it: at least one token must be computed
        to have logits. Changes nothing.
        """
        tokens = as_ids(ids)
        return longest_match(self.root, tokens, max(0, len(tokens) - 1), self.rule, divisible=self.divisible)

    def lease(self, match: Match, label: str = "") -> Lease:
        """Use a match: it counts as a hit and cannot be evicted until the lease is released.

        `label` is the client's name; its system + tools prefix becomes that client's pin.
        """
        now = self.clock()
        used = [*match.path, match.partial[0]] if match.partial else list(match.path)
        if used:
            self._abandoned.reused(used[-1])
        for segment in used:
            segment.hits += 1
            segment.last_use = now
            if segment.boundary == "system" and segment.kind != "side" and label:
                self._pin(label, segment)
        self.counters["hits" if match.tokens else "misses"] += 1
        return Lease(self, match.tips)

    def insert(
        self,
        parent: Segment,
        ids: Sequence[int] | np.ndarray[Any, Any],
        data: SegmentData,
        *,
        kind: Kind = "prompt",
        boundary: Boundary = "turn",
        label: str = "",
        lease: Lease | None = None,
    ) -> Segment | None:
        """Store `ids` below `parent` (`root` for the first segment) and move `lease` there. Takes over `data`.

        An equal segment that is stored already is returned instead. None, with `data` released, when there is no room, when
        `parent` has left the pool, or when nothing could ever resume from the segment (no state and no lease). Raises
        ValueError for an empty segment.
        """
        delta = frozen(ids)
        if not len(delta):
            raise ValueError("a segment needs at least one token")
        if not parent.held:
            return self._refuse(data, "parent gone")
        twin = self._child(parent, delta)
        if twin is not None:
            if lease is not None:
                lease.extend(twin)
            if boundary == "fork":
                self._mark_fork(twin)
            self._adopt(twin, data, kind)
            if not twin.held:
                return None
            segment = twin
        else:
            if not data.has_state and lease is None:
                return self._refuse(data, "no state")
            if not self._evict_for(parent, delta.nbytes + data.delta_bytes + data.state_bytes, data, kind):
                return self._refuse(data, "no room")
            segment = Segment(parent, delta, data, kind=kind, boundary=boundary, label=label, now=self.clock())
            parent.children.setdefault(int(delta[0]), []).append(segment)
            parent.forks += 1
            self._abandoned.left(segment)
            self._measure(segment)
            self.counters["inserted"] += 1
        for ancestor in segment.path():
            ancestor.last_use = self.clock()
        if boundary == "system" and kind != "side" and label:
            self._pin(label, segment)
        if lease is not None:
            lease.extend(segment)
        return segment

    def learn_fork(self, match: Match, pieces: Sequence[Piece], length: int, opening: int) -> int | None:
        """Where a prompt of `length` tokens that resumes from `match` should leave a state because it parts from a stored one.

        That is the last place before the fork where its `pieces` stop in any case, so that no cut moves; the last piece does
        not count, for a prompt that goes on does not stop at its end. None where no state is needed or nothing is learned:
        a divisible cache can be cut there anyway, and behind the `opening` (system prompt, tools, first turn) turns begin at
        checkpoints. A state that is stored there already is kept from now on as a prefix of several conversations.
        """
        fork = match.parted_at(length)
        if self.divisible or fork is None or fork >= opening:
            return None
        stop = max((piece.end for piece in pieces[:-1] if piece.end <= fork), default=match.tokens)
        if stop > match.tokens:
            return stop
        if match.parent is not None:
            self._mark_fork(match.parent)
        return None

    @staticmethod
    def _mark_fork(segment: Segment) -> None:
        if segment.boundary == "inside":
            segment.boundary = "fork"

    def make_room(self, size_bytes: int) -> bool:
        """Make `size_bytes` more fit into the budget. False, with nothing evicted for them, if they cannot.

        Slack goes before anything is evicted. What is above the budget already goes in any case, as far as it may.
        """
        target = self.budget_bytes - size_bytes
        if self._shrink(self.budget_bytes) and self.used_bytes <= target:
            return True
        if self.used_bytes - self.beside.slack_bytes - self.evictable_bytes() > target:
            return False
        return self._shrink(target)

    def set_budget(self, budget_bytes: int, *, keep_pins: bool = False) -> bool:
        """Change the budget and evict down to it. False if leased and live bytes alone are above it.

        With `keep_pins` what clients begin with stays beyond it, until the budget is set again.
        """
        self.budget_bytes = budget_bytes
        self._highest = Tier.SHARED if keep_pins else Tier.PINNED
        return self._shrink(budget_bytes)

    def recut(self, rule: CutRule) -> None:
        """Forget everything and cut by another rule from now on: nothing stored by one fits prompts cut by the other."""
        self.clear()
        self.rule = rule
        self.root = Segment(None, frozen([]), NoData(), root_key=hashlib.sha256(self.root.key + repr(rule).encode()).digest())

    def drop(self, segment: Segment, why: str) -> int:
        """Take a segment and everything below it out of the pool, leased or not. Returns the number of segments dropped."""
        if not segment.held or segment.parent is None:
            return 0
        dropped = list(segment.subtree())
        for gone in reversed(dropped):
            self._remove(gone)
        self.counters[f"dropped: {why}"] += len(dropped)
        self._prune(segment.parent)
        return len(dropped)

    def forget(self, label: str) -> None:
        """Take out what clients of this `label` stored, but what is leased or others have gone on from."""
        while ends := [leaf for leaf in self.leaves() if leaf.label == label and not leaf.leases]:
            for leaf in ends:
                if leaf.held:
                    self.drop(leaf, "forgotten")

    def clear(self) -> None:
        """Take everything out of the pool, leased or not."""
        for child in list(self.root.each_child()):
            self.drop(child, "cleared")

    def _refuse(self, data: SegmentData, why: str) -> None:
        data.release()
        self.counters[f"refused: {why}"] += 1

    def _child(self, parent: Segment, ids: Ids) -> Segment | None:
        for child in parent.children.get(int(ids[0]), ()):
            if child.tokens == len(ids) and np.array_equal(child.ids, ids):
                return child
        return None

    def _adopt(self, twin: Segment, data: SegmentData, kind: Kind) -> None:
        """The same segment was computed again: take the new arrays only if they bring back a state that was dropped."""
        self.counters["known"] += 1
        if twin.kind == "side":
            twin.kind = kind
        growth = twin.ids.nbytes + data.delta_bytes + data.state_bytes - twin.bytes
        with Lease(self, [twin]):  # what hangs below may have to go, and a link without a state goes with that
            if twin.has_state or not data.has_state or not self._evict_for(twin, max(0, growth), data, kind):
                data.release()
                return
            twin.data.release()
            twin.data = data
            self._measure(twin)
            with Lease(self, [twin]):
                for leaf in [segment for segment in twin.subtree() if segment.is_leaf]:
                    self._thin(leaf.path(), MOST_STATES)

    def _evict_for(self, parent: Segment, size_bytes: int, data: SegmentData, kind: Kind) -> bool:
        with Lease(self, [parent]):
            if data.state_bytes and (kind == "side") == (parent.kind == "side"):
                # The newest state of a conversation takes the place of an older one before anybody else loses anything.
                self._thin(parent.path(), MOST_STATES - 1)
            if kind == "side":
                return self._shrink(self.budget_bytes - size_bytes, Tier.SIDE)
            return self.make_room(size_bytes)

    def _thin(self, path: Sequence[Segment], most: int) -> None:
        """Leave at most `most` states in a path. A side request never thins the conversation that it hangs on."""
        if not path:
            return
        side = path[-1].kind == "side"
        while sum(1 for segment in path if segment.state_bytes and (segment.kind == "side") == side) > most:
            victim = thinning_victim(path, self.rule, set(self.pins.values()))
            if victim is None:
                return
            self._drop_state(victim)
            self.counters["states thinned"] += 1

    def _shrink(self, target_bytes: int, highest: Tier = Tier.PINNED) -> bool:
        """Evict until at most `target_bytes` are used once the slack is gone too; then free as much of that as needed.

        What ranks lowest goes first, and nothing above tier `highest`.
        """
        highest = min(highest, self._highest)
        if self.used_bytes - self.beside.slack_bytes <= target_bytes:
            self.beside.trim(target_bytes)
            return self.used_bytes <= target_bytes
        now, pinned = self.clock(), set(self.pins.values())
        current: dict[Segment, Rank] = {}
        heap: list[tuple[Rank, int, Segment]] = []
        order = itertools.count()

        def rank(leaf: Segment) -> None:
            for segment, value in eviction_ranks(leaf.path(), self.rule, pinned, self._abandoned, now).items():
                if current.get(segment) != value:
                    current[segment] = value
                    heapq.heappush(heap, (value, next(order), segment))

        for leaf in sorted(self.leaves(), key=lambda segment: (segment.last_use, segment.key)):
            rank(leaf)
        while heap and self.used_bytes - self.beside.slack_bytes > target_bytes:
            value, _, segment = heapq.heappop(heap)
            if not segment.held or current.get(segment) != value:
                continue
            if value.tier > highest:
                break
            del current[segment]
            self.counters[f"evicted: {value.tier.name.lower().replace('_', ' ')}"] += 1
            above = segment
            if segment.is_leaf and not segment.leases:
                above = self._evict(segment)
            else:
                self._drop_state(segment)
            if above.parent is not None:
                rank(newest_leaf(above))
        self.beside.trim(target_bytes)
        return self.used_bytes <= target_bytes

    def _evict(self, leaf: Segment) -> Segment:
        """Remove a leaf and what is useless without it; returns the nearest segment above that stays."""
        parent = leaf.parent
        assert parent is not None
        self._remove(leaf)
        return self._prune(parent)

    def _prune(self, segment: Segment) -> Segment:
        """Remove leaves that nothing can resume from, upwards; returns the segment where this ends."""
        while segment.parent is not None and segment.is_leaf and not segment.leases and not segment.has_state and segment.held:
            parent = segment.parent
            self._remove(segment)
            self.counters["stateless removed"] += 1
            segment = parent
        return segment

    def _remove(self, leaf: Segment) -> None:
        assert leaf.parent is not None
        assert leaf.is_leaf
        siblings = leaf.parent.children[int(leaf.ids[0])]
        siblings.remove(leaf)
        if not siblings:
            del leaf.parent.children[int(leaf.ids[0])]
        leaf.held = False
        self.segment_bytes -= leaf.bytes
        leaf.bytes = 0
        leaf.data.release()
        for label in [label for label, pinned in self.pins.items() if pinned is leaf]:
            del self.pins[label]

    def _drop_state(self, segment: Segment) -> None:
        segment.data.drop_state()
        self._measure(segment)

    def _measure(self, segment: Segment) -> None:
        size = segment.ids.nbytes + segment.data.delta_bytes + segment.state_bytes
        self.segment_bytes += size - segment.bytes
        segment.bytes = size

    def _pin(self, label: str, segment: Segment) -> None:
        self.pins[label] = segment
        self.pins.move_to_end(label)
        while len(self.pins) > MOST_PINS:
            self.pins.popitem(last=False)

    def evictable_bytes(self) -> int:
        """Bytes that could be evicted: what no running request stands on."""
        return sum(
            (0 if segment.tips else segment.state_bytes) if segment.leases else segment.bytes for segment in self.segments()
        )

    def _unhold(self, tips: Sequence[tuple[Segment, Segment]]) -> None:
        for tip, resume in tips:
            resume.tips -= 1
            for segment in tip.path():
                segment.leases -= 1
            end = tip
            while not end.held:
                assert end.parent is not None
                end = end.parent
            self._thin(self._prune(end).path(), MOST_STATES)
        self._shrink(self.budget_bytes)
