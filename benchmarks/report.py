"""What every measurement shares: sizes from the command line, medians with quartiles, bars, one table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

RESULT_PREFIX = "result "
"""Begins the lines with `--json`, one JSON object for each result; all other lines are for people."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `met` is None where there is no bar."""

    what: str
    value: str
    bar: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """One argument of a script: its default, and its value with `--quick`."""

    name: str
    default: int | float | str
    quick: int | float | str
    help: str
    choices: tuple[str, ...] | None = None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile, interpolated. Raises ValueError for no values."""
    return percentile(values, 0.25), percentile(values, 0.5), percentile(values, 0.75)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all values lie, interpolated. Raises ValueError for no values."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points: one odd sample does not move it. 0.0 for fewer than two."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] != a[0]]
    return percentile(slopes, 0.5) if slopes else 0.0


def note(what: str, value: str) -> Result:
    """A result without a bar."""
    return Result(what, value)


def at_least(what: str, values: Sequence[float] | float, bar: float, unit: str = "") -> Result:
    """A result whose median must be `bar` or more."""
    middle, text = _summary(values, unit)
    return Result(what, text, f">= {_number(bar)}{unit}", middle >= bar)


def at_most(what: str, values: Sequence[float] | float, bar: float, unit: str = "") -> Result:
    """A result whose median must be `bar` or less."""
    middle, text = _summary(values, unit)
    return Result(what, text, f"<= {_number(bar)}{unit}", middle <= bar)


def measured(what: str, values: Sequence[float] | float, unit: str = "") -> Result:
    """A median with its quartiles, without a bar."""
    return Result(what, _summary(values, unit)[1])


def all_of(what: str, good: int, total: int) -> Result:
    """A result that must hold in every one of `total` cases."""
    return Result(what, f"{good} of {total}", "all", total > 0 and good == total)


def interleaved(rounds: int, runs: Sequence[Callable[[], float]]) -> list[tuple[float, ...]]:
    """Call all `runs` once in each round, every other round backwards, and return their values round by round."""
    rows = []
    for number in range(rounds):
        order = range(len(runs)) if number % 2 == 0 else range(len(runs) - 1, -1, -1)
        values = {index: runs[index]() for index in order}
        rows.append(tuple(values[index] for index in range(len(runs))))
    return rows


def ratios(rows: Iterable[tuple[float, ...]], over: int = 0, under: int = 1) -> list[float]:
    """Column `over` divided by column `under`, row by row."""
    return [row[over] / row[under] for row in rows]


def table(results: Sequence[Result]) -> str:
    """The results as aligned columns."""
    marks = {True: "met", False: "MISSED", None: ""}
    rows = [("MEASURED", "VALUE", "BAR", "")]
    rows += [(result.what, result.value, result.bar, marks[result.met]) for result in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def parse_results(lines: Iterable[str]) -> list[Result]:
    """The results among the lines that a script printed with `--json`."""
    return [Result(**json.loads(line[len(RESULT_PREFIX) :])) for line in lines if line.startswith(RESULT_PREFIX)]


def parse_sizes(sizes: Sequence[Size], description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line to values: what is given, else the default, or the quick value with `--quick`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, measures little")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each result")
    for size in sizes:
        text = f"{size.help} [default {size.default}, quick {size.quick}]"
        name = f"--{size.name.replace('_', '-')}"
        parser.add_argument(name, type=type(size.default), default=None, choices=size.choices, help=text, metavar="N")
    values = parser.parse_args(arguments)
    for size in sizes:
        if getattr(values, size.name) is None:
            setattr(values, size.name, size.quick if values.quick else size.default)
    return values


def main(description: str | None, sizes: Sequence[Size], run: Callable[[Any], Iterator[Result]]) -> None:
    """The whole of a script: parse, run, print each result as it comes and the table at the end; exit code 1 for a miss."""
    values = parse_sizes(sizes, description)
    results = []
    for result in run(values):
        results.append(result)
        print(RESULT_PREFIX + json.dumps(asdict(result)) if values.json else f"  {result.what}: {result.value}", flush=True)
    if not values.json:
        print("\n" + table(results))
    sys.exit(1 if any(result.met is False for result in results) else 0)


def _summary(values: Sequence[float] | float, unit: str) -> tuple[float, str]:
    if isinstance(values, int | float):
        return values, f"{_number(values)}{unit}"
    low, middle, high = quartiles(values)
    if len(values) == 1:
        return middle, f"{_number(middle)}{unit}"
    return middle, f"{_number(middle)}{unit} (quartiles {_number(low)} to {_number(high)}, {len(values)} runs)"


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1000 or (isinstance(value, int) and size >= 10):
        return f"{value:,.0f}"
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"
