"""The pool as JSON, for `GET /pool` and the status page. `docs/pool.md` describes the shape.

The engine thread owns the pool, everybody else reads the last snapshot that it took.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any

from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.reasons import Reason
from pooled_mlx.engine.tree import Segment
from pooled_mlx.prompt.exact_ids import ExactIds

MOST_CONVERSATIONS = 100
MOST_SEGMENTS = 1000
MOST_REASONS = 50
_SNAPSHOT_SECONDS = 0.5


class PoolReporter:
    """Takes snapshots of a pool. `explained` and `refresh` belong to the engine thread, `latest` to any."""

    def __init__(self, pool: Pool, exact_ids: ExactIds, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._exact_ids, self._clock = pool, exact_ids, clock
        self._reasons: deque[tuple[float, bytes, dict[str, Any]]] = deque(maxlen=MOST_REASONS)
        self._snapshot: Mapping[str, Any] = {}
        self._taken = float("-inf")
        self.refresh(force=True)

    def explained(self, request_id: str, client: str, reason: Reason, segment: Segment | None = None) -> None:
        """Note why a request was reused as far as it was; `segment` is where it stands in the pool, if it does."""
        fields = {"request": request_id, "client": client, **reason.as_json()}
        self._reasons.append((self._clock(), segment.key if segment is not None else b"", fields))

    def refresh(self, *, force: bool = False) -> None:
        """Take a snapshot, at most every half second unless forced. Takes a few milliseconds for a thousand segments."""
        now = self._clock()
        if not force and now - self._taken < _SNAPSHOT_SECONDS:
            return
        notes = {key: fields["note"] for _, key, fields in self._reasons}
        reasons = [{**fields, "age_seconds": round(now - at, 1)} for at, _, fields in reversed(self._reasons)]
        self._snapshot = {**pool_report(self._pool, self._exact_ids, now, notes), "reasons": reasons}
        self._taken = now

    def latest(self) -> Mapping[str, Any]:
        """The last snapshot with its age."""
        snapshot, taken = self._snapshot, self._taken
        return {**snapshot, "snapshot_age_seconds": round(max(0.0, self._clock() - taken), 1)}


def pool_report(pool: Pool, exact_ids: ExactIds, now: float, notes: Mapping[bytes, str] | None = None) -> dict[str, Any]:
    """What the pool holds at `now` (its clock's seconds). `notes` are reasons by the key of a segment.

    Only the `MOST_CONVERSATIONS` used last are shown, with the details of at most `MOST_SEGMENTS` segments.
    """
    segments = list(pool.segments())
    leaves = [segment for segment in segments if segment.is_leaf]
    newest = heapq.nlargest(MOST_CONVERSATIONS, leaves, key=_recency)
    shown = {segment for leaf in newest for segment in leaf.path()}
    detailed = set(heapq.nlargest(MOST_SEGMENTS, shown, key=_recency))
    return {
        "budget_bytes": pool.budget_bytes,
        "used_bytes": pool.used_bytes,
        "segment_bytes": pool.segment_bytes,
        "reserved_bytes": pool.reserved_bytes,
        "spare_bytes": pool.spare_bytes,
        "segments": len(segments),
        "states": sum(1 for segment in segments if segment.state_bytes),
        "tokens": sum(segment.tokens for segment in segments),
        "conversation_count": len(leaves),
        "conversations": _nodes(pool.root, shown, detailed, now, notes or {}),
        "pins": [
            {"client": label, "id": _id(segment), "tokens": segment.end} for label, segment in reversed(pool.pins.items())
        ],
        "exact_ids": {"answers": len(exact_ids), "bytes": exact_ids.bytes, "budget_bytes": exact_ids.budget_bytes},
        "divisible": pool.divisible,
        "cut_rule": {"step": pool.rule.step, "spacing": pool.rule.spacing, "minimum": pool.rule.minimum},
        "counters": dict(pool.counters),
    }


def _nodes(
    root: Segment, shown: Container[Segment], detailed: Container[Segment], now: float, notes: Mapping[bytes, str]
) -> list[dict[str, Any]]:
    """The tree below `root`, each stretch without a fork as one node, the most recently used first."""
    nodes: list[dict[str, Any]] = []
    # Pairs of a segment and the list that its node goes into.
    waiting: list[tuple[Segment, list[dict[str, Any]]]] = _below(root, shown, nodes)
    while waiting:
        segment, siblings = waiting.pop()
        stretch = [segment]
        while stretch[-1].boundary != "system":
            below = [child for child in stretch[-1].each_child() if child in shown]
            if len(below) != 1:
                break
            stretch.append(below[0])
        children: list[dict[str, Any]] = []
        siblings.append({**_node(stretch, detailed, now, notes), "children": children})
        waiting.extend(_below(stretch[-1], shown, children))
    return nodes


def _below(
    segment: Segment, shown: Container[Segment], nodes: list[dict[str, Any]]
) -> list[tuple[Segment, list[dict[str, Any]]]]:
    return [(child, nodes) for child in sorted(segment.each_child(), key=_recency) if child in shown]


def _node(stretch: list[Segment], detailed: Container[Segment], now: float, notes: Mapping[bytes, str]) -> dict[str, Any]:
    last = stretch[-1]
    kind = "system" if last.boundary == "system" else "side" if last.kind == "side" else "conversation"
    if not last.is_leaf and kind == "conversation":
        kind = "shared"
    why = [notes[segment.key] for segment in stretch if segment.key in notes]
    return {
        "id": _id(last),
        "client": last.label,
        "label": f"{last.label or 'unknown'}: system + tools" if kind == "system" else last.label or "unknown",
        "kind": kind,
        "start": stretch[0].start,
        "end": last.end,
        "tokens": last.end - stretch[0].start,
        "bytes": sum(segment.bytes for segment in stretch),
        "states": sum(1 for segment in stretch if segment.state_bytes),
        "hits": stretch[0].hits,
        "in_use": stretch[0].leases,
        "age_seconds": round(now - max(segment.last_use for segment in stretch), 1),
        "lifetime_seconds": round(now - stretch[0].created, 1),
        "why": why[-1] if why else "",
        "segments": [_segment(segment) for segment in stretch if segment in detailed],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": _id(segment),
        "start": segment.start,
        "end": segment.end,
        "bytes": segment.bytes,
        "state_bytes": segment.state_bytes,
        "resumable": segment.has_state,
        "kind": segment.kind,
        "boundary": segment.boundary,
        "hits": segment.hits,
        "in_use": segment.leases,
    }


def _recency(segment: Segment) -> tuple[float, bytes]:
    return segment.last_use, segment.key


def _id(segment: Segment) -> str:
    return segment.key.hex()[:16]
