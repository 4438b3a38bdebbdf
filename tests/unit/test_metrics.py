"""Counting and rendering for `GET /metrics`. The official text parser is the oracle of the rendering."""

from __future__ import annotations

import itertools
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pooled_mlx.core.errors import ErrorKind, queue_full
from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Failed,
    Finished,
    Prefill,
    Queued,
    Reasoning,
    Text,
    Usage,
)
from pooled_mlx.metrics import INTER_TOKEN_BOUNDS, Distribution, Metrics, render_metrics


class Clock:
    """Returns the set time; tests move it by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[(name, tuple(sorted(labels.items())))]


def test_a_request_is_counted_from_its_events_alone() -> None:
    metrics, clock = Metrics(), Clock()
    watch = metrics.watch("messages", clock)
    watch.event(Queued(2))
    clock.now += 3.0
    watch.event(Prefill(0, 1000, 800))
    clock.now += 1.0
    for event in (Reasoning("a"), Text("b"), CallStart(0, "c1", "read"), CallArguments(0, "{}"), CallEnd(0)):
        watch.event(event)
        clock.now += 0.025
    watch.event(Finished("tool_calls", Usage(1000, 40, 800, 10)))
    text = render_metrics({}, None, metrics)

    assert value(text, "pooled_requests_total", api="messages", outcome="tool_calls") == 1
    tokens = {
        kind: value(text, "pooled_tokens_total", kind=kind)
        for kind in ("prompt", "cached", "prefilled", "completion", "reasoning")
    }
    assert tokens == {"prompt": 1000, "cached": 800, "prefilled": 200, "completion": 40, "reasoning": 10}
    assert value(text, "pooled_request_queue_time_seconds_sum") == 3.0
    assert value(text, "pooled_time_to_first_token_seconds_sum") == 4.0
    assert value(text, "pooled_inter_token_latency_seconds_count") == 3
    assert value(text, "pooled_inter_token_latency_seconds_bucket", le="0.02") == 0
    assert value(text, "pooled_inter_token_latency_seconds_bucket", le="0.03") == 3
    assert value(text, "pooled_request_duration_seconds_sum") == pytest.approx(4.125)


def test_a_failed_request_is_an_error_by_kind_and_has_no_queue_wait() -> None:
    metrics = Metrics()
    watch = metrics.watch("responses", Clock())
    watch.event(Failed(queue_full(8)))
    watch.cancelled()
    metrics.error(ErrorKind.UNAUTHORIZED)
    text = render_metrics({}, None, metrics)
    assert value(text, "pooled_errors_total", kind="queue_full") == 1
    assert value(text, "pooled_errors_total", kind="unauthorized") == 1
    assert value(text, "pooled_requests_total", api="responses", outcome="error") == 1
    assert value(text, "pooled_request_queue_time_seconds_count") == 0
    assert ("pooled_requests_total", (("api", "responses"), ("outcome", "cancelled"))) not in samples(text)


def test_a_client_that_goes_away_is_counted_once() -> None:
    metrics = Metrics()
    watch = metrics.watch("chat_completions", Clock())
    watch.event(Text("a"))
    watch.event(Text("b"))
    watch.cancelled()
    watch.cancelled()
    text = render_metrics({}, None, metrics)
    assert value(text, "pooled_requests_total", api="chat_completions", outcome="cancelled") == 1
    assert value(text, "pooled_inter_token_latency_seconds_count") == 1


def test_long_answers_are_counted_in_batches_and_nothing_is_lost() -> None:
    metrics, clock = Metrics(), Clock()
    watch = metrics.watch("chat_completions", clock)
    for _ in range(1000):
        watch.event(Text("x"))
        clock.now += 0.01
    halfway = value(render_metrics({}, None, metrics), "pooled_inter_token_latency_seconds_count")
    assert 1000 - 64 <= halfway < 1000
    watch.event(Finished("stop", Usage(1, 1000)))
    assert value(render_metrics({}, None, metrics), "pooled_inter_token_latency_seconds_count") == 999


def test_threads_do_not_lose_counts() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(500):
            metrics.tokens(completion=1)
            metrics.inter_token(0.01)
            metrics.unenforced(2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = render_metrics({}, None, metrics)
    assert value(text, "pooled_tokens_total", kind="completion") == 2000
    assert value(text, "pooled_inter_token_latency_seconds_count") == 2000
    assert value(text, "pooled_unenforced_keywords_total") == 4000


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Distribution(INTER_TOKEN_BOUNDS)
    for bound in INTER_TOKEN_BOUNDS:
        histogram.add(bound)
    counts = [count for _, count in histogram.cumulative()]
    assert counts == [*range(1, len(INTER_TOKEN_BOUNDS) + 1), len(INTER_TOKEN_BOUNDS)]


def test_gauges_come_from_health_and_pool() -> None:
    health = {
        "version": "1.2.3",
        "ready": True,
        "model": {"id": "pooled/x", "quantization": "4bit"},
        "running": 2,
        "queue": 1,
        "ctx": 32768,
        "memory": {"pool_bytes": 10, "pool_budget_bytes": 100, "weights_bytes": 7, "process_bytes": None},
    }
    text = render_metrics(health, {"segments": 12, "conversation_count": 2, "tokens": None, "conversations": []})
    assert value(text, "pooled_ready") == 1
    assert value(text, "pooled_requests_running") == 2
    assert value(text, "pooled_requests_queued") == 1
    assert value(text, "pooled_context_tokens") == 32768
    assert value(text, "pooled_pool_bytes") == 10
    assert value(text, "pooled_pool_budget_bytes") == 100
    assert value(text, "pooled_memory_bytes", part="weights") == 7
    assert value(text, "pooled_pool_segments") == 12
    assert value(text, "pooled_pool_conversations") == 2
    assert value(text, "pooled_server_info", version="1.2.3", model="pooled/x", quantization="4bit") == 1


def test_the_pool_s_own_counters_are_shown() -> None:
    counters = {"hits": 5, "inserted": 9, "evicted: dead tail": 2, "evicted: pinned": 1, "dropped: poisoned": 4, "known": 3}
    text = render_metrics({}, {"counters": counters})
    assert value(text, "pooled_pool_lookups_total", result="hit") == 5
    assert value(text, "pooled_pool_lookups_total", result="miss") == 0
    assert value(text, "pooled_pool_inserted_segments_total") == 9
    assert value(text, "pooled_pool_evictions_total", tier="dead tail") == 2
    assert value(text, "pooled_pool_evictions_total", tier="pinned") == 1
    assert value(text, "pooled_pool_dropped_segments_total", reason="poisoned") == 4


def test_absent_facts_are_left_out_not_shown_as_zero() -> None:
    text = render_metrics({"running": None, "memory": None, "model": None}, None)
    names = {name for name, _ in samples(text)}
    assert names == {"pooled_server_info"}


def test_label_values_are_escaped() -> None:
    text = render_metrics({"model": {"id": 'a"b\\c\nd'}}, None)
    assert value(text, "pooled_server_info", model='a"b\\c\nd') == 1


def test_names_follow_the_conventions() -> None:
    metrics = Metrics()
    metrics.error("x")
    text = render_metrics(
        {"running": 1, "memory": {"pool_bytes": 1}}, {"segments": 3, "counters": {"evicted: oldest": 1}}, metrics
    )
    families = list(text_string_to_metric_families(text))
    assert len(families) > 10
    for family, sample in itertools.chain.from_iterable(((f, s) for s in f.samples) for f in families):
        assert sample.name.startswith("pooled_")
        assert family.documentation
        assert "millis" not in sample.name
        if family.type == "counter":
            assert sample.name.endswith("_total")
        if family.type == "histogram":
            assert "_seconds" in sample.name
