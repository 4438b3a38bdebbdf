"""The arithmetic and the parsing behind the benchmarks; nothing is measured here."""

from __future__ import annotations

import pytest

from benchmarks.agent_client import INCOMING, Turn, answers, calls_next, marker
from benchmarks.client import Stream, body_of
from benchmarks.prompts import script_text, words
from benchmarks.report import (
    Result,
    Size,
    all_of,
    at_least,
    at_most,
    interleaved,
    parse_results,
    parse_sizes,
    percentile,
    quartiles,
    ratios,
    slope,
    table,
)


def test_quartiles_are_interpolated() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0]) == (1.75, 2.5, 3.25)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert percentile(list(range(101)), 0.99) == 99
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


def test_one_odd_sample_does_not_move_the_slope() -> None:
    straight = [(float(x), 3.0 * x + 5) for x in range(10)]
    assert slope(straight) == pytest.approx(3.0)
    assert slope([*straight[:4], (4.0, 1e6), *straight[5:]]) == pytest.approx(3.0)
    assert slope([(1.0, 2.0)]) == 0.0


def test_bars_judge_the_median() -> None:
    assert at_least("x", [0.9, 0.98, 1.2], 0.97).met is True
    assert at_least("x", [0.9, 0.96, 1.2], 0.97).met is False
    assert at_most("x", [1.0, 2.0, 100.0], 2.0, " ms") == Result("x", "2 ms (quartiles 1.5 to 51, 3 runs)", "<= 2 ms", True)
    assert at_most("x", 3, 2).met is False
    assert all_of("x", 3, 3).met is True
    assert all_of("x", 0, 0).met is False


def test_rounds_are_interleaved_forth_and_back() -> None:
    seen: list[str] = []

    def run(name: str, value: float) -> float:
        seen.append(name)
        return value

    rows = interleaved(3, [lambda: run("a", 6.0), lambda: run("b", 3.0)])
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert rows == [(6.0, 3.0)] * 3
    assert ratios(rows) == [2.0] * 3
    assert ratios(rows, over=1, under=0) == [0.5] * 3


def test_sizes_come_from_the_command_line() -> None:
    sizes = (Size("pairs", 9, 3, "pairs"), Size("models", "both", "both", "which", ("small", "both")))
    assert parse_sizes(sizes, None, []).pairs == 9
    quick = parse_sizes(sizes, None, ["--quick", "--models", "small"])
    assert (quick.pairs, quick.models) == (3, "small")
    assert parse_sizes(sizes, None, ["--quick", "--pairs", "5"]).pairs == 5


def test_results_survive_the_way_between_processes() -> None:
    lines = ["a line for people\n", 'result {"what": "x", "value": "1", "bar": ">= 1", "met": true}\n']
    assert parse_results(lines) == [Result("x", "1", ">= 1", True)]
    text = table([Result("x", "1", ">= 1", True), Result("longer", "2"), Result("y", "0", ">= 1", False)])
    assert [line.split() for line in text.splitlines()] == [
        ["MEASURED", "VALUE", "BAR"],
        ["x", "1", ">=", "1", "met"],
        ["longer", "2"],
        ["y", "0", ">=", "1", "MISSED"],
    ]


def test_words_differ_with_the_seed_from_the_beginning() -> None:
    begins = {" ".join(words(50, seed).split()[:4]) for seed in range(2000)}
    assert len(begins) == 2000
    assert len(words(50, 3).split()) == 50
    assert len(words(2, 3).split()) == 2


def test_a_stream_knows_its_rates_and_gaps() -> None:
    seen = Stream(sent=9.0, times=[10.0, 10.5, 13.0, 13.5])
    assert seen.first_token_seconds == 1.0
    assert seen.rate == pytest.approx(3 / 3.5)
    assert seen.longest_gap() == 2.5
    assert seen.longest_gap(13.0, 14.0) == 0.5
    assert seen.rate_between(10.0, 13.0) == pytest.approx(2 / 3)
    seen.usage = {"completion_tokens": 8}
    assert seen.rate == pytest.approx(2.0)


def test_a_stream_becomes_the_message_that_a_client_sends_back() -> None:
    seen = Stream(sent=0.0)
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "I "},
        {"content": "look."},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"a"}'}}]},
    ]
    for at, delta in enumerate(deltas):
        seen.take({"choices": [{"delta": delta}]}, float(at))
    seen.take(
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}},
        9.0,
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    assert seen.message(reasoning=False) == message
    assert seen.message() == message | {"reasoning_content": "hm"}
    assert seen.times == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert (seen.prompt_tokens, seen.cached_tokens, seen.tokens) == (9, 4, 5)
    with pytest.raises(RuntimeError, match="broke off"):
        seen.take({"error": {"message": "gone"}}, 10.0)


def test_only_a_streamed_request_has_stream_options() -> None:
    class Target:
        model = "pooled"

    target: object = Target()
    streamed = body_of(target, [], 5)  # type: ignore[arg-type]
    assert streamed["stream"] is True
    assert streamed["stream_options"] == {"include_usage": True}
    whole = body_of(target, [], 5, stream=False, temperature=1)  # type: ignore[arg-type]
    assert (whole["stream"], whole["temperature"]) == (False, 1)
    assert "stream_options" not in whole


def test_every_turn_of_the_trace_finds_its_own_answer() -> None:
    lines = answers("xml")
    assert len(lines) == 2 * len(INCOMING)
    for turn in range(len(INCOMING)):
        for thinking in (False, True):
            fitting = [line for line in lines if line["match"] in f"some words {marker(turn, thinking)}"]
            assert len(fitting) == 1
            assert ("<tool_call>" in fitting[0]["text"]) == calls_next(turn)
            assert ("</think>" in fitting[0]["text"]) == thinking
    assert script_text(lines).count("\n") == len(lines)


def test_a_turn_counts_what_is_new() -> None:
    turn = Turn(prompt_tokens=500, cached_tokens=420, new_tokens=60, answer_tokens=10, first_token_seconds=0.1)
    assert turn.computed_tokens == 80
    assert turn.history_tokens == 440
