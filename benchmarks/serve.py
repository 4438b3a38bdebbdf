"""The server program that is measured: `python -m benchmarks.serve MODEL` with a model of `benchmarks.models.KINDS`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.models import KINDS, make_room
from benchmarks.rooms import one_arena
from benchmarks.serving import serve_room
from pooled_mlx.engine.engine import EngineSettings


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("model", choices=sorted(KINDS))
    parser.add_argument("--step", type=int, help="tokens of a prefill piece [default: measured]")
    parser.add_argument("--script", type=Path, help="scripted answers")
    parser.add_argument("--pool-bytes", type=int, help="budget of the pool")
    parser.add_argument("--max-running", type=int, default=4, help="requests that run at once")
    parser.add_argument("--max-queue", type=int, default=16, help="requests that wait")
    parser.add_argument("--lag", action="store_true", help="record the lag of the event loop")
    parser.add_argument("--one-arena", action="store_true", help="one heap for all threads (Linux)")
    options = parser.parse_args()
    if options.one_arena:
        one_arena()
    settings = EngineSettings(
        prefill_step=options.step,
        pool_bytes=options.pool_bytes,
        max_running=options.max_running,
        max_queue=options.max_queue,
    )
    script = options.script.read_text(encoding="utf-8") if options.script else None
    serve_room(make_room(options.model, settings, script), lag=options.lag)


if __name__ == "__main__":
    main()
