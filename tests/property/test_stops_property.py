from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pooled_mlx.text.stop_strings import StopStrings

letters = st.text("ab<", max_size=16)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character over the whole text: the first stop string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def incremental(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    out = ""
    for piece in pieces:
        released, stop = matcher.add(piece)
        out += released
        if stop is not None:
            return out, stop
    return out + matcher.end(), None


@given(stop_lists, st.lists(letters, max_size=8))
def test_any_split_agrees_with_the_naive_search(stops: list[str], pieces: list[str]) -> None:
    assert incremental(stops, pieces) == naive(stops, "".join(pieces))


@given(stop_lists, st.lists(letters, max_size=8))
def test_nothing_is_held_that_cannot_match(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    seen = out = ""
    for piece in pieces:
        seen += piece
        released, stop = matcher.add(piece)
        out += released
        if stop is not None:
            return
        held = seen[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
