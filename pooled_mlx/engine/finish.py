"""Keeping what a row computed when it ends: its last segment, and its cache for whoever goes on from it."""

from __future__ import annotations

from typing import Any

from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.prefill import HotCache, data_of, store_segment
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.segments import Backing


def finish_row(pool: Pool, row: Row, caches: list[Any]) -> HotCache | None:
    """Store the row's tokens since its last checkpoint and return its cache as the hot one; None when it was not stored.

    `caches` are the row's own plain caches: they hold the prompt and every reported token, or, for a row that was cancelled
    while its prompt was read, the pieces read so far (a piece's end lies on the step grid, so that going on from there is
    exact). Raises `NotFinite`.
    """
    if row.backing is None or row.backing.caches is not caches:
        row.backing = Backing(caches)  # the row was in a batch: these are its own caches, just cut out of it
        for segment in row.parent.path():
            data_of(segment).lend(row.backing)
    end = len(row.prompt.ids) + len(row.out) if row.decoding else row.position
    store_segment(pool, row, row.ids, "answer" if row.out else "prompt", end)
    if not row.parent.held or row.parent.end != end:
        return None
    return HotCache(row.parent, row.backing)
