"""The pool as JSON, for `GET /pool` and the status page. `docs/pool.md` describes the shape.

The engine thread owns the pool, everybody else reads the last snapshot that it took.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any

from pooled_mlx.core.errors import ApiError
from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.row import Row, Stage
from pooled_mlx.engine.tree import Segment
from pooled_mlx.prompt.exact_ids import ExactIds
from pooled_mlx.prompt.reasons import Reason

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
        "reserved_bytes": pool.beside.live_bytes,
        "spare_bytes": pool.beside.slack_bytes,
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
        "cut_rule": {
            "step": pool.rule.step,
            "spacing": pool.rule.spacing,
            "minimum": pool.rule.minimum,
            "shrinks": [list(shrink) for shrink in pool.rule.shrinks],
        },
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


# --- live and recent requests, rates

_RECENT = 50
_RATE_SECONDS = 300


_log = logging.getLogger("pooled.engine")


class Facts:
    """Follows rows from submission to their end. Satisfies the loop's `Observer`; every method is quick and thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Row] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._per_second: deque[tuple[int, int]] = deque(maxlen=_RATE_SECONDS)
        self.served = 0
        self.failed = 0
        self.repairs = 0
        self.began = time.monotonic()

    # --- the loop's side

    def submitted(self, row: Row) -> None:
        """A row was accepted."""
        if row.probe is not None:
            return
        with self._lock:
            self._live[row.id] = row

    def withdrawn(self, row: Row) -> None:
        """The row was refused after all."""
        with self._lock:
            self._live.pop(row.id, None)

    def started(self, row: Row) -> None:
        """The row left the queue; `Row.times.started` says when."""

    def prefilled(self, row: Row, tokens: int, seconds: float) -> None:
        """A piece was read; the row itself says how far it is."""

    def token(self, row: Row, count: int) -> None:
        """Count tokens into the second they came in."""
        if row.probe is not None:
            return
        now = int(time.time())
        with self._lock:
            if self._per_second and self._per_second[-1][0] == now:
                count += self._per_second.pop()[1]
            self._per_second.append((now, count))

    def ended(self, row: Row, error: ApiError | None) -> None:
        """The row is over."""
        if row.probe is not None:
            return
        now = time.monotonic()
        cancelled = error is None and row.finish is None
        record = {
            **_request(row, now),
            "finished_at": time.time(),
            "prompt_tokens": len(row.prompt.ids),
            "cached_tokens": row.cached_tokens,
            "prefilled_tokens": row.prefilled_tokens,
            "completion_tokens": len(row.out),
            "reasoning_tokens": row.answer.reasoning_tokens,
            **_drafts(row),
            "ttft_seconds": round(row.times.first_token - row.times.submitted, 3) if row.times.first_token else None,
            "finish": error.kind.name.lower() if error else "cancelled" if cancelled else row.finish,
            "why": row.cache_note,
        }
        for note in row.answer.notes:
            _log.warning("request %s: the answer was not in the form its model was taught: %s", row.id, note)
        with self._lock:
            self.repairs += len(row.answer.notes)
            self._live.pop(row.id, None)
            self._recent.append(record)
            if error is not None:
                self.failed += 1
            elif not cancelled:
                self.served += 1

    # --- the reader's side

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and are not over."""
        return len(self._live)

    def counts(self) -> tuple[int, int]:
        """How many requests wait and how many run."""
        with self._lock:
            rows = list(self._live.values())
        running = sum(1 for row in rows if row.times.started)
        return len(rows) - running, running

    def requests(self) -> list[dict[str, Any]]:
        """The live requests, in the order of their submission."""
        now = time.monotonic()
        with self._lock:
            rows = list(self._live.values())
        facts = [_request(row, now) for row in rows]
        for ahead, queued in enumerate(fact for fact in facts if fact["state"] == "queued"):
            queued["ahead"] = ahead
        return facts

    def recent(self) -> list[dict[str, Any]]:
        """The last finished requests, newest last."""
        with self._lock:
            return list(self._recent)

    def rates(self) -> list[dict[str, float]]:
        """Tokens per second over the last minutes, seconds without a token left out."""
        with self._lock:
            seconds = list(self._per_second)
        return [{"t": second, "tokens_per_second": count} for second, count in seconds]


def _drafts(row: Row) -> dict[str, int]:
    draft = row.draft
    return {"drafted_tokens": draft.drafted if draft else 0, "accepted_tokens": draft.accepted if draft else 0}


def _request(row: Row, now: float) -> dict[str, Any]:
    state = "queued" if not row.times.started else "decode" if row.stage in (Stage.WRITING, Stage.PARKED) else "prefill"
    spent = row.times.last_token - row.times.first_token
    return {
        "id": row.id,
        "client": row.prepared.request.client,
        "api": row.prepared.request.api,
        "state": state,
        "prefill_done": min(row.position, len(row.prompt.ids)),
        "prefill_total": len(row.prompt.ids),
        "cached": row.cached_tokens,
        "generated": len(row.out),
        **_drafts(row),
        "seconds": round(now - row.times.submitted, 3),
        "tokens_per_second": round((len(row.out) - 1) / spent, 2) if spent > 0 and len(row.out) > 1 else None,
    }
