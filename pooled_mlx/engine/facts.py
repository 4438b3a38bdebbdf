"""What the engine can say about itself: live and recent requests, rates, memory. Read by `/health` from any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from pooled_mlx.core.errors import ApiError
from pooled_mlx.engine.row import Row

_log = logging.getLogger("pooled.engine")

_RECENT = 50
_RATE_SECONDS = 300


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
        with self._lock:
            self._live[row.id] = row

    def withdrawn(self, row: Row) -> None:
        """The row was refused after all."""
        with self._lock:
            self._live.pop(row.id, None)

    def started(self, row: Row) -> None:
        """The row left the queue; `Row.started_at` says when."""

    def prefilled(self, row: Row, tokens: int, seconds: float) -> None:
        """A piece was read; the row itself says how far it is."""

    def token(self, row: Row, count: int) -> None:
        """Count tokens into the second they came in."""
        now = int(time.time())
        with self._lock:
            if self._per_second and self._per_second[-1][0] == now:
                count += self._per_second.pop()[1]
            self._per_second.append((now, count))

    def ended(self, row: Row, error: ApiError | None) -> None:
        """The row is over."""
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
            "ttft_seconds": round(row.first_token_at - row.submitted_at, 3) if row.first_token_at else None,
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
        running = sum(1 for row in rows if row.started_at)
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


def _request(row: Row, now: float) -> dict[str, Any]:
    state = "queued" if not row.started_at else "decode" if row.decoding else "prefill"
    spent = row.last_token_at - row.first_token_at
    return {
        "id": row.id,
        "client": row.prepared.request.client,
        "api": row.prepared.request.api,
        "state": state,
        "prefill_done": min(row.position, len(row.prompt.ids)),
        "prefill_total": len(row.prompt.ids),
        "cached": row.cached_tokens,
        "generated": len(row.out),
        "seconds": round(now - row.submitted_at, 3),
        "tokens_per_second": round((len(row.out) - 1) / spent, 2) if spent > 0 and len(row.out) > 1 else None,
    }
