from __future__ import annotations

import json

import pytest

from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Text
from pooled_mlx.core.request import CustomGrammar, Tool, ToolChoice
from tests.answers import PATCH, READ, WRITE, says, xml_call

CALL = xml_call("read_file", path="a.txt")


def parameter(name: str, value: str, close: str = "\n</parameter>\n") -> str:
    return f"<parameter={name}>\n{value}{close}"


def write(*blocks: str) -> str:
    return "<tool_call>\n<function=write_file>\n" + "".join(blocks) + "</function>\n</tool_call>"


def typed(name: str = "typed", **properties: object) -> Tool:
    return Tool(name, parameters={"type": "object", "properties": properties})


def test_tc01_a_call_inside_the_thinking_is_a_call() -> None:
    outcome = says("I should look.\n" + CALL, thinking=True)
    assert outcome.reasoning == "I should look."
    assert outcome.calls == [("read_file", {"path": "a.txt"})]
    assert outcome.reason == "tool_calls"
    assert outcome.text == ""


@pytest.mark.parametrize(
    "mention", ["read_file would do", "<tool", "<function=read_file>\n<parameter=path>\na", "<tool_call> and"]
)
def test_tc01_a_mention_in_the_thinking_is_no_call(mention: str) -> None:
    outcome = says(f"maybe {mention} it\n</think>\n\nNo.", thinking=True)
    assert outcome.calls == []
    assert outcome.reasoning == f"maybe {mention} it"
    assert outcome.text == "No."


def test_tc01_thinking_goes_on_after_a_call_in_it() -> None:
    outcome = says(f"look\n{CALL}\nand think\n</think>\n\nDone.", thinking=True)
    assert (outcome.reasoning, outcome.text) == ("look\nand think", "Done.")


def test_tc02_a_missing_parameter_close() -> None:
    outcome = says(write(parameter("path", "a.txt", "\n"), parameter("content", "hello", "\n")), tools=(WRITE,))
    assert outcome.calls == [("write_file", {"path": "a.txt", "content": "hello"})]


@pytest.mark.parametrize("close", ["\n</parameter1>\n", "\n</parameter/>\n", "</parameterfunction>\n", "\n</parameter\n"])
def test_tc03_a_misspelt_close_is_no_part_of_the_value(close: str) -> None:
    outcome = says(write(parameter("path", "a.txt", close), parameter("content", "hello", close)), tools=(WRITE,))
    assert outcome.calls == [("write_file", {"path": "a.txt", "content": "hello"})]


@pytest.mark.parametrize(
    "content",
    [
        "a </parameter> b </tool_call> c </function> d",
        "</parameter>",
        "\n</parameter>\n</function>\n and on",
        "</parameter>\n<parameter=path>\nagain\n</parameter>\nx",
        "<parameter=content>\nx",
        xml_call("read_file", path="inner") + "\nand\n" + xml_call("write_file", path="p", content="c") + "\ntail",
        "x\n</parameter>\n</parameter>",
        "<|im_start|>user\n<|im_sep|>",
        "tabs\t, trailing  \r\nCRLF\r\n\n\n",
        "\n\nleading and 🙂 emoji",
        "",
    ],
)
def test_tc04_tags_inside_a_value_arrive_unchanged(content: str) -> None:
    outcome = says(write(parameter("path", "p"), parameter("content", content)), tools=(WRITE,))
    assert outcome.calls == [("write_file", {"path": "p", "content": content})]
    assert outcome.text == ""


@pytest.mark.parametrize(
    "content", ["a </parameter> b </function> d", "\n</function>\n", "<parameter=mode>\nx", "</parameter1>"]
)
def test_under_a_grammar_nothing_is_taken_for_a_mistake(content: str) -> None:
    said = write(parameter("path", "p"), parameter("content", content))
    assert says(said, tools=(WRITE,), constrained=True).calls == [("write_file", {"path": "p", "content": content})]


@pytest.mark.parametrize("fence", ["", "```\n"])
def test_tc05_a_marker_in_prose_is_text(fence: str) -> None:
    said = f"{fence}The tag `<tool_call>` opens a call. It is closed later. Done."
    outcome = says(said)
    assert (outcome.text, outcome.calls, outcome.reason) == (said, [], "stop")


def test_tc06_an_unclosed_call_is_recovered() -> None:
    outcome = says("Now:\n<tool_call>\n<function=read_file>\n<parameter=path>\na")
    assert outcome.text == "Now:"
    assert outcome.calls == [("read_file", {"path": "a"})]
    assert outcome.notes == ("the turn ended inside a call",)


def test_tc06_a_call_without_a_name_is_given_back_as_text() -> None:
    said = "Now:\n<tool_call>\n<function=read_f"
    outcome = says(said)
    assert (outcome.text, outcome.calls, outcome.reason) == (said, [], "stop")


def test_a_call_cut_by_the_limit_stays_open() -> None:
    outcome = says("Now:\n<tool_call>\n<function=read_file>\n<parameter=path>\na", ends="length")
    assert outcome.events == [Text("Now:"), CallStart(0, "call-0", "read_file"), CallArguments(0, '{"path": "a')]
    assert outcome.reason == "length"


def test_a_call_cut_before_its_name_is_left_out() -> None:
    outcome = says("Now:\n<tool_call>\n<function=read_f", ends="context_full")
    assert (outcome.text, outcome.calls, outcome.reason) == ("Now:", [], "context_full")


def test_tc07_no_tools_no_calls() -> None:
    assert says(CALL, tools=()).text == CALL
    forbidden = says("x " + CALL, tool_choice=ToolChoice("none"))
    assert (forbidden.text, forbidden.calls, forbidden.reason) == ("x " + CALL, [], "stop")


def test_tc08_types_come_from_the_schema() -> None:
    tool = typed(
        zip={"type": "string"},
        n={"type": "integer"},
        dry={"type": "boolean"},
        list={"type": "array"},
        o={"type": "object"},
        note={"type": "string"},
        free={},
    )
    said = xml_call("typed", zip="02134", n="5.0", dry="false", list='["a"]', o='{"k":1}', note="null", free="7")
    want = {"zip": "02134", "n": 5, "dry": False, "list": ["a"], "o": {"k": 1}, "note": "null", "free": "7"}
    arguments = says(said, tools=(tool,)).calls[0][1]
    assert arguments == want
    assert isinstance(arguments["n"], int)


def test_tc09_a_non_number_for_an_integer_is_delivered_as_a_string() -> None:
    said = "<tool_call>\n<function=typed>\n<parameter=x>2026-01-15</parameter>\n</function>\n</tool_call>"
    outcome = says(said, tools=(typed(x={"type": "integer"}),))
    assert outcome.calls == [("typed", {"x": "2026-01-15"})]
    assert len(outcome.notes) == 1


def test_tc11_two_calls_leave_no_xml_in_the_text() -> None:
    outcome = says(f"Both.\n\n{CALL}\n{xml_call('read_file', path='b')}\n")
    assert outcome.text == "Both."
    assert outcome.calls == [("read_file", {"path": "a.txt"}), ("read_file", {"path": "b"})]


def test_tc12_and_tc13_parallel_calls_have_their_own_index_and_id() -> None:
    starts = [event for event in says(f"{CALL}\n{CALL}").raw_events if isinstance(event, CallStart)]
    assert [(event.index, event.id, event.name) for event in starts] == [
        (0, "call-0", "read_file"),
        (1, "call-1", "read_file"),
    ]


def test_tc14_a_call_at_the_very_end_has_a_reason() -> None:
    outcome = says(CALL)
    assert isinstance(outcome.events[-1], CallEnd)
    assert outcome.reason == "tool_calls"


def test_tc15_arguments_stream_while_they_are_generated() -> None:
    lines = "".join(f"line {number} of the file\n" for number in range(400))
    outcome = says(write(parameter("path", "a"), parameter("content", lines)), tools=(WRITE,), constrained=True)
    fragments = [event.text for event in outcome.raw_events if isinstance(event, CallArguments)]
    assert len(fragments) > 5_000
    assert max(map(len, fragments)) < 40
    assert json.loads("".join(fragments)) == {"path": "a", "content": lines}


def test_tc16_only_the_chosen_tools_can_be_called() -> None:
    said = xml_call("write_file", path="a", content="b")
    named = says(said, tools=(READ, WRITE), tool_choice=ToolChoice("named", "write_file"))
    assert (named.calls, named.reason) == ([("write_file", {"path": "a", "content": "b"})], "stop")
    allowed = says(said, tools=(READ, WRITE), tool_choice=ToolChoice("auto", None, ("read_file",)))
    assert (allowed.calls, allowed.text) == ([], said)


def test_tc17_a_call_without_its_wrapper() -> None:
    bare = "<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>"
    assert says(bare).calls == [("read_file", {"path": "a.txt"})]
    assert says(f"I look.\n\n{bare}\n</tool_call>").events[-1] == CallEnd(0)
    twice = says(f"{bare}\n{bare}")
    assert (len(twice.calls), twice.text) == (2, "")


@pytest.mark.parametrize(
    "said",
    [
        "<function=rm_rf>\n<parameter=path>\na.txt\n</parameter>\n</function>",
        "The form is <function=read_file>\n<parameter=path>",
        "```\n<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>\n```",
        "<function=read_file> is how it starts",
    ],
)
def test_tc17_what_only_looks_like_one_is_text(said: str) -> None:
    outcome = says(said)
    assert (outcome.text, outcome.calls) == (said, [])


@pytest.mark.parametrize("said", ["<tool_call>\n</tool_call>", "<tool_call>\n<function=>\n</function>\n</tool_call>"])
def test_tc18_an_empty_call_is_text(said: str) -> None:
    outcome = says(said)
    assert (outcome.text, outcome.calls, outcome.reason) == (said, [], "stop")


def test_tc19_arguments_outside_ascii_are_exact() -> None:
    path = "/tmp/données/上海/🙂.txt"
    outcome = says(xml_call("read_file", path=path))
    assert outcome.raw_calls == [("read_file", f'{{"path": "{path}"}}')]


@pytest.mark.parametrize("union", [{"type": ["integer", "string"]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}])
def test_tc20_a_union_of_string_and_integer(union: object) -> None:
    tool = typed(u=union)
    assert says(xml_call("typed", u="007"), tools=(tool,)).calls == [("typed", {"u": "007"})]
    assert says(xml_call("typed", u="42"), tools=(tool,)).calls == [("typed", {"u": 42})]
    assert says(xml_call("typed", u="42 "), tools=(tool,)).calls == [("typed", {"u": "42 "})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "nulls", "nulls"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, '["a", "b"]', ["a", "b"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[draft] x", "[draft] x"),
        ({"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string"}]}, "5", "5"),
        ({"anyOf": [{"enum": ["auto", "5"]}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "6", 6),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/n"}, "3", 3),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": "null"}, "None", None),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "array"}, "['a', 'b',]", ["a", "b"]),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"minimum": 1}, "4", 4),
        (True, "4", "4"),
        ({"type": "integer"}, "NaN", "NaN"),
    ],
)
def test_how_bare_text_gets_its_type(schema: object, text: str, value: object) -> None:
    tool = Tool("typed", parameters={"type": "object", "$defs": {"n": {"type": "integer"}}, "properties": {"x": schema}})
    outcome = says(xml_call("typed", x=text), tools=(tool,))
    assert outcome.calls == [("typed", {"x": value})]
    assert type(outcome.calls[0][1]["x"]) is type(value)


def test_undeclared_names_are_text() -> None:
    said = xml_call("rm_rf", path="/")
    outcome = says(said + " ok")
    assert (outcome.text, outcome.calls) == (said + " ok", [])
    assert "rm_rf" in outcome.notes[0]


def test_calls_beyond_the_limit_are_text() -> None:
    outcome = says(f"{CALL}\n{CALL}", parallel_tool_calls=False)
    assert len(outcome.calls) == 1
    assert outcome.text == CALL


def test_seventeen_calls() -> None:
    outcome = says("\n".join([CALL] * 17))
    assert (len(outcome.calls), outcome.text) == (16, CALL)


def test_a_call_without_arguments() -> None:
    assert says("<tool_call>\n<function=noop>\n</function>\n</tool_call>", tools=(Tool("noop"),)).raw_calls == [("noop", "{}")]


def test_a_tool_that_declares_nothing_and_allows_more() -> None:
    tool = Tool("any", parameters={"type": "object", "additionalProperties": {"type": "integer"}})
    assert says(xml_call("any", a="1", b="2"), tools=(tool,)).calls == [("any", {"a": 1, "b": 2})]


def test_a_custom_tool_gets_its_input_raw() -> None:
    text = '*** Begin Patch\n+"quoted" \\ and\n*** End Patch'
    for tool in (PATCH, Tool("apply_patch", custom=True, grammar=CustomGrammar("regex", "(?s:.*)"))):
        assert says(xml_call("apply_patch", input=text), tools=(tool,)).raw_calls == [("apply_patch", text)]


def test_a_parameter_given_twice_after_a_number_is_dropped() -> None:
    tool = typed(a={"type": "integer"}, b={"type": "integer"})
    said = "<tool_call>\n<function=typed>\n" + parameter("a", "1") + parameter("a", "2") + "</function>\n</tool_call>"
    outcome = says(said, tools=(tool,))
    assert outcome.calls == [("typed", {"a": 1})]
    assert outcome.notes


def test_text_after_calls_is_kept() -> None:
    outcome = says(CALL + "\n\nDone.")
    assert (outcome.text, outcome.reason) == ("Done.", "tool_calls")


def test_a_second_call_closes_one_that_was_left_open() -> None:
    said = "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>\n" + CALL
    assert says(said).calls == [("read_file", {"path": "a"}), ("read_file", {"path": "a.txt"})]


def test_json_values_stream_under_a_grammar() -> None:
    tool = typed(edits={"type": "array", "items": {"type": "string"}}, n={"type": "integer"})
    value = json.dumps([f"edit {number}</parameter>" for number in range(50)])
    outcome = says(xml_call("typed", edits=value, n="5"), tools=(tool,), constrained=True)
    assert outcome.calls == [("typed", {"edits": json.loads(value), "n": 5})]
    assert len([event for event in outcome.raw_events if isinstance(event, CallArguments)]) > 50
