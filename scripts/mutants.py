"""Tries the tests: makes small harmful changes to a copy of the checkout and looks whether the tests named for them fail.

    .venv/bin/python -m scripts.mutants              all of scripts/mutants.toml
    .venv/bin/python -m scripts.mutants parked twin  those whose names contain one of the words

Run it by hand before a release of the engine, and after code has moved. Exit code 1 when a change goes unnoticed, when a test
fails without any change, or when an entry is stale: its old text is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
_TEST_SECONDS = 300
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest; any other one means that it could not run what it was asked for."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `old` becomes `new` in `file`, and each of `tests` (pytest's names, files or words for -k) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_table(text: str) -> list[Mutant]:
    """The changes of a table in TOML. Raises ValueError for an entry without one of its fields, or a name used twice."""
    mutants: list[Mutant] = []
    for name, entry in tomllib.loads(text).items():
        missing = [field for field in ("file", "old", "new", "tests") if field not in entry]
        if missing or not entry["tests"]:
            raise ValueError(f"[{name}] has no {', '.join(missing) or 'tests'}; an entry needs file, old, new and tests")
        mutants.append(Mutant(name, entry["file"], entry["old"], entry["new"], tuple(entry["tests"])))
    return mutants


def changed(source: str, mutant: Mutant) -> str | None:
    """`source` with the change made, None where its old text is not there exactly once."""
    return source.replace(mutant.old, mutant.new) if source.count(mutant.old) == 1 else None


def copy_checkout(target: Path) -> None:
    """Copy all files that are, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit code for these tests in a copy, None when they do not come to an end, and what it printed."""
    environment = {
        "OPENBLAS_NUM_THREADS": "1",
        "POOLED_SHARED": str(ROOT.parent / "shared"),
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # two versions of a file within a second look alike to Python
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"not done after {_TEST_SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def try_one(folder: Path, mutant: Mutant) -> tuple[str, str]:
    """Make the change, run each of its tests, take it back. Returns the outcome and what to look at."""
    place = folder / mutant.file
    source = place.read_text() if place.is_file() else ""
    harmed = changed(source, mutant)
    if harmed is None:
        return "stale", f"the old text is {source.count(mutant.old)} times in {mutant.file}"
    place.write_text(harmed)
    try:
        for test in mutant.tests:
            code, output = run_tests(folder, [test])
            if code == _PASSED:
                return "UNNOTICED", test
            if code != _FAILED:
                return "NO RESULT", f"{test}: {output.strip().splitlines()[-1] if output.strip() else code}"
    finally:
        place.write_text(source)
    return "noticed", ", ".join(mutant.tests)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the chosen changes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only changes whose names contain one of these")
    options = parser.parse_args(arguments)
    chosen = [
        mutant
        for mutant in read_table(TABLE.read_text())
        if not options.words or any(word in mutant.name for word in options.words)
    ]
    if not chosen:
        print(f"No change in {TABLE.name} has a name with {' or '.join(options.words)}.")
        return 1
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_checkout(folder)
        code, output = run_tests(folder, sorted({test for mutant in chosen for test in mutant.tests}))
        if code != _PASSED:
            print(output)
            print("The tests must pass before anything is changed.")
            return 1
        width = max(len(mutant.name) for mutant in chosen)
        for mutant in chosen:
            outcome, detail = try_one(folder, mutant)
            wrong += outcome != "noticed"
            print(f"{outcome:<9}  {mutant.name:<{width}}  {detail}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} changes were noticed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
