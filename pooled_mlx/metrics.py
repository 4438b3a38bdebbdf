"""Prometheus metrics: what happened since the start, counted as it happens, and rendered as text for `GET /metrics`.

One `Metrics` object belongs to one server: there is no global registry. Any thread may call any method. `watch()` follows
one request through its event stream and does all the counting a server needs. `render_metrics` adds the gauges of
`/health` and `/pool` to the counters; a fact that is absent there is left out, never shown as 0.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

from pooled_mlx.core.errors import ErrorKind
from pooled_mlx.core.events import (
    CallArguments,
    CallStart,
    Event,
    Failed,
    Finished,
    Queued,
    Reasoning,
    Text,
    Usage,
)

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
INTER_TOKEN_BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 2.0, 5.0)
QUEUE_BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
REQUEST_BOUNDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the histogram buckets, in seconds. The last bucket, infinity, is implied."""

TOKEN_KINDS = ("prompt", "cached", "prefilled", "completion", "reasoning", "drafted", "accepted")
_GAPS_PER_BATCH = 64
_PIECES = frozenset({Reasoning, Text, CallStart, CallArguments})
_MEMORY = {
    "limit_bytes": "limit",
    "weights_bytes": "weights",
    "active_bytes": "active",
    "peak_bytes": "peak",
    "cache_bytes": "allocator_cache",
    "process_bytes": "process",
    "live_bytes": "running_requests",
}


class Distribution:
    """A histogram over fixed bounds. Not locked: its `Metrics` holds the lock."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value, in seconds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of values at or below it), in rising order, the last one "+Inf"."""
        rows: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(_bound_text, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


def _bound_text(bound: float) -> str:
    return repr(float(bound))


class Metrics:
    """Everything this process counted since it started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests: dict[tuple[str, str], int] = {}
        self._tokens: dict[str, int] = dict.fromkeys(TOKEN_KINDS, 0)
        self._errors: dict[str, int] = {}
        self._unenforced = 0
        self._first_token = Distribution(FIRST_TOKEN_BOUNDS)
        self._inter_token = Distribution(INTER_TOKEN_BOUNDS)
        self._queue = Distribution(QUEUE_BOUNDS)
        self._seconds = Distribution(REQUEST_BOUNDS)

    def request_finished(self, api: str, outcome: str, seconds: float | None = None) -> None:
        """One request is over. `outcome` is a finish reason, "error" or "cancelled"; `seconds` is its whole time."""
        with self._lock:
            key = (api, outcome)
            self._requests[key] = self._requests.get(key, 0) + 1
            if seconds is not None:
                self._seconds.add(seconds)

    def tokens(self, **counts: int) -> None:
        """Add token counts by their `TOKEN_KINDS`. cached + prefilled = prompt; reasoning is part of completion, accepted part
        of drafted."""
        with self._lock:
            for kind, count in counts.items():
                self._tokens[kind] += count

    def usage(self, usage: Usage) -> None:
        """Add the token counts of one finished request."""
        self.tokens(
            prompt=usage.prompt_tokens,
            cached=usage.cached_tokens,
            prefilled=usage.prompt_tokens - usage.cached_tokens,
            completion=usage.completion_tokens,
            reasoning=usage.reasoning_tokens,
            drafted=usage.drafted_tokens,
            accepted=usage.accepted_tokens,
        )

    def error(self, kind: ErrorKind | str) -> None:
        """One request was refused or failed."""
        name = kind.name.lower() if isinstance(kind, ErrorKind) else kind
        with self._lock:
            self._errors[name] = self._errors.get(name, 0) + 1

    def first_token(self, seconds: float) -> None:
        """Time from the arrival of a request to its first token."""
        with self._lock:
            self._first_token.add(seconds)

    def inter_token(self, seconds: float) -> None:
        """Time between two tokens of one answer."""
        with self._lock:
            self._inter_token.add(seconds)

    def inter_tokens(self, gaps_seconds: Iterable[float]) -> None:
        """Many gaps at once: one lock for all of them."""
        with self._lock:
            for gap in gaps_seconds:
                self._inter_token.add(gap)

    def queue_wait(self, seconds: float) -> None:
        """Time from the arrival of a request to the start of its prefill."""
        with self._lock:
            self._queue.add(seconds)

    def unenforced(self, count: int) -> None:
        """A request asked for so many schema keywords that nothing enforces."""
        with self._lock:
            self._unenforced += count

    def watch(self, api: str, clock: Callable[[], float] = time.monotonic) -> RequestWatch:
        """Follow one request from now on; `clock` returns seconds."""
        return RequestWatch(self, api, clock)

    def families(self) -> Iterator[Any]:
        """The prometheus_client metric families of the counters and histograms."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        with self._lock:
            requests, errors = dict(self._requests), dict(self._errors)
            tokens, unenforced = dict(self._tokens), self._unenforced
            timings = [
                (histogram.cumulative(), histogram.sum)
                for histogram in (self._first_token, self._inter_token, self._queue, self._seconds)
            ]

        family = CounterMetricFamily("pooled_requests", "Finished requests.", labels=["api", "outcome"])
        for (api, outcome), count in sorted(requests.items()):
            family.add_metric([api, outcome], count)
        yield family
        family = CounterMetricFamily(
            "pooled_tokens", "Tokens of finished requests; cached + prefilled = prompt.", labels=["kind"]
        )
        for kind, count in tokens.items():
            family.add_metric([kind], count)
        yield family
        family = CounterMetricFamily("pooled_errors", "Requests refused or failed.", labels=["kind"])
        for kind, count in sorted(errors.items()):
            family.add_metric([kind], count)
        yield family
        yield CounterMetricFamily(
            "pooled_unenforced_keywords", "Schema keywords of response formats that nothing enforces.", value=unenforced
        )
        for (name, text), (buckets, total) in zip(_HISTOGRAMS, timings, strict=True):
            yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)


_HISTOGRAMS = (
    ("pooled_time_to_first_token_seconds", "From the arrival of a request to its first token."),
    ("pooled_inter_token_latency_seconds", "Between two pieces of one answer."),
    ("pooled_request_queue_time_seconds", "From the arrival of a request to the start of its prefill."),
    ("pooled_request_duration_seconds", "From the arrival of a request to its end."),
)


class RequestWatch:
    """Counts one request from its events. Owned by one task; `event` costs about a microsecond.

    Call `event` for every event of the stream and `cancelled` when the client went away before the end.
    """

    __slots__ = ("_api", "_clock", "_done", "_first", "_gaps", "_last", "_metrics", "_started", "_waiting")

    def __init__(self, metrics: Metrics, api: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._api = api
        self._clock = clock
        self._started = clock()
        self._last = self._started
        self._first = True
        self._waiting = True
        self._done = False
        self._gaps: list[float] = []

    def event(self, event: Event) -> None:
        """Take the next event."""
        if type(event) is Queued:
            return
        now = self._clock()
        if self._waiting:
            self._waiting = False
            if not isinstance(event, Failed):
                self._metrics.queue_wait(now - self._started)
        if type(event) in _PIECES:
            if self._first:
                self._first = False
                self._metrics.first_token(now - self._started)
            else:
                self._gaps.append(now - self._last)
                if len(self._gaps) >= _GAPS_PER_BATCH:
                    self._flush()
            self._last = now
        elif isinstance(event, Finished):
            self._metrics.usage(event.usage)
            self._end(event.reason, now)
        elif isinstance(event, Failed):
            self._metrics.error(event.error.kind)
            self._end("error", now)

    def cancelled(self) -> None:
        """The client went away. Has no effect after the end of the stream."""
        self._end("cancelled", self._clock())

    def _end(self, outcome: str, now: float) -> None:
        if self._done:
            return
        self._done = True
        self._flush()
        self._metrics.request_finished(self._api, outcome, now - self._started)

    def _flush(self) -> None:
        if self._gaps:
            self._metrics.inter_tokens(self._gaps)
            self._gaps = []


def render_metrics(health: Mapping[str, Any], pool: Mapping[str, Any] | None = None, metrics: Metrics | None = None) -> str:
    """The text of `GET /metrics`, of `METRICS_CONTENT_TYPE`.

    `health` and `pool` are the bodies of `/health` and `/pool`. Keys that are missing or not numbers are left out.
    """
    from prometheus_client import generate_latest

    families = [*_health_families(health), *_pool_families(pool or {})]
    if metrics is not None:
        families += metrics.families()
    return generate_latest(_Families(families)).decode()  # pyright: ignore[reportArgumentType]


class _Families:
    """Stands where prometheus_client expects a registry: it only asks it to `collect`."""

    def __init__(self, families: Sequence[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return iter(self._families)


def _gauge(name: str, text: str, value: Any) -> list[Any]:
    from prometheus_client.core import GaugeMetricFamily

    return [] if not _is_number(value) else [GaugeMetricFamily(name, text, value=float(value))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _health_families(health: Mapping[str, Any]) -> list[Any]:
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    model = health.get("model")
    facts = model if isinstance(model, Mapping) else {}
    labels = {
        "version": health.get("version"),
        "model": facts.get("id"),
        "quantization": facts.get("quantization"),
    }
    info = InfoMetricFamily("pooled_server", "What this process serves.")
    info.add_metric([], {key: str(value) for key, value in labels.items() if value is not None})
    families: list[Any] = [info]
    families += _gauge("pooled_ready", "1 when the model is loaded and requests are taken.", health.get("ready"))
    families += _gauge("pooled_requests_running", "Requests in prefill or decode.", health.get("running"))
    families += _gauge("pooled_requests_queued", "Requests that wait for their turn.", health.get("queue"))
    families += _gauge("pooled_context_tokens", "The context of this server.", health.get("ctx"))
    families += _gauge("pooled_uptime_seconds", "Since the start of the process.", health.get("uptime_seconds"))
    memory = health.get("memory")
    if isinstance(memory, Mapping):
        families += _gauge("pooled_pool_bytes", "Bytes held by the KV pool.", memory.get("pool_bytes"))
        families += _gauge("pooled_pool_budget_bytes", "What the KV pool may hold.", memory.get("pool_budget_bytes"))
        family = GaugeMetricFamily("pooled_memory_bytes", "Memory of the process and its parts.", labels=["part"])
        for key, part in _MEMORY.items():
            if _is_number(memory.get(key)):
                family.add_metric([part], float(memory[key]))
        families.append(family)
    return families


_POOL_COUNTERS = (
    ("pooled_pool_lookups", "result", {"hits": "hit", "misses": "miss"}, "Requests that reused the pool, and that could not."),
    ("pooled_pool_inserted_segments", None, {"inserted": ""}, "Segments that were put into the pool."),
)
_POOL_REASONS = (
    ("pooled_pool_evictions", "tier", "evicted: ", "Segments that left the pool to make room."),
    ("pooled_pool_dropped_segments", "reason", "dropped: ", "Segments that left the pool for another reason."),
    ("pooled_pool_refused_segments", "reason", "refused: ", "Segments that were not taken into the pool."),
)


def _pool_families(pool: Mapping[str, Any]) -> list[Any]:
    from prometheus_client.core import CounterMetricFamily

    families: list[Any] = []
    counters = pool.get("counters")
    for name, key in (("segments", "segments"), ("conversations", "conversation_count"), ("tokens", "tokens")):
        families += _gauge(f"pooled_pool_{name}", f"{name.capitalize()} in the KV pool.", pool.get(key))
    if isinstance(counters, Mapping):
        for name, label, keys, text in _POOL_COUNTERS:
            family = CounterMetricFamily(name, text, labels=[label] if label else [])
            for key, value in keys.items():
                family.add_metric([value] if label else [], counters.get(key, 0))
            families.append(family)
        for name, label, prefix, text in _POOL_REASONS:
            family = CounterMetricFamily(name, text, labels=[label])
            for key, count in sorted(counters.items()):
                if key.startswith(prefix):
                    family.add_metric([key.removeprefix(prefix)], count)
            families.append(family)
    return families
