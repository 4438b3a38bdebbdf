"""How `pooled-mlx status` looks: a pure function from one look at the server to something rich can print."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pooled_mlx import __version__
from pooled_mlx.mac.facts import Running, Served, ServerFacts
from pooled_mlx.mac.words import bytes_text, count_text, percent_text, plural, seconds_text

if TYPE_CHECKING:
    from pooled_mlx.mac.status_command import Look

SHOWN_RECENT = 6
SHOWN_CONVERSATIONS = 8
SHOWN_LOG_LINES = 8
_TONES = {"ready": "green", "downloading": "yellow", "loading": "yellow", "stopping": "yellow", "locked": "yellow"}


def render(seen: Look, now: float) -> RenderableType:
    """Everything, from the most to the least urgent. `now` is in Unix seconds."""
    facts = seen.facts
    parts: list[RenderableType] = [_head(seen)]
    if facts.answers and facts.state != "locked":
        parts.append(_facts(facts))
        if facts.requests:
            parts += [Text(), _requests(facts.requests)]
        if facts.recent:
            parts += [Text(), _recent(facts.recent[:SHOWN_RECENT], now)]
        if seen.pool and seen.pool.get("conversations"):
            parts += [Text(), _pool(seen.pool)]
    if seen.refusal is not None:
        parts += [Text(), Text(f"Refused to start {_ago(now - seen.refusal.at)}: {seen.refusal.reason}", style="red")]
    if seen.crash is not None:
        parts += [Text(), _crash(seen, now)]
    return Group(*parts)


def _head(seen: Look) -> RenderableType:
    facts = seen.facts
    words = {"stopped": "not running", "locked": "running, wants a token"}.get(facts.state, facts.state)
    head = Text.assemble((f"● {words}", f"bold {_TONES.get(facts.state, 'red')}"), "  ", seen.url)
    if facts.version:
        head.append(f"  version {facts.version}", style="dim")
    if facts.uptime_seconds is not None:
        head.append(f"  up {seconds_text(facts.uptime_seconds)}", style="dim")
    lines: list[RenderableType] = [head]
    if facts.reason and facts.state != "stopped":
        lines.append(Text(facts.reason, style="yellow"))
    if facts.state == "locked":
        lines.append(Text("Give it with --token-file or POOLED_TOKEN.", style="dim"))
    if facts.state == "stopped":
        lines.append(Text("Start it with `pooled-mlx serve`.", style="dim"))
    if facts.version and facts.version != __version__:
        lines.append(Text(f"Version {__version__} is installed: restart the server to use it.", style="yellow"))
    if facts.progress is not None and not facts.ready:
        lines.append(_progress(facts))
    return Group(*lines)


def _progress(facts: ServerFacts) -> RenderableType:
    progress = facts.progress
    assert progress is not None
    row = Table.grid(padding=(0, 1))
    done, total = progress.done_bytes or 0, progress.total_bytes
    row.add_row(
        ProgressBar(total=total or 1, completed=done if total else 0, width=30),
        percent_text(done, total),
        f"{bytes_text(done)} of {bytes_text(total)}",
        f"{bytes_text(progress.bytes_per_second)}/s" if progress.bytes_per_second else "",
        f"{seconds_text(progress.seconds_left)} left" if progress.seconds_left is not None else "",
    )
    return row


def _facts(facts: ServerFacts) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    model = " · ".join(part for part in (facts.model_label, facts.quantization, facts.model_id) if part and part != "none")
    grid.add_row("Model", Text(model))
    grid.add_row("Context", f"{count_text(facts.context_tokens)} tokens")
    speed = f"{facts.tokens_per_second:.0f} tokens/s" if facts.tokens_per_second else "idle"
    served = f" · {count_text(facts.served)} served" if facts.served is not None else ""
    failed = f" · {count_text(facts.failed)} failed" if facts.failed else ""
    grid.add_row("Load", f"{facts.running} running · {facts.queued} waiting{served}{failed} · {speed}")
    memory = facts.memory
    if "pool_bytes" in memory:
        budget = memory.get("pool_budget_bytes")
        grid.add_row(
            "Pool", f"{bytes_text(memory['pool_bytes'])} of {bytes_text(budget)}  {percent_text(memory['pool_bytes'], budget)}"
        )
    used = max(memory.get("process_bytes", 0.0), memory.get("active_bytes", 0.0))
    if used:
        parts = [f"{bytes_text(used)} of {bytes_text(memory.get('limit_bytes'))}"]
        for key, name in (("weights_bytes", "weights"), ("live_bytes", "running requests"), ("wired_bytes", "wired")):
            if memory.get(key):
                parts.append(f"{name} {bytes_text(memory[key])}")
        grid.add_row("Memory", " · ".join(parts))
    return grid


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(
            head, justify="right" if head in ("CACHED", "PREFILLED", "GENERATED", "TOKENS", "BYTES", "HITS") else "left"
        )
    return table


def _requests(rows: tuple[Running, ...]) -> RenderableType:
    table = _table("NOW", "API", "STATE", "PROGRESS", "FOR")
    for row in rows:
        if row.state == "queued":
            state, progress = "waiting", f"{row.ahead} ahead" if row.ahead else "next"
        elif row.state == "prefill":
            state = f"reading {percent_text(row.prefill_done, row.prefill_total)}"
            progress = f"{count_text(row.prefill_done)} of {count_text(row.prefill_total)} tokens"
            progress += f", {count_text(row.cached)} reused" if row.cached else ""
        else:
            state, progress = "writing", f"{count_text(row.generated)} tokens"
            progress += f", {row.tokens_per_second:.1f} tokens/s" if row.tokens_per_second else ""
        table.add_row(Text(row.client), Text(row.api), state, progress, seconds_text(row.seconds))
    return table


def _recent(rows: tuple[Served, ...], now: float) -> RenderableType:
    table = _table("LAST", "CACHED", "PREFILLED", "GENERATED", "TOOK", "FINISH", "WHY")
    for row in rows:
        age = "" if row.finished_at is None else f" {_ago(now - row.finished_at)}"
        table.add_row(
            Text.assemble(row.client, (age, "dim")),
            count_text(row.cached_tokens),
            count_text(row.prefilled_tokens),
            count_text(row.completion_tokens),
            seconds_text(row.seconds),
            Text(row.finish),
            Text(row.why, style="dim"),
        )
    return table


def _pool(pool: Mapping[str, Any]) -> RenderableType:
    table = _table("POOL", "TOKENS", "BYTES", "HITS", "LAST USE")
    rows = _conversations(pool["conversations"])
    for row in rows[:SHOWN_CONVERSATIONS]:
        name = Text(str(row.get("label") or row.get("client") or "conversation"))
        if row.get("kind") == "side":
            name.append(" side request", style="dim")
        if row.get("in_use"):
            name.append(" in use", style="blue")
        table.add_row(
            name,
            count_text(row.get("end")),
            bytes_text(row.get("bytes")),
            count_text(row.get("hits")),
            _ago(row.get("age_seconds")),
        )
    total = pool.get("conversation_count")
    more = (total if isinstance(total, int) else len(rows)) - min(len(rows), SHOWN_CONVERSATIONS)
    return Group(table, Text(f"and {plural(more, 'more conversation')}", style="dim")) if more > 0 else table


def _conversations(nodes: Any) -> list[Mapping[str, Any]]:
    """The leaves of the pool's tree, the most recently used first."""
    leaves: list[Mapping[str, Any]] = []
    waiting = [nodes]
    while waiting:
        group = waiting.pop()
        for node in group if isinstance(group, list) else []:
            if isinstance(node, Mapping):
                if node.get("children"):
                    waiting.append(node["children"])
                else:
                    leaves.append(node)
    return sorted(leaves, key=lambda leaf: leaf.get("age_seconds") or 0.0)


def _crash(seen: Look, now: float) -> RenderableType:
    crash = seen.crash
    assert crash is not None
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(crash.at))
    tone = "red" if not seen.facts.ready else "yellow"
    lines = [
        Text(
            f"Last crash {when} ({_ago(now - crash.at)}), {crash.summary}, after {seconds_text(crash.ran_seconds)}", style=tone
        )
    ]
    lines += [Text(f"  {line}", style="dim") for line in crash.lines[-SHOWN_LOG_LINES:]]
    return Group(*lines)


def _ago(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "–"
    return "now" if seconds < 2 else f"{seconds_text(max(0, round(seconds)))} ago".replace(".0 s", " s")
