"""Keeping what a row computed: segments at checkpoints, its last tokens when it ends, its cache for whoever goes on from it."""

from __future__ import annotations

from typing import Any

from pooled_mlx.engine.pool import Kind, Pool, Segment
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.segments import Backing, SegmentData, bytes_of


class NotFinite(Exception):
    """The model produced NaN or infinity."""


class HotCache:
    """The working cache of the row that ended last: whoever extends exactly its tokens takes it over without a copy."""

    def __init__(self, leaf: Segment, backing: Backing) -> None:
        self.leaf, self.backing = leaf, backing
        self._bytes = bytes_of(backing.layers)

    @property
    def usable(self) -> bool:
        """True while a lookup can still lead here, and the leaf's own arrays are those of this cache."""
        return self.leaf.held and self.leaf.has_state and data_of(self.leaf).reads(self.backing)

    @property
    def spare_bytes(self) -> int:
        """What it takes beyond the segments that read from it and the state at its end, which is the leaf's."""
        return max(0, self._bytes - self.backing.held_bytes - self.leaf.state_bytes)


def data_of(segment: Segment) -> SegmentData:
    """The arrays of a pool segment: this engine stores no other payload."""
    data = segment.data
    assert isinstance(data, SegmentData)
    return data


def store_segment(pool: Pool, row: Row, ids: Any, kind: Kind, end: int) -> None:
    """Insert the segment `row.lower..end` of the row's working cache and make it the row's new parent.

    Raises `NotFinite` and stores nothing when a state or the delta is not finite.
    """
    if end <= row.lower:
        return
    assert row.backing is not None
    assert row.parent is not None
    data = SegmentData(row.backing, row.lower, end)
    if not data.finite(delta=True):
        data.release()
        raise NotFinite(f"the state after token {end} is not finite")
    # From here on these tokens count as the segment's; what is reserved for the row is settled again by the caller.
    share = min(row.reserved_bytes, data.delta_bytes)
    row.reserved_bytes -= share
    pool.reserved_bytes -= share
    segment = pool.insert(
        row.parent,
        ids[row.lower : end],
        data,
        kind="side" if row.is_side else kind,
        boundary=row.boundary_at(end),
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


def finish_row(pool: Pool, row: Row, caches: list[Any]) -> HotCache | None:
    """Store the row's tokens since its last checkpoint and return its cache as the hot one; None when it is of no use.

    `caches` are the row's own plain caches. A row that was cancelled while its prompt was read keeps the pieces read so far if
    a cold prompt would stop at the same place. Raises `NotFinite`.
    """
    if row.backing is None:  # the row was in a batch: these are its own caches, just cut out of it
        row.backing = Backing(caches)
        for data in row.parts:
            data.lend(row.backing)
    # A forced run is read as a whole: where the answer ended inside it, the states are those of tokens that were never said.
    said = len(row.out) > 0 and row.position == len(row.prompt.ids) + len(row.out)
    complete = said if row.decoding else row.at_cut
    if complete:
        store_segment(pool, row, row.ids, "answer" if row.out else "prompt", row.position)
    if row.parent is None or row.parent.end != row.position or not row.parent.held or row.parent.parent is None:
        return None
    hot = HotCache(row.parent, row.backing)
    return hot if hot.usable else None
