"""Runs the named measurements (all without a name), each in a process of its own, and prints one table."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import RESULT_PREFIX, Result, parse_results, table

NAMES = ("decode", "prefill", "concurrency", "fairness", "agent_trace", "pool_bytes", "constrained", "grammar_compile", "soak")


def run(name: str, more: list[str]) -> tuple[list[Result], int]:
    """One script's results and exit code; what it prints for people goes to standard error as it comes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if not line.startswith(RESULT_PREFIX):
            print(f"  {line.rstrip()}", file=sys.stderr)
    return parse_results(lines), process.wait()


def main() -> int:
    """Returns 1 when a script failed or a bar was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)} [default: all]")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, measures little")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no measurement {unknown[0]!r}; known are {', '.join(NAMES)}")
    results: list[Result] = []
    for name in options.names or NAMES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        found, code = run(name, ["--quick"] if options.quick else [])
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        results += [Result(f"{name}: {result.what}", result.value, result.bar, result.met) for result in found]
        if code and all(result.met is not False for result in found):
            results.append(Result(f"{name}: finished", f"exit code {code}", "0", False))
    print(table(results))
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
