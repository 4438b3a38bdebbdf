"""What a server said of itself on `/health`, read tolerantly: an absent or odd value is unknown, never an error."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """A download or load that is under way. Sizes in bytes, `bytes_per_second` and `seconds_left` where known."""

    stage: str = ""
    done_bytes: float | None = None
    total_bytes: float | None = None
    bytes_per_second: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """One request that waits or runs. `state` is "queued", "prefill" or "decode"."""

    id: str = ""
    client: str = "unknown"
    api: str = ""
    state: str = ""
    ahead: int | None = None
    prefill_done: int | None = None
    prefill_total: int | None = None
    cached: int | None = None
    generated: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One request that is over, with the reason for what its prefix did or did not reuse."""

    id: str = ""
    client: str = "unknown"
    finished_at: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prefilled_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None
    ttft_seconds: float | None = None
    finish: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One look at a server.

    `state` is the server's own ("downloading", "loading", "ready", "stopping", "failed") or ours: "stopped" when nothing
    answers, "foreign" when something else does, "locked" when it wants a token that we do not have, "silent" when a
    connection stands and no answer came. `reason` says why it is not ready.
    """

    state: str = "stopped"
    reason: str = ""
    version: str = ""
    model_id: str = ""
    model_card: str = ""
    model_label: str = ""
    quantization: str = ""
    context_tokens: int | None = None
    running: int = 0
    queued: int = 0
    served: int | None = None
    failed: int | None = None
    uptime_seconds: float | None = None
    progress: Progress | None = None
    requests: tuple[Running, ...] = ()
    recent: tuple[Served, ...] = ()
    tokens_per_second: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        """True when a pooled-mlx server answered, ready or not."""
        return self.state not in ("stopped", "foreign", "silent")

    @property
    def ready(self) -> bool:
        """True when requests are taken."""
        return self.state == "ready"


def read_health(body: Any, now: float | None = None) -> ServerFacts:
    """The facts in a decoded `/health` body, read at the Unix time `now`.

    Without a token a server that wants one says only whether it is up.
    """
    if not isinstance(body, Mapping) or "ok" not in body:
        return ServerFacts(state="foreign", reason="what answers there is not pooled-mlx")
    if "ready" not in body and "state" not in body and "model" not in body:
        return ServerFacts(state="locked", reason="the server wants a token", raw=body)
    model = _mapping(body.get("model"))
    state = _text(body.get("state")) or ("ready" if body.get("ready") else "failed" if not body.get("ok") else "loading")
    progress = _mapping(body.get("progress"))
    memory = {key: float(value) for key, value in _mapping(body.get("memory")).items() if _number(value) is not None}
    return ServerFacts(
        state=state,
        reason=_text(body.get("reason")),
        version=_text(body.get("version")),
        model_id=_text(model.get("id")),
        model_card=_text(model.get("card")),
        model_label=_text(model.get("label")) or _text(model.get("id")),
        quantization=_text(model.get("quantization")),
        context_tokens=_whole(body.get("ctx")) or _whole(model.get("context")),
        running=_whole(body.get("running")) or 0,
        queued=_whole(body.get("queue")) or 0,
        served=_whole(body.get("served")),
        failed=_whole(body.get("failed")),
        uptime_seconds=_number(body.get("uptime_seconds")),
        progress=_progress(progress) if progress else None,
        requests=tuple(_running(row) for row in _mappings(body.get("requests"))),
        recent=_newest_first(_served(row) for row in _mappings(body.get("recent"))),
        tokens_per_second=_rate(_mappings(body.get("rates")), time.time() if now is None else now),
        memory=memory,
        raw=body,
    )


def _progress(row: Mapping[str, Any]) -> Progress:
    return Progress(
        stage=_text(row.get("stage")),
        done_bytes=_number(row.get("done_bytes")),
        total_bytes=_number(row.get("total_bytes")),
        bytes_per_second=_number(row.get("bytes_per_second")),
        seconds_left=_number(row.get("seconds_left")),
    )


def _running(row: Mapping[str, Any]) -> Running:
    return Running(
        id=_text(row.get("id")),
        client=_text(row.get("client")) or "unknown",
        api=_text(row.get("api")),
        state=_text(row.get("state")),
        ahead=_whole(row.get("ahead")),
        prefill_done=_whole(row.get("prefill_done")),
        prefill_total=_whole(row.get("prefill_total")),
        cached=_whole(row.get("cached")),
        generated=_whole(row.get("generated")),
        seconds=_number(row.get("seconds")),
        tokens_per_second=_number(row.get("tokens_per_second")),
    )


def _served(row: Mapping[str, Any]) -> Served:
    return Served(
        id=_text(row.get("id")),
        client=_text(row.get("client")) or "unknown",
        finished_at=_number(row.get("finished_at")),
        prompt_tokens=_whole(row.get("prompt_tokens")),
        cached_tokens=_whole(row.get("cached_tokens")),
        prefilled_tokens=_whole(row.get("prefilled_tokens")),
        completion_tokens=_whole(row.get("completion_tokens")),
        seconds=_number(row.get("seconds")),
        ttft_seconds=_number(row.get("ttft_seconds")),
        finish=_text(row.get("finish")),
        why=_text(row.get("why")),
    )


def _newest_first(rows: Iterable[Served]) -> tuple[Served, ...]:
    return tuple(sorted(rows, key=lambda row: row.finished_at or 0.0, reverse=True))


def _rate(rows: Sequence[Mapping[str, Any]], now: float) -> float | None:
    """The mean over the last whole seconds; seconds without a token are not in `rows`. None while nothing is written."""
    last = int(now) - 1
    counts = {int(_number(row.get("t")) or 0): _number(row.get("tokens_per_second")) or 0.0 for row in rows}
    window = [counts.get(last - back, 0.0) for back in range(RATE_WINDOW_SECONDS)]
    busy = [count for count in window if count]
    return sum(busy) / len(busy) if busy else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [row for row in value if isinstance(row, Mapping)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
