"""`pooled-mlx status`: the running server in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.catalog import format_size
from pooled_mlx.cli.common import table
from pooled_mlx.mac.address import AddressError, add_address_options, server_from
from pooled_mlx.mac.facts import Running, Served, ServerFacts
from pooled_mlx.mac.places import Places, places
from pooled_mlx.mac.runs import last_crash, read_refusal

_SHOWN_REQUESTS = 8


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "status",
        help="what the running server does",
        description="Exit code 0 when the server is ready, 1 otherwise.",
    )
    add_address_options(parser)
    parser.add_argument("--json", action="store_true", help="print /health and /pool as JSON")
    parser.add_argument("--watch", action="store_true", help="show it again every second until Ctrl-C")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, *, where: Places | None = None) -> int:
    """Run the command."""
    where = where or places()
    try:
        server = server_from(args, where)
    except AddressError as error:
        print(f"pooled-mlx status: {error}", file=sys.stderr)
        return 1
    while True:
        facts = server.health()
        pool = server.pool() if facts.ready else None
        if args.json:
            text = json.dumps({"health": dict(facts.raw), "pool": pool}, indent=1)
        else:
            text = render(facts, pool, server.base_url, where)
        if not args.watch:
            print(text)
            return 0 if facts.ready else 1
        sys.stdout.write(f"\x1b[H\x1b[2J{text}\n" if sys.stdout.isatty() else f"{text}\n\n")
        sys.stdout.flush()
        time.sleep(1)


def render(facts: ServerFacts, pool: Any, url: str, where: Places) -> str:
    """The view as text."""
    lines = [f"{url}  {facts.state}" + (f"  {facts.reason}" if facts.reason and not facts.ready else "")]
    if facts.state == "locked":
        lines.append("The server wants a token: --token-file or POOLED_TOKEN")
    if facts.version and facts.version != __version__:
        lines.append(f"It is version {facts.version}, this command is {__version__}: restart the server after an upgrade")
    if facts.model_label:
        context = f", {facts.context_tokens:,} tokens of context" if facts.context_tokens else ""
        lines.append(f"model     {facts.model_label}{f', {facts.quantization}' if facts.quantization else ''}{context}")
    if facts.ready:
        speed = f", {facts.tokens_per_second:.1f} tokens/s" if facts.tokens_per_second else ""
        lines.append(f"requests  {facts.running} running, {facts.queued} waiting, {facts.served or 0} served{speed}")
        lines += _memory(facts.memory)
        lines += _pool(pool)
        lines += _running(facts.requests[:_SHOWN_REQUESTS])
        lines += _recent(facts.recent[:_SHOWN_REQUESTS])
    if not facts.answers:
        lines += _ended(where)
    return "\n".join(lines)


def _memory(memory: Mapping[str, float]) -> list[str]:
    names = (
        ("weights_bytes", "weights"),
        ("pool_bytes", "pool"),
        ("pool_budget_bytes", "pool budget"),
        ("active_bytes", "in use"),
        ("limit_bytes", "limit"),
        ("process_bytes", "process"),
    )
    parts = [f"{name} {format_size(int(memory[key]))}" for key, name in names if key in memory]
    return [f"memory    {', '.join(parts)}"] if parts else []


def _pool(pool: Any) -> list[str]:
    if not isinstance(pool, Mapping):
        return []
    counters = pool.get("counters")
    facts = {**(counters if isinstance(counters, Mapping) else {}), **pool}
    names = (("segments", "segments"), ("states", "states"), ("hits", "hits"), ("misses", "misses"), ("evictions", "evicted"))
    parts = [f"{facts[key]} {name}" for key, name in names if isinstance(facts.get(key), int)]
    return [f"pool      {', '.join(parts)}"] if parts else []


def _running(rows: tuple[Running, ...]) -> list[str]:
    if not rows:
        return []
    cells = []
    for row in rows:
        if row.state == "prefill" and row.prefill_total:
            what = f"reading {(row.prefill_done or 0) / row.prefill_total:.0%} of {row.prefill_total} tokens"
        elif row.state == "queued":
            what = f"waiting, {row.ahead or 0} ahead"
        else:
            what = f"{row.generated or 0} tokens written"
        cells.append((row.client, row.api, what, f"{row.seconds or 0:.0f} s"))
    return ["", table(cells, ("CLIENT", "API", "NOW", "FOR"))]


def _recent(rows: tuple[Served, ...]) -> list[str]:
    if not rows:
        return []
    cells = [
        (
            row.client,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
            f"{row.seconds or 0:.1f} s",
            row.finish,
            row.why,
        )
        for row in rows
    ]
    return ["", table(cells, ("LAST", "PROMPT", "CACHED", "WRITTEN", "TOOK", "END", "CACHE"))]


def _ended(where: Places) -> list[str]:
    """Why a server that ran without a terminal is not there any more."""
    lines: list[str] = []
    if refusal := read_refusal(where):
        lines.append(f"the last start was refused: {refusal.reason}")
    if crash := last_crash(where):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(crash.at))
        lines.append(f"last crash {stamp}: {crash.summary}")
        lines += [f"  {line}" for line in crash.lines[-5:]]
    return lines
