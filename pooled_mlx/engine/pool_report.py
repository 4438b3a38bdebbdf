"""The pool as JSON, for `GET /pool` and the status page. `docs/pool.md` describes the shape.

The engine thread owns the pool, everybody else reads the last snapshot that it took.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from pooled_mlx.engine.exact_ids import ExactIds
from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.reasons import Reason
from pooled_mlx.engine.segment_tree import Segment

MOST_SEGMENTS = 500
MOST_CONVERSATIONS = 100
MOST_REASONS = 50
_SNAPSHOT_SECONDS = 0.5


class PoolReporter:
    """Takes snapshots of a pool. `explained` and `refresh` belong to the engine thread, `latest` to any."""

    def __init__(self, pool: Pool, exact_ids: ExactIds, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._exact_ids, self._clock = pool, exact_ids, clock
        self._reasons: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MOST_REASONS)
        self._snapshot: Mapping[str, Any] = {}
        self._taken = float("-inf")
        self.refresh(force=True)

    def explained(self, request_id: str, client: str, reason: Reason) -> None:
        """Note why a request was reused as far as it was."""
        self._reasons.append((self._clock(), {"request": request_id, "client": client, **reason.as_json()}))

    def refresh(self, *, force: bool = False) -> None:
        """Take a snapshot, at most every half second unless forced. Takes about a millisecond for 500 segments."""
        now = self._clock()
        if force or now - self._taken >= _SNAPSHOT_SECONDS:
            self._snapshot = pool_report(self._pool, self._exact_ids, now)
            reasons = [{**fields, "age_seconds": round(now - at, 1)} for at, fields in reversed(self._reasons)]
            self._snapshot = {**self._snapshot, "reasons": reasons}
            self._taken = now

    def latest(self) -> Mapping[str, Any]:
        """The last snapshot with its age."""
        snapshot, taken = self._snapshot, self._taken
        return {**snapshot, "snapshot_age_seconds": round(max(0.0, self._clock() - taken), 1)}


def pool_report(pool: Pool, exact_ids: ExactIds, now: float) -> dict[str, Any]:
    """What the pool holds at `now` (its clock's seconds): the most recently used segments and conversations first."""
    segments = list(pool.segments())
    leaves = [segment for segment in segments if segment.is_leaf]
    shown = heapq.nlargest(MOST_SEGMENTS, segments, key=_recency)
    newest = heapq.nlargest(MOST_CONVERSATIONS, leaves, key=_recency)
    return {
        "budget_bytes": pool.budget_bytes,
        "used_bytes": pool.used_bytes,
        "segment_bytes": pool.segment_bytes,
        "reserved_bytes": pool.reserved_bytes,
        "divisible": pool.divisible,
        "cut_rule": {"step": pool.rule.step, "spacing": pool.rule.spacing, "minimum": pool.rule.minimum},
        "counts": {
            "segments": len(segments),
            "states": sum(1 for segment in segments if segment.state_bytes),
            "conversations": len(leaves),
            "tokens": sum(segment.tokens for segment in segments),
        },
        "counters": dict(pool.counters),
        "pins": [
            {"client": label, "segment": _id(segment), "tokens": segment.end} for label, segment in reversed(pool.pins.items())
        ],
        "exact_ids": {"answers": len(exact_ids), "bytes": exact_ids.bytes, "budget_bytes": exact_ids.budget_bytes},
        "conversations": [_conversation(leaf, now) for leaf in newest],
        "segments": [_segment(segment, now) for segment in shown],
        "left_out": {"conversations": len(leaves) - len(newest), "segments": len(segments) - len(shown)},
        "reasons": [],
    }


def _recency(segment: Segment) -> tuple[float, bytes]:
    return segment.last_use, segment.key


def _id(segment: Segment) -> str:
    return segment.key.hex()[:16]


def _segment(segment: Segment, now: float) -> dict[str, Any]:
    parent = segment.parent
    return {
        "id": _id(segment),
        "parent": _id(parent) if parent is not None and parent.parent is not None else None,
        "start": segment.start,
        "end": segment.end,
        "bytes": segment.bytes,
        "state_bytes": segment.state_bytes,
        "resumable": segment.has_state,
        "kind": segment.kind,
        "boundary": segment.boundary,
        "client": segment.label,
        "hits": segment.hits,
        "in_use": segment.leases,
        "age_seconds": round(now - segment.created, 1),
        "idle_seconds": round(now - segment.last_use, 1),
    }


def _conversation(leaf: Segment, now: float) -> dict[str, Any]:
    path = leaf.path()
    own = len(path) - 1
    while own > 0 and sum(1 for _ in path[own - 1].each_child()) == 1:
        own -= 1
    tail = path[own:]
    return {
        "id": _id(leaf),
        "client": leaf.label,
        "side": leaf.kind == "side",
        "tokens": leaf.end,
        "shared_tokens": tail[0].start,
        "bytes": sum(segment.bytes for segment in path),
        "own_bytes": sum(segment.bytes for segment in tail),
        "states": sum(1 for segment in path if segment.has_state),
        "hits": tail[0].hits,
        "in_use": leaf.leases,
        "age_seconds": round(now - tail[0].created, 1),
        "idle_seconds": round(now - leaf.last_use, 1),
        "segments": [_id(segment) for segment in path],
    }
