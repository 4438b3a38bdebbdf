"""The whole answer is a fold of its events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Failed,
    Finished,
    Prefill,
    Queued,
    Reasoning,
    Text,
    Usage,
    check_order,
)
from pooled_mlx.core.request import ToolCall

USAGE = Usage(9, 5, 4, 2)
END = Finished("stop", USAGE, stop="###", cache_note="reused 4 of 9")


def test_text() -> None:
    answer = fold([Queued(1), Prefill(0, 9, 4), Text("a"), Text("b"), END])
    assert (answer.text, answer.reasoning, answer.calls, answer.cut_call) == ("ab", "", [], None)
    assert (answer.finish_reason, answer.stop, answer.usage, answer.cache_note) == ("stop", "###", USAGE, "reused 4 of 9")
    assert (answer.parts, answer.texts) == ([("text", 0)], ["ab"])


def test_nothing() -> None:
    answer = fold([Finished("length", USAGE)])
    assert (answer.text, answer.parts, answer.finish_reason) == ("", [], "length")


def test_parts_in_the_order_they_began() -> None:
    events: list[Event] = [Reasoning("r"), Reasoning("s"), Text("a"), CallStart(0, "c0", "f"), CallArguments(0, '{"x"')]
    events += [CallArguments(0, ":1}"), CallEnd(0), CallStart(1, "c1", "g"), CallEnd(1), Text("b"), END]
    answer = fold(events)
    assert (answer.reasoning, answer.text) == ("rs", "ab")
    assert answer.calls == [ToolCall("c0", "f", '{"x":1}'), ToolCall("c1", "g", "")]
    assert answer.parts == [("reasoning", 0), ("text", 1), ("call", 0), ("call", 1), ("text", 2)]
    assert answer.texts == ["rs", "a", "b"]


@pytest.mark.parametrize("arguments", [[], ['{"pa', 'th": "a']])
def test_a_cut_call_is_kept_apart(arguments: list[str]) -> None:
    complete: list[Event] = [CallStart(0, "c0", "f"), CallArguments(0, "{}"), CallEnd(0)]
    cut = [CallArguments(1, text) for text in arguments]
    answer = fold([*complete, CallStart(1, "c1", "g"), *cut, Finished("length", USAGE)])
    assert [call.id for call in answer.calls] == ["c0"]
    assert answer.cut_call == ToolCall("c1", "g", "".join(arguments))
    assert answer.parts == [("call", 0)]


@pytest.mark.parametrize("before", [[], [Text("half")], [CallStart(0, "c", "f")]])
def test_a_failure_is_raised(before: list[Event]) -> None:
    with pytest.raises(ApiError, match="NaN"):
        fold([*before, Failed(engine_failed("NaN"))])


PIECES = st.lists(st.tuples(st.sampled_from([Text, Reasoning]), st.text("ab ü\n👩", min_size=1, max_size=4)), max_size=12)


@given(PIECES, st.integers(1, 5))
def test_the_split_of_a_text_makes_no_difference(pieces: list[tuple[type, str]], size: int) -> None:
    whole: list[Event] = [*(kind(text) for kind, text in pieces), END]
    split: list[Event] = [kind(text[start : start + size]) for kind, text in pieces for start in range(0, len(text), size)]
    check_order(whole)
    assert fold([*split, END]) == fold(whole)
