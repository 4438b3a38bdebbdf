"""How sizes, times and counts are written for a person: one way for the menu, the terminal and the messages."""

from __future__ import annotations


def bytes_text(count: float | None) -> str:
    """`1536` -> `1.5 KiB`; "–" for an unknown size."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float | None) -> str:
    """`75` -> `1 min 15 s`; the two largest units; "–" for an unknown time."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name} {rest} {small_name}" if rest else f"{whole // size} {name}"
    raise AssertionError(whole)


def count_text(count: float | None) -> str:
    """`131072` -> `131,072`; "–" for an unknown count."""
    return "–" if count is None else f"{count:,.0f}"


def percent_text(part: float | None, whole: float | None) -> str:
    """`(41, 100)` -> `41 %`, rounded down so that 100 % means done; "" when either is unknown or the whole is 0."""
    if part is None or not whole:
        return ""
    return f"{int(min(part / whole, 1.0) * 100)} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`(2, "request")` -> `2 requests`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
