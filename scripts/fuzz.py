"""Thousands of broken requests over HTTP, to a server without a model and to one with scripted answers; `make fuzz` runs it.

Exit code 1 when an answer was wrong: a 5xx, none at all, a wrong shape, or a server that is not idle in the end. Each request
is made of the seed and its number, so `--first N --requests 1` sends one of them again.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pooled_mlx.catalog import EMBEDDED_CARD, builtin_folder, load_catalog  # noqa: E402
from pooled_mlx.store import ensure_model  # noqa: E402
from tests.fuzz.run import AnsweringEngine, Report, fuzz  # noqa: E402

MOST_TOKENS = 24
BROKEN = ROOT / "build" / "fuzz"
_HANG_SECONDS = 600
_SHOWN = 20


@contextmanager
def engine_of(name: str) -> Iterator[Any]:
    """The fake engine, or a room with scripted answers."""
    if name == "fake":
        yield AnsweringEngine()
        return
    from pooled_mlx.store.gguf import convert_gguf
    from tests.fuzz.room import small_room

    embedded = ensure_model(load_catalog(builtin_folder()).cards[EMBEDDED_CARD], convert=convert_gguf)
    with tempfile.TemporaryDirectory() as folder, small_room(embedded, Path(folder)) as room:
        yield room


def show(name: str, report: Report, requests: int, seconds: float) -> None:
    """Print what a run found, and write the requests that got wrong answers to build/fuzz."""
    print(f"{name}: {requests} requests in {seconds:.1f} s, slowest {report.slowest[0]:.2f} s (request {report.slowest[1]})")
    for what, count in sorted(report.statuses.items()):
        print(f"  {what:42} {count}")
    for line in report.faults[:_SHOWN]:
        print(f"  WRONG {line}")
    print(f"  {len(report.faults)} wrong answers")
    for case in report.broken:
        BROKEN.mkdir(parents=True, exist_ok=True)
        (BROKEN / f"{name}-{case.number}.json").write_bytes(case.raw)


def main() -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("fake", "room", "both"), default="both")
    parser.add_argument("--requests", type=int, default=5000, help="requests to each engine (5000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first request (0)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other requests (0)")
    parser.add_argument("--clients", type=int, default=4, help="requests at the same time (4)")
    args = parser.parse_args()
    logging.getLogger("pooled").addHandler(logging.NullHandler())  # each broken tool has its warning
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
    wrong = 0
    for name in ("fake", "room") if args.engine == "both" else (args.engine,):
        with engine_of(name) as engine:
            began = time.monotonic()
            numbers = range(args.first, args.first + args.requests)
            report = asyncio.run(fuzz(engine, numbers, seed=args.seed, clients=args.clients, most_tokens=MOST_TOKENS))
            show(name, report, args.requests, time.monotonic() - began)
        wrong += len(report.faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
