"""Keeping what a row computed: segments at checkpoints, its last tokens when it ends, its cache for whoever goes on from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pooled_mlx.engine.pool import Kind, Pool, Segment
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.segments import Backing, SegmentData, bytes_of

_log = logging.getLogger("pooled.engine")

_MUCH = 4
"""A quarter: buffers grow by 256 tokens, which is more than that only where it is little."""


class NotFinite(Exception):
    """The model produced NaN or infinity."""


class HotCache:
    """The working cache of the row that ended last: whoever extends exactly its tokens takes it over without a copy."""

    def __init__(self, leaf: Segment, backing: Backing, parts: Sequence[SegmentData]) -> None:
        """`parts` are the payloads whose very bits the cache holds."""
        self.leaf, self.backing, self.parts = leaf, backing, list(parts)
        self._bytes = bytes_of(backing.layers)

    @property
    def usable(self) -> bool:
        """True while a lookup can still lead here, and the leaf's own arrays are those of this cache."""
        return self.leaf.held and self.leaf.has_state and data_of(self.leaf).reads(self.backing)

    @property
    def spare_bytes(self) -> int:
        """What it takes beyond the segments that read from it and the state at its end, which is the leaf's."""
        return max(0, self._bytes - self.backing.held_bytes - self.leaf.state_bytes)

    @property
    def is_double(self) -> bool:
        """True when much of it is a second copy of what segments have elsewhere, and not just room to grow."""
        return self.spare_bytes * _MUCH > self._bytes

    def reclaim(self) -> None:
        """Free the own arrays of segments whose bits are here."""
        for data in self.parts:
            if data.owned:
                data.lend(self.backing)

    def dissolve(self) -> None:
        """Give the segments that read from it arrays of their own and free the rest. It must not be used again."""
        try:
            self.backing.dissolve()
        except Exception:  # out of memory: the segments go on reading from the old cache
            _log.exception("segments could not be given arrays of their own")


def data_of(segment: Segment) -> SegmentData:
    """The arrays of a pool segment: this engine stores no other payload."""
    data = segment.data
    assert isinstance(data, SegmentData)
    return data


def store_segment(pool: Pool, row: Row, ids: Any, kind: Kind, end: int, *, fork: bool = False) -> None:
    """Insert the segment `row.lower..end` of the row's working cache and make it the row's new parent.

    `fork`: other prompts part from this one soon behind `end`. Raises `NotFinite` and stores nothing when a state or the
    delta is not finite.
    """
    if end <= row.lower:
        return
    assert row.backing is not None
    assert row.parent is not None
    data = SegmentData(row.backing, row.lower, end)
    if not data.finite(delta=True):
        data.release()
        raise NotFinite(f"the state after token {end} is not finite")
    # From here on these tokens count as the segment's; what the row holds beside it is measured again by the caller.
    pool.reserved_bytes -= min(pool.reserved_bytes, data.delta_bytes)
    segment = pool.insert(
        row.parent,
        ids[row.lower : end],
        data,
        kind="side" if row.is_side else kind,
        boundary=row.boundary_at(end, fork=fork),
        label=row.prepared.request.client,
        lease=row.lease,
    )
    if segment is None:
        return
    if segment.data is data:
        # Otherwise the pool had these tokens; its arrays may have been computed another way, in one piece or token by token.
        row.parts.append(data)
        row.own = row.own or segment
    row.parent, row.lower = segment, end


def finish_row(pool: Pool, row: Row, caches: list[Any], hot: HotCache | None) -> HotCache | None:
    """Store the row's tokens since its last checkpoint and return its cache as the hot one; None when it is of no use.

    `caches` are the row's own plain caches, `hot` is the cache that the new one would take the place of. A row that was
    cancelled while its prompt was read keeps the pieces read so far if a cold prompt would stop at the same place; a side
    request that was cancelled keeps only what it has in common with others, if it has that. Raises `NotFinite`.
    """
    if row.backing is None:  # the row was in a batch: these are its own caches, just cut out of it
        row.backing = Backing(caches)
    # A forced run is read as a whole: where the answer ended inside it, the states are those of tokens that were never said.
    said = len(row.out) > 0 and row.position == len(row.prompt.ids) + len(row.out)
    complete = said if row.decoding else row.at_cut
    if row.is_side and row.cancelled and row.parted_at is not None and row.parted_at >= pool.rule.minimum:
        _forget_own_tail(pool, row, row.parted_at)
    elif complete:
        store_segment(pool, row, row.ids, "answer" if row.out else "prompt", row.position)
    if row.parent is None or row.parent.end != row.position or not row.parent.held or row.parent.parent is None:
        return None
    new = HotCache(row.parent, row.backing, row.parts)
    if not new.usable or (hot is not None and row.is_side):  # a title or a summary is not what goes on
        return None
    for data in row.parts:
        if data.owned or (hot is not None and data.reads(hot.backing)):
            data.lend(row.backing)
    return new


def _forget_own_tail(pool: Pool, row: Row, parted_at: int) -> None:
    """Drop what the row stored behind the token at which it parted from others: a side request that was given up comes back
    with another end, if at all, and dozens of them would each leave a state.
    """
    if row.lease is not None:
        row.lease.release()
    while row.parent is not None and row.parent.end > parted_at and any(row.parent.data is part for part in row.parts):
        tail, above = row.parent, row.parent.parent
        if not tail.is_leaf or tail.leases or not tail.held:
            return
        pool.drop(tail, "abandoned")
        row.parent = above
