"""The messages of a Chat Completions body become turns."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.request import Request, Turn

USER = {"role": "user", "content": "hi"}
NOTE = "[image omitted: this model reads text only]"


def parse(*messages: Any, **fields: Any) -> Request:
    return EDGE.parse({"messages": list(messages), **fields}, request_id="r1", client="test").request


def turns(*messages: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in parse(*messages).turns]


def refused(*messages: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(*messages)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value


def message(role: str, content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def call(call_id: str | None = "c1", name: str = "read_file", arguments: Any = '{"path":"a"}') -> dict[str, Any]:
    head = {} if call_id is None else {"id": call_id}
    return {**head, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_every_role() -> None:
    assert turns(message("system", "s"), USER, message("assistant", "a"), message("user", "b")) == [
        ("system", "s"),
        ("user", "hi"),
        ("assistant", "a"),
        ("user", "b"),
    ]


def test_leading_system_and_developer_messages_are_the_system_prompt() -> None:
    assert turns(message("system", "A"), message("developer", "B"), USER) == [("system", "A\n\nB"), ("user", "hi")]
    assert turns(message("developer", "Be brief."), USER)[0] == ("system", "Be brief.")


def test_late_system_message_joins_the_user_turn_before_it() -> None:
    assert turns(USER, message("developer", "now plan")) == [("user", "hi\n\nnow plan")]


def test_late_system_message_after_an_assistant_turn_joins_the_next_user_turn() -> None:
    got = turns(message("user", "a"), message("assistant", "b"), message("system", "mode: plan"), message("user", "c"))
    assert got == [("user", "a"), ("assistant", "b"), ("user", "mode: plan\n\nc")]


@pytest.mark.parametrize(("role", "said"), [("banana", "'banana'"), (None, "None"), (5, "5"), (["user"], "['user']")])
def test_unknown_role_names_its_place(role: Any, said: str) -> None:
    error = refused({"role": role, "content": "x"}, USER)
    assert error.param == "messages[0].role"
    assert said in error.message


def test_the_deprecated_function_role_is_refused() -> None:
    error = refused(USER, {"role": "function", "name": "f", "content": "x"})
    assert error.param == "messages[1].role"
    assert "tool" in error.message


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "I can't."}], "I can't."),
        (["bare ", "strings"], "bare strings"),
        ([{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], f"see {NOTE}"),
        ([{"type": "file", "file": {"file_id": "f1"}}], "[file omitted: this model reads text only]"),
    ],
)
def test_content_in_every_form(role: str, content: Any, text: str) -> None:
    assert parse(message(role, content), USER).turns[0].text == text


def test_absent_content_is_empty() -> None:
    assert turns({"role": "user"}, USER) == [("user", ""), ("user", "hi")]


@pytest.mark.parametrize("kind", ["input_audio", "audio"])
def test_audio_is_refused(kind: str) -> None:
    error = refused(message("user", [{"type": "text", "text": "listen"}, {"type": kind, "input_audio": {"data": ""}}]))
    assert error.param == "messages[0].content[1].type"
    assert "audio" in error.message


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (5, "messages[0].content"),
        ({"type": "text", "text": "x"}, "messages[0].content"),
        ([5], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "text", "text": 5}], "messages[0].content[0].text"),
        ([{"text": "x"}], "messages[0].content[0].type"),
        ([{"type": "hologram"}], "messages[0].content[0].type"),
        ([{"type": ["text"]}], "messages[0].content[0].type"),
    ],
)
def test_malformed_content_names_its_place(content: Any, param: str) -> None:
    assert refused(message("user", content)).param == param


@pytest.mark.parametrize("messages", [None, [], "hi", 5, {}])
def test_messages_must_be_a_list_with_something_in_it(messages: Any) -> None:
    with pytest.raises(ApiError) as caught:
        EDGE.parse({"messages": messages}, request_id="r", client="c")
    assert caught.value.param == "messages"


def test_a_message_must_be_an_object() -> None:
    assert refused("hi").param == "messages[0]"


def test_assistant_last_is_refused() -> None:
    for content in ("", "1, 2,", None):
        error = refused(USER, message("assistant", content))
        assert error.param == "messages"
        assert "prefill" in error.message


def test_a_system_message_after_the_last_assistant_message_is_answered() -> None:
    assert turns(USER, message("assistant", "a"), message("system", "go on")) == [
        ("user", "hi"),
        ("assistant", "a"),
        ("user", "go on"),
    ]


@pytest.mark.parametrize("only", [[message("system", "s")], [message("developer", "a"), message("system", "b")]])
def test_only_system_messages_are_refused(only: list[Any]) -> None:
    error = refused(*only)
    assert error.param == "messages"
    assert "system" in error.message


def test_no_user_message_left_after_compaction() -> None:
    got = turns(message("system", "s"), calling(call(), content="done so far"), message("tool", "42", tool_call_id="c1"))
    assert got == [("system", "s"), ("assistant", "done so far"), ("tool", "42")]


def test_messages_of_one_role_in_a_row_stay_apart() -> None:
    got = turns(
        *(message(role, text) for role, text in [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")]), USER
    )
    assert got == [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "hi")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"path": "a"}', '{"path": "a"}'),
        ({"path": "données"}, '{"path":"données"}'),
        ("", "{}"),
        ("  ", "{}"),
        (None, "{}"),
        ("{not json", "{not json"),
        ([1], "[1]"),
    ],
)
def test_past_call_arguments(arguments: Any, text: str) -> None:
    turn = parse(USER, calling(call(arguments=arguments)), message("tool", "x", tool_call_id="c1")).turns[1]
    assert [(item.id, item.name, item.arguments) for item in turn.tool_calls] == [("c1", "read_file", text)]


@pytest.mark.parametrize("extra", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_calls_without_content(extra: dict[str, Any]) -> None:
    request = parse(USER, calling(call(), **extra), message("tool", "x", tool_call_id="c1"))
    assert request.turns[1] == Turn("assistant", "", None, request.turns[1].tool_calls)
    assert request.turns[2] == Turn("tool", "x", tool_call_id="c1", name="read_file")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "20C"}], "20C"),
        ([{"type": "input_text", "text": "20C"}], "20C"),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}], f"a{NOTE}"),
    ],
)
def test_tool_results(content: Any, text: str) -> None:
    turn = parse(USER, calling(call()), message("tool", content, tool_call_id="c1")).turns[2]
    assert (turn.text, turn.tool_call_id, turn.name) == (text, "c1", "read_file")


def test_missing_ids_pair_results_with_calls_in_order() -> None:
    history = [calling(call(None, "a"), call(None, "b")), message("tool", "1"), message("tool", "2")]
    first, second = parse(USER, *history).turns[2:]
    assert (first.name, second.name) == ("a", "b")
    assert first.tool_call_id != second.tool_call_id
    assert parse(USER, *history).turns == parse(USER, *history).turns


def test_results_out_of_order_keep_their_names() -> None:
    got = parse(
        USER,
        calling(call("c1", "a"), call("c2", "b")),
        message("tool", "2", tool_call_id="c2"),
        message("tool", "1", tool_call_id="c1"),
    ).turns[2:]
    assert [(turn.name, turn.text) for turn in got] == [("b", "2"), ("a", "1")]


def test_a_result_without_its_call_is_kept() -> None:
    turn = parse(message("tool", "x", tool_call_id="gone", name="old"), USER).turns[0]
    assert (turn.text, turn.tool_call_id, turn.name) == ("x", "gone", "old")


@pytest.mark.parametrize(
    ("broken", "param"),
    [
        ({"id": "c1", "type": "function"}, "messages[1].tool_calls[0].function"),
        ({"id": "c1", "type": "function", "function": {"arguments": "{}"}}, "messages[1].tool_calls[0].function.name"),
        ({"id": 7, "type": "function", "function": {"name": "f"}}, "messages[1].tool_calls[0].id"),
        ({"id": "c1", "type": "custom", "custom": {"name": "f", "input": ""}}, "messages[1].tool_calls[0].type"),
        ("c1", "messages[1].tool_calls[0]"),
    ],
)
def test_malformed_past_calls_name_their_place(broken: Any, param: str) -> None:
    assert refused(USER, calling(broken), USER).param == param


def test_the_deprecated_function_call_of_a_message_is_refused() -> None:
    error = refused(USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, USER)
    assert error.param == "messages[1].function_call"
    assert turns(USER, message("assistant", "a", function_call=None), USER)[1] == ("assistant", "a")


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, None),
        ({"reasoning_content": None}, None),
        ({"reasoning_content": ""}, ""),
        ({"reasoning_content": "thought"}, "thought"),
        ({"reasoning": "thought"}, "thought"),
        ({"reasoning_content": "thought", "reasoning": "other"}, "thought"),
        ({"reasoning": {"effort": "high"}}, None),
        ({"content": [{"type": "thinking", "thinking": "thought"}, {"type": "text", "text": "a"}]}, "thought"),
    ],
)
def test_reasoning_sent_back(fields: dict[str, Any], reasoning: str | None) -> None:
    turn = parse(USER, {"role": "assistant", "content": "a", **fields}, USER).turns[1]
    assert (turn.text, turn.reasoning) == ("a", reasoning)


def test_a_refusal_sent_back_is_the_text() -> None:
    assert turns(USER, message("assistant", None, refusal="I can't."), USER)[1] == ("assistant", "I can't.")


def test_lone_surrogates_become_replacement_characters_and_nul_stays() -> None:
    history = [message("system", "\ud800s"), USER, calling(call(arguments={"k\udfff": "\udc00"}), content="\ud83d\ude00\x00")]
    request = parse(*history, message("tool", ["\udc00"], tool_call_id="c1"))
    texts = [turn.text for turn in request.turns]
    assert texts[0] == "\ufffds"
    assert texts[2].endswith("\x00")
    assert texts[3] == "\ufffd"
    assert request.turns[2].tool_calls[0].arguments == '{"k\ufffd":"\ufffd"}'
    assert "".join(texts).encode()


def test_too_many_messages() -> None:
    error = refused(*[USER] * 10_001)
    assert error.param == "messages"
    assert "10001" in error.message
    assert "10000" in error.message
    assert len(parse(*[USER] * 10_000).turns) == 10_000


def test_too_much_text() -> None:
    error = refused(message("user", "x" * 2_000_000), message("assistant", "y" * 2_000_000), message("user", "z"))
    assert "4000001" in error.message
    assert error.code == "context_length_exceeded"
    assert len(parse(message("user", "x" * 4_000_000)).turns) == 1
