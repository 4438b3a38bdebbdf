from __future__ import annotations

import pytest

from pooled_mlx.text.stop_strings import StopStrings
from tests.answers import says


def test_st08_a_stop_string_over_token_borders() -> None:
    outcome = says("alpha beta gamma delta", tools=(), stop=("beta gamma", "zzzzzzzz"))
    assert (outcome.text, outcome.stop, outcome.reason) == ("alpha ", "beta gamma", "stop")
    assert not any("b" in getattr(event, "text", "") for event in outcome.raw_events)


def test_st08_a_near_miss_is_released() -> None:
    stops = StopStrings(["beta gamma"])
    assert stops.add("alpha beta gam") == ("alpha ", None)
    assert stops.add("e") == ("beta game", None)


def test_only_what_may_still_match_is_held_back() -> None:
    stops = StopStrings(["<end>"])
    assert stops.add("a < b <en") == ("a < b ", None)
    assert stops.end() == "<en"
    assert stops.end() == ""


@pytest.mark.parametrize(
    ("stops", "text", "released", "stop"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bc", "abc"], "xabcd", "x", "abc"),
        (["aab"], "aaab", "a", "aab"),
        (["", "b"], "ab", "a", "b"),
    ],
)
def test_the_first_to_be_complete_wins_and_the_longer_of_two(stops: list[str], text: str, released: str, stop: str) -> None:
    whole = StopStrings(stops)
    assert whole.add(text) == (released, stop)
    single = StopStrings(stops)
    out = ""
    for char in text:
        piece, found = single.add(char)
        out += piece
        if found:
            break
    assert (out, found) == (released, stop)


def test_a_stop_string_never_applies_to_reasoning_or_calls() -> None:
    outcome = says(
        "STOP here</think>\n\nok <tool_call>\n<function=read_file>\n<parameter=path>\nSTOP\n</parameter>\n</function>\n"
        "</tool_call>\nthen STOP after",
        thinking=True,
        stop=("STOP",),
    )
    assert outcome.reasoning == "STOP here"
    assert outcome.calls == [("read_file", {"path": "STOP"})]
    assert outcome.text == "okthen "
    assert outcome.stop == "STOP"


def test_the_frame_around_a_thought_and_between_calls_triggers_no_stop() -> None:
    call = "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
    outcome = says(f"hm\n</think>\n\n{call}\n\n{call}", thinking=True, stop=("\n",))
    assert outcome.stop is None
    assert len(outcome.calls) == 2


def test_text_held_for_a_stop_goes_out_before_a_call() -> None:
    outcome = says(
        "abc<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>", stop=("abcd",)
    )
    assert outcome.text == "abc"
    assert len(outcome.calls) == 1
