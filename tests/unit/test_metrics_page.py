"""docs/metrics.md names the metrics that there are, with their types and labels."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pooled_mlx.core.events import Finished, Text, Usage
from pooled_mlx.metrics import Metrics, render_metrics
from tests.mac_fakes import health_body, pool_body

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def everything() -> str:
    metrics = Metrics()
    watch = metrics.watch("messages")
    for event in (Text("a"), Text("b"), Finished("stop", Usage(3, 2, 1, 0))):
        watch.event(event)
    metrics.error("queue_full")
    counters = {**pool_body()["counters"], "dropped: x": 1, "refused: x": 1}
    return render_metrics(health_body(), {**pool_body(), "counters": counters}, metrics)


def test_the_page_lists_every_metric_with_its_type_and_labels() -> None:
    real: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(everything()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        real[name] = (family.type, labels)
    rows = re.findall(r"^\| `(pooled_\w+)` \| (\w+) \|([^|]*)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == real


def test_queries_name_real_metrics() -> None:
    known = {sample.name for family in text_string_to_metric_families(everything()) for sample in family.samples}
    named = set(re.findall(r"\b(pooled_\w+)", PAGE.read_text(encoding="utf-8")))
    families = {family.name for family in text_string_to_metric_families(everything())}
    assert named <= known | families | {f"{name}_total" for name in families}
