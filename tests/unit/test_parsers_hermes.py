from __future__ import annotations

import json

import pytest

from pooled_mlx.core.events import CallArguments, CallStart, Text
from pooled_mlx.core.request import Tool, ToolChoice
from tests.answers import PATCH, READ, TAGS, WRITE, Outcome, json_call, says

CALL = json_call("read_file", path="a.txt")


def both(text: str, tools: tuple[Tool, ...] = (READ,), **more: object) -> Outcome:
    """The outcome with tags as tokens, checked to be the same as with tags that are spelled out."""
    by_token = says(text, "hermes", tools, **more)
    spelled = says(text, "hermes", tools, tags=(), **more)
    assert by_token.events == spelled.events
    return by_token


def test_a_call_with_text_before_it() -> None:
    outcome = both(f"Let me look.\n\n{CALL}")
    assert outcome.text == "Let me look."
    assert outcome.raw_calls == [("read_file", '{"path": "a.txt"}')]
    assert outcome.reason == "tool_calls"


def test_arguments_keep_their_spelling() -> None:
    said = '<tool_call>\n{"name":"read_file",  "arguments":{ "path" :"\\u00e9\\/",\n"n":1.50e+3 }}\n</tool_call>'
    assert both(said).raw_calls == [("read_file", '{ "path" :"\\u00e9\\/",\n"n":1.50e+3 }')]


def test_tc01_a_call_inside_the_thinking_is_a_call() -> None:
    outcome = both(f"I should look.\n{CALL}", thinking=True)
    assert (outcome.reasoning, outcome.calls) == ("I should look.", [("read_file", {"path": "a.txt"})])


def test_tc04_tags_inside_a_string_arrive_unchanged() -> None:
    content = 'a </parameter> b </tool_call> c </function> d <tool_call>{"x"}</tool_call>\n'
    assert both(json_call("write_file", path="p", content=content), (WRITE,)).calls == [
        ("write_file", {"path": "p", "content": content})
    ]


def test_tc05_a_marker_in_prose_is_text() -> None:
    said = "The tag `<tool_call>` opens a call. It is closed later. Done."
    assert both(said).events == [Text(said)]


def test_tc06_an_unclosed_call_is_recovered() -> None:
    outcome = both('Now:\n<tool_call>{"name": "read_file", "arguments": {"path": "a')
    assert (outcome.text, outcome.calls) == ("Now:", [("read_file", {"path": "a"})])
    assert outcome.notes


def test_tc07_no_tools_no_calls() -> None:
    assert both(CALL, ()).text == CALL
    assert both(CALL, tool_choice=ToolChoice("none")).text == CALL


def test_tc10_single_backslashes_are_repaired() -> None:
    said = "<tool_call>\n" + r"""{"name":"bash","arguments":{"command":"grep '\d+' C:\work"}}""" + "\n</tool_call>"
    assert both(said, (Tool("bash"),)).calls == [("bash", {"command": r"grep '\d+' C:\work"})]


def test_tc10_a_payload_that_is_no_json_is_text() -> None:
    said = "<tool_call>\nread_file(a.txt)\n</tool_call>"
    assert both(said).events == [Text(said)]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{'path': 'it''s'}", {"path": "it", "s": None}),
        ('{"path": "a",}', {"path": "a"}),
        ('{"path": "a" "n": True}', {"path": "a", "n": True}),
        ("{path: a.txt}", {"path": "a.txt"}),
        ('{"path": "a\nb\tc"}', {"path": "a\nb\tc"}),
        ('{"path": ["a", {"b": 1]}', {"path": ["a", {"b": 1}]}),
        ('{"path": 007}', {"path": "007"}),
        ('{"path": None}', {"path": None}),
        ('{"path"}', {"path": None}),
        ("null", {}),
        ('"{\\"path\\": \\"a\\"}"', {"path": "a"}),
        ("", {}),
    ],
)
def test_malformed_arguments_are_repaired(written: str, arguments: object) -> None:
    said = f'<tool_call>\n{{"name": "read_file", "arguments": {written}}}\n</tool_call>'
    assert both(said).calls == [("read_file", arguments)]


def test_missing_brackets_at_the_closing_tag() -> None:
    assert both('<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}\n</tool_call> ok').calls == [
        ("read_file", {"path": "a"})
    ]


def test_tc11_two_calls_in_one_answer() -> None:
    outcome = both(f"{CALL}\n{json_call('read_file', path='b')}")
    assert [arguments["path"] for _, arguments in outcome.calls] == ["a.txt", "b"]
    assert outcome.text == ""


def test_two_objects_or_a_list_in_one_pair_of_tags() -> None:
    one = '{"name": "read_file", "arguments": {"path": "a"}}'
    for body in (f"{one}\n{one}", f"[{one}, {one}]"):
        outcome = both(f"<tool_call>\n{body}\n</tool_call>")
        assert (len(outcome.calls), outcome.text) == (2, "")


def test_tc15_the_name_comes_first_and_arguments_as_they_are_generated() -> None:
    content = "line of the file\n" * 400
    outcome = both(json_call("write_file", path="a", content=content), (WRITE,))
    raw = outcome.raw_events
    assert isinstance(raw[0], CallStart)
    fragments = [event.text for event in raw if isinstance(event, CallArguments)]
    assert len(fragments) > 5_000
    assert json.loads("".join(fragments)) == {"path": "a", "content": content}


def test_arguments_before_the_name() -> None:
    said = '<tool_call>{"arguments": {"path": "a"}, "id": 1, "name": "read_file"}</tool_call>'
    assert both(said).raw_calls == [("read_file", '{"path": "a"}')]


def test_tc18_an_empty_call_is_text() -> None:
    for said in ("<tool_call>\n</tool_call>", "<tool_call>\n{}\n</tool_call>", '<tool_call>{"name": ""}</tool_call>'):
        outcome = both(said)
        assert (outcome.text, outcome.calls, outcome.reason) == (said, [], "stop")


def test_undeclared_names_are_text() -> None:
    said = json_call("rm_rf", path="/") + " ok"
    assert both(said).events == [Text(said)]


def test_a_call_without_arguments() -> None:
    assert both('<tool_call>{"name": "read_file"}</tool_call>').raw_calls == [("read_file", "{}")]


def test_a_custom_tool_gets_its_input_raw() -> None:
    text = '*** Begin Patch\n+"quoted" \\ é 🙂\n'
    assert both(json_call("apply_patch", input=text), (PATCH,)).raw_calls == [("apply_patch", text)]
    escaped = '<tool_call>{"name": "apply_patch", "arguments": {"input": "\\ud83d\\ude42\\u00e9\\n"}}</tool_call>'
    assert both(escaped, (PATCH,)).raw_calls == [("apply_patch", "🙂é\n")]
    direct = '<tool_call>{"name": "apply_patch", "arguments": "raw\\ntext"}</tool_call>'
    assert both(direct, (PATCH,)).raw_calls == [("apply_patch", "raw\ntext")]


def test_half_a_surrogate_pair_never_reaches_the_client() -> None:
    said = '<tool_call>{"name": "read_file", "arguments": {"path": "a\\ud83dx\\ude42"}}</tool_call>'
    assert both(said).calls == [("read_file", {"path": "a�x�"})]


def test_spelled_tags_are_text_where_the_model_has_tokens() -> None:
    spelled = [ord(char) for char in CALL]
    assert says(spelled, "hermes", tags=TAGS).text == CALL
