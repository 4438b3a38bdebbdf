"""The legal order of events."""

from __future__ import annotations

import pytest

from pooled_mlx.core.errors import engine_failed
from pooled_mlx.core.events import (
    LEGAL_NEXT,
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

END = Finished("stop", Usage())
FAILED = Failed(engine_failed("x"))
START, ARGUMENTS, CALL_END = CallStart(0, "c", "f"), CallArguments(0, "{}"), CallEnd(0)


@pytest.mark.parametrize(
    "events",
    [
        [END],
        [FAILED],
        [Queued(2), Queued(1), Prefill(0, 9, 0), Prefill(9, 9, 0), Text("a"), END],
        [Prefill(0, 9, 0), Queued(1), Prefill(0, 9, 0), END],
        [Reasoning("r"), Text("a"), Reasoning("s"), Text("b"), END],
        [Text("a"), START, ARGUMENTS, ARGUMENTS, CALL_END, CallStart(1, "d", "g"), CallEnd(1), END],
        [START, END],
        [START, ARGUMENTS, END],
        [START, ARGUMENTS, CALL_END, Text("after"), END],
        [START, FAILED],
        [Queued(0), FAILED],
    ],
)
def test_legal(events: list[Event]) -> None:
    check_order(events)


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([], "no end"),
        ([Text("a")], "no end"),
        ([END, END], "Finished after Finished"),
        ([FAILED, Text("a")], "Text after Failed"),
        ([ARGUMENTS, END], "CallArguments after start"),
        ([CALL_END, END], "CallEnd after start"),
        ([Text("a"), Queued(1), END], "Queued after Text"),
        ([Text("a"), Prefill(1, 2, 0), END], "Prefill after Text"),
        ([START, Text("a"), END], "Text after CallStart"),
        ([START, START, END], "CallStart after CallStart"),
        ([START, CALL_END, CALL_END, END], "CallEnd after CallEnd"),
        ([START, CALL_END, CallStart(0, "d", "g"), END], "call index 0 after 0"),
        ([CallStart(1, "c", "f"), END], "call index 1 after -1"),
        ([START, CallArguments(1, "{}"), END], "call 1 while call 0"),
        ([START, CallEnd(1), END], "call 1 while call 0"),
    ],
)
def test_illegal(events: list[Event], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_order(events)


def test_the_table_knows_every_event() -> None:
    classes = {Queued, Prefill, Reasoning, Text, CallStart, CallArguments, CallEnd, Finished, Failed}
    assert set(LEGAL_NEXT) == classes | {None}
    assert {following for legal in LEGAL_NEXT.values() for following in legal} == classes
