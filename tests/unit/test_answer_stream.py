from __future__ import annotations

import pytest

from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Reasoning, Text
from pooled_mlx.core.request import Request, Thinking, ToolChoice
from tests.answers import READ, TAGS, PieceTable, byte_table, joined, json_call, says, stream_of, tokens, xml_call

FORMATS = ["plain", "hermes", "qwen3_coder"]


@pytest.mark.parametrize("chat_format", FORMATS)
def test_th01_and_th03_a_thought_cut_by_the_limit_is_all_reasoning(chat_format: str) -> None:
    outcome = says("the answer is not yet", chat_format, thinking=True, ends="length")
    assert outcome.events == [Reasoning("the answer is not yet")]
    assert outcome.reason == "length"


def test_th02_a_turn_that_ends_in_the_thought_is_shown_as_reasoning() -> None:
    outcome = says("the answer is 4", thinking=True)
    assert (outcome.events, outcome.reason) == ([Reasoning("the answer is 4")], "stop")


@pytest.mark.parametrize("chat_format", FORMATS)
def test_th04_without_thinking_all_is_answer(chat_format: str) -> None:
    assert says("the answer is 4", chat_format).events == [Text("the answer is 4")]


@pytest.mark.parametrize("chat_format", FORMATS)
@pytest.mark.parametrize("tags", [TAGS, ()])
def test_th05_one_rule_for_stray_tags(chat_format: str, tags: tuple[str, ...]) -> None:
    asked = {"tags": tags, "thinking": True}
    outcome = says("a</think>b<think>c</think>d", chat_format, **asked)
    assert outcome.events == [Reasoning("a"), Text("b<think>c</think>d")]
    assert says("</think>hi", chat_format, **asked).events == [Text("hi")]
    assert says("a</think>b</think>c", chat_format, **asked).events == [Reasoning("a"), Text("b</think>c")]
    assert says("<think>a</think>b", chat_format, **asked).events == [Reasoning("a"), Text("b")]


@pytest.mark.parametrize("chat_format", ["plain", "hermes", "qwen3_coder", "glm"])
@pytest.mark.parametrize(
    "said", ["<think>a</think>b", "b <think>", "</think>", "a</think>\n\nb", "x <think>\n</think> y", "<think>"]
)
def test_thinking_tags_are_text_where_thinking_is_off(chat_format: str, said: str) -> None:
    outcome = says(said, chat_format)
    assert (outcome.text, outcome.reasoning, outcome.notes) == (said, "", ())


def test_a_spelled_tag_after_an_empty_thought_is_text_in_its_place() -> None:
    said = "</think><think>x "
    assert says(said, "plain", tags=(), thinking=True).text == "<think>x "
    pieces = PieceTable(())
    whole = [pieces.token(said.encode())]
    assert says(whole, "plain", tags=(), table=pieces.table, thinking=True).text == "<think>x "


@pytest.mark.parametrize(
    ("chat_format", "tags", "said"),
    [
        ("hermes", TAGS, "<think>\n\n</think>\n\nHi"),
        ("gemma", ("<|channel>", "<channel|>"), "<|channel>thought\n<channel|>Hi"),
        ("gemma", ("<|channel>", "<channel|>"), "<|channel><channel|>Hi"),
    ],
)
def test_an_empty_thought_at_the_start_is_nothing(chat_format: str, tags: tuple[str, ...], said: str) -> None:
    assert says(said, chat_format, tags=tags).events == [Text("Hi")]


def test_a_model_without_thinking_tokens_may_write_the_tag_as_text() -> None:
    said = "The tag <think> opens a thought."
    assert says(said, "hermes", tags=()).text == said


def test_the_frame_of_a_thought_is_not_part_of_it() -> None:
    outcome = says("\nfirst\n\nsecond  \n</think>\n\n  answer\n", thinking=True)
    assert outcome.events == [Reasoning("first\n\nsecond"), Text("  answer\n")]
    opened = says("<think>\nhm\n</think>\n\nanswer", may_think=True)
    assert opened.events == [Reasoning("hm"), Text("answer")]


def test_whitespace_of_an_answer_without_calls_is_exact() -> None:
    said = "  two spaces before\n\n and after \n\n"
    assert says(said).text == said


def test_reasoning_tokens_are_counted_without_tags_and_calls() -> None:
    call = xml_call("read_file", path="a")
    assert says("abc</think>answer", thinking=True).reasoning_tokens == 3
    assert says(f"abc{call}", thinking=True).reasoning_tokens < 3 + len(call) - len("<parameter=path>")


def test_in_reasoning_is_off_inside_a_call_and_after_it() -> None:
    stream = stream_of(byte_table(), "hermes", Request("r", (), tools=(READ,)), thinking=True)
    seen: list[bool] = []
    for token in tokens(f"ab{json_call('read_file', path='a')}"):
        stream.feed(token)
        seen.append(stream.in_reasoning)
    assert seen[:2] == [True, True]
    assert not any(seen[-20:])
    stream.feed(ord("x"))
    assert stream.in_reasoning
    stream.feed(257)
    assert not stream.in_reasoning


def test_an_end_token_gives_nothing_and_nothing_follows_a_stop_string() -> None:
    table = byte_table()
    stream = stream_of(table, "plain", Request("r", (), stop=("x",)))
    assert stream.feed(max(table.eos_ids)) == []
    assert stream.feed(ord("a")) == [Text("a")]
    assert stream.feed(ord("x")) == []
    assert stream.stop == "x"
    assert stream.feed(ord("b")) == []
    assert stream.finish("stop") == []
    assert stream.finish_reason("stop") == "stop"


def test_an_end_token_ends_no_character() -> None:
    outcome = says([*"é".encode()[:1]])
    assert outcome.text == "�"


def test_a_tag_ends_an_unfinished_character() -> None:
    outcome = says([0xC3, 257, ord("a")], thinking=True)
    assert outcome.events == [Reasoning("�"), Text("a")]


def test_other_added_tokens_show_as_their_text() -> None:
    tags = (*TAGS, "<|fim_prefix|>")
    assert says("x <|fim_prefix|> y", tags=tags).text == "x <|fim_prefix|> y"


def test_finish_reasons() -> None:
    call = xml_call("read_file", path="a")
    assert says("hello").reason == "stop"
    assert says(call).reason == "tool_calls"
    assert says(call, tool_choice=ToolChoice("named", "read_file")).reason == "stop"
    assert says(call, ends="length").reason == "length"
    assert says("hello", ends="context_full").reason == "context_full"


def test_one_token_may_hold_a_whole_answer() -> None:
    pieces = PieceTable(())
    said = "Look:\n\n" + xml_call("read_file", path="a") + "\n" + xml_call("read_file", path="b")
    outcome = says([pieces.token(said.encode())], tags=(), table=pieces.table)
    assert outcome.events == [
        Text("Look:"),
        CallStart(0, "call-0", "read_file"),
        CallArguments(0, '{"path": "a"}'),
        CallEnd(0),
        CallStart(1, "call-1", "read_file"),
        CallArguments(1, '{"path": "b"}'),
        CallEnd(1),
    ]


def test_thinking_tags_are_read_from_text_only_where_thinking_was_asked_for() -> None:
    said = "<think>hm</think>hi"
    assert says(said, "hermes", tags=()).text == said
    stream = stream_of(byte_table(()), "hermes", Request("r", (), thinking=Thinking(on=True)))
    events = [event for char in said for event in stream.feed(ord(char))] + stream.finish("stop")
    assert joined(events) == [Reasoning("hm"), Text("hi")]
