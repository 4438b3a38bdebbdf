"""`pooled-mlx status`: what the running server does, in the terminal; also how the last one ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.mac.address import AddressError, add_address_options, server_from
from pooled_mlx.mac.facts import ServerFacts
from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.places import Places, places
from pooled_mlx.mac.runs import Crash, Refusal, last_crash, read_refusal

READY, NOT_RUNNING, NOT_READY = 0, 1, 3
WATCH_SECONDS = 1.0

DESCRIPTION = f"""\
Shows the state of the server, its requests, its pool and why the last requests reused what they did. When no server
answers, it shows how the last one ended: a refusal to start, or a crash with the last lines of its log.

Exit codes: {READY} ready, {NOT_RUNNING} not running, {NOT_READY} running and not ready
(downloading, loading, failed, token missing).
"""


def add(subparsers: Any) -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "status",
        help="what the running server does",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address_options(parser)
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print everything as JSON; with --watch one object a line")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at everything. `pool` is the body of `/pool`, None when it cannot be had."""

    url: str
    facts: ServerFacts
    pool: Mapping[str, Any] | None
    crash: Crash | None
    refusal: Refusal | None

    @property
    def exit_code(self) -> int:
        """What the command returns."""
        if self.facts.ready:
            return READY
        return NOT_READY if self.facts.answers else NOT_RUNNING

    def as_json(self) -> dict[str, Any]:
        """For programs. Keys stay; more may come."""
        return {
            "url": self.url,
            "state": self.facts.state,
            "reason": self.facts.reason,
            "installed_version": __version__,
            "health": dict(self.facts.raw) or None,
            "pool": self.pool,
            "last_crash": None if self.crash is None else {**asdict(self.crash), "summary": self.crash.summary},
            "refusal": None if self.refusal is None else asdict(self.refusal),
        }


def look(server: LocalServer, where: Places) -> Look:
    """Ask the server and read the records."""
    facts = server.health()
    pool = server.pool() if facts.ready else None
    return Look(
        url=server.base_url,
        facts=facts,
        pool=pool if isinstance(pool, Mapping) else None,
        crash=last_crash(where),
        refusal=None if facts.answers else read_refusal(where),
    )


def run(
    args: argparse.Namespace,
    *,
    where: Places | None = None,
    sleep: Callable[[float], None] = time.sleep,
    console: Any = None,
) -> int:
    """Run the command; returns the exit code. The keyword arguments are for tests."""
    where = where or places()
    try:
        server = server_from(args, where)
    except AddressError as error:
        print(f"pooled-mlx status: {error}", file=sys.stderr)
        return NOT_RUNNING
    seen = look(server, where)
    if args.json:
        return _json(seen, server, where, sleep, watch=args.watch)
    from rich.console import Console

    from pooled_mlx.mac.status_view import render

    console = console or Console()
    if not args.watch:
        console.print(render(seen, time.time()))
        return seen.exit_code
    if not console.is_terminal:  # one look after the other; a live view would print nothing before its end
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                console.print(render(seen, time.time()))
                console.file.flush()
                sleep(WATCH_SECONDS)
                seen = look(server, where)
        return seen.exit_code
    from rich.live import Live

    with Live(render(seen, time.time()), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                sleep(WATCH_SECONDS)
                seen = look(server, where)
                live.update(render(seen, time.time()), refresh=True)
        except KeyboardInterrupt:
            pass
    return seen.exit_code


def _json(seen: Look, server: LocalServer, where: Places, sleep: Callable[[float], None], *, watch: bool) -> int:
    if not watch:
        print(json.dumps(seen.as_json(), indent=1))
        return seen.exit_code
    try:
        while True:
            print(json.dumps(seen.as_json()), flush=True)
            sleep(WATCH_SECONDS)
            seen = look(server, where)
    except KeyboardInterrupt:
        return seen.exit_code
