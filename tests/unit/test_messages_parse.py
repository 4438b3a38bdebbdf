"""Messages bodies: every form that clients send, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.blobs import encode_blob
from pooled_mlx.api.edge import Parsed
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.request import Request, ResponseFormat, Sampling, Thinking, ToolCall, ToolChoice, Turn

READ = {
    "name": "read_file",
    "description": "Read.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
HI = [{"role": "user", "content": "hi"}]


def parsed(**fields: Any) -> Parsed:
    body = {"model": "m", "max_tokens": 100, "messages": HI} | fields
    return MessagesEdge().parse(
        {name: value for name, value in body.items() if value is not ...}, request_id="r1", client="test"
    )


def parse(**fields: Any) -> Request:
    return parsed(**fields).request


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value


def test_the_smallest_body() -> None:
    request = parse()
    assert request == Request("r1", (Turn("user", "hi"),), max_output_tokens=100, client="test")
    assert parsed().stream is False
    assert parsed(stream=True).stream is True


def test_too_much_text_is_told_in_the_words_that_clients_compact_on() -> None:
    error = refused(messages=[{"role": "user", "content": "x" * 4_000_001}])
    assert error.message.startswith("prompt is too long: ")
    assert "4000001 characters" in error.message
    assert error.code == "context_length_exceeded"


def test_string_and_blocks_are_the_same() -> None:
    blocks = [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "i"}]
    assert parse(messages=[{"role": "user", "content": blocks}]) == parse()


def test_system_forms() -> None:
    assert parse(system="a").turns[0] == Turn("system", "a")
    assert parse(system=[{"type": "text", "text": "a"}]).turns == parse(system="a").turns
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b", "cache_control": {}}]
    assert parse(system=two).turns[0] == Turn("system", "a\n\nb")
    assert parse(system="").turns == parse(system=[]).turns == parse(system=None).turns == parse().turns
    assert refused(system=[{"type": "image"}]).param == "system[0].type"
    assert refused(system=5).param == "system"


def test_a_late_system_message_joins_the_user_turn_before_it() -> None:
    messages = [*HI, {"role": "system", "content": [{"type": "text", "text": "note", "cache_control": {"type": "ephemeral"}}]}]
    assert parse(messages=messages).turns == (Turn("user", "hi\n\nnote"),)
    same = [*HI, {"role": "system", "content": "note"}]
    assert parse(messages=same).turns == parse(messages=messages).turns


def test_a_late_system_message_after_a_tool_result_joins_it() -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read_file", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "text"}]},
        {"role": "system", "content": "9 tokens left"},
    ]
    assert parse(messages=messages).turns[-1] == Turn("tool", "text\n\n9 tokens left", tool_call_id="c1", name="read_file")


def test_a_tool_round() -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "ä.txt"}},
                {"type": "tool_use", "id": "c2", "name": "read_file", "input": {"path": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "A"}, {"type": "image"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    calls = (ToolCall("c1", "read_file", '{"path":"ä.txt"}'), ToolCall("c2", "read_file", '{"path":"b"}'))
    assert parse(messages=messages, tools=[READ]).turns[1:] == (
        Turn("assistant", "Reading.", tool_calls=calls),
        Turn("tool", "A[image omitted: this model reads text only]", tool_call_id="c1", name="read_file"),
        Turn("tool", "", tool_call_id="c2", name="read_file", is_error=True),
        Turn("user", "go on"),
    )


def test_images_documents_and_references_are_notes() -> None:
    content = [{"type": "image", "source": {}}, {"type": "document", "source": {}}]
    assert parse(messages=[{"role": "user", "content": content}]).turns[0].text == (
        "[image omitted: this model reads text only][document omitted: this model reads text only]"
    )
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "Search"}]}
    assert parse(messages=[{"role": "user", "content": [result]}]).turns[0].text == "[tool Search is loaded]"


def assistant(*blocks: dict[str, Any]) -> Parsed:
    return parsed(messages=[*HI, {"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "more"}])


def test_our_signature_restores_the_exact_reasoning() -> None:
    blob = encode_blob("exact thought")
    for shown in ("", "shortened"):
        turn = assistant({"type": "thinking", "thinking": shown, "signature": blob}).request.turns[1]
        assert turn.reasoning == "exact thought"


def test_a_foreign_signature_leaves_the_visible_text_and_warns_once() -> None:
    foreign = {"type": "thinking", "thinking": "seen ", "signature": "c3R1Yg=="}
    got = assistant(foreign, foreign)
    assert got.request.turns[1].reasoning == "seen seen "
    assert len(got.warnings) == 1
    assert assistant({"type": "thinking", "thinking": "seen"}).request.turns[1].reasoning == "seen"
    assert assistant({"type": "thinking", "thinking": "seen"}).warnings == ()
    empty = assistant({"type": "thinking", "thinking": "", "signature": "c3R1Yg=="})
    assert empty.request.turns[1].reasoning is None


def test_redacted_thinking_is_ignored_and_hosted_blocks_are_skipped_with_a_warning() -> None:
    assert assistant({"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}).warnings == ()
    got = assistant({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "a"})
    assert got.request.turns[1].text == "a"
    assert len(got.warnings) == 1


@pytest.mark.parametrize("kind", ["search_result", "hologram", "audio"])
def test_other_blocks_are_refused_by_name(kind: str) -> None:
    error = refused(messages=[{"role": "user", "content": [{"type": kind}]}])
    assert error.param == "messages[0].content[0].type"
    assert kind in error.message
    nested = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": kind}]}]
    assert refused(messages=[{"role": "user", "content": nested}]).param == "messages[0].content[0].content[0].type"


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, Thinking()),
        ({"type": "disabled"}, Thinking()),
        ({"type": "adaptive", "display": "updates"}, Thinking(True)),
        ({"type": "enabled", "budget_tokens": 64}, Thinking(True, None, 64)),
        ({"type": "enabled", "budget_tokens": 100}, Thinking(True, None, 100)),
        ({"type": "enabled"}, Thinking(True)),
    ],
)
def test_thinking(thinking: Any, expected: Thinking) -> None:
    assert parse(thinking=thinking).thinking == expected


def test_effort_sets_the_level_and_never_switches() -> None:
    assert parse(output_config={"effort": "xhigh"}).thinking == Thinking()
    assert parse(output_config={"effort": "xhigh"}, thinking={"type": "adaptive"}).thinking == Thinking(True, "xhigh")
    odd = parsed(output_config={"effort": "frantic"}, thinking={"type": "adaptive"})
    assert odd.request.thinking == Thinking(True)
    assert len(odd.warnings) == 1


def test_display_omitted_is_an_option_of_rendering() -> None:
    assert parsed(thinking={"type": "adaptive", "display": "omitted"}).options.omit_thinking
    assert not parsed(thinking={"type": "adaptive", "display": "updates"}).options.omit_thinking


def test_tools_and_choices() -> None:
    hosted = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}]
    got = parsed(tools=[READ | {"cache_control": {}, "defer_loading": True}, *hosted, {"type": "custom", "name": "noop"}])
    assert [tool.name for tool in got.request.tools] == ["noop", "read_file"]  # a deferred tool comes last
    assert got.request.tools[1].parameters == READ["input_schema"]
    assert got.request.tools[0].parameters is None
    assert len(got.warnings) == 2
    for choice, expected in (
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "read_file"}, ToolChoice("named", "read_file")),
    ):
        assert parse(tools=[READ], tool_choice=choice).tool_choice == expected
    assert parse(tools=[READ]).parallel_tool_calls
    assert not parse(tools=[READ], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).parallel_tool_calls
    assert parse(tools=[]).tools == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [READ]}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [READ, READ]}, "tools"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"description": "x" * 32_001}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": f"t{n}"} for n in range(1025)]}, "tools"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [*HI, {"role": "assistant", "content": "1, 2,"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "only"}]}, "messages"),
        ({"messages": HI * 10_001}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 4_000_001}]}, "messages"),
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["x" * 65]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_body_that_is_no_object() -> None:
    for body in ([], None, "x", 5):
        with pytest.raises(ApiError) as caught:
            MessagesEdge().parse(body, request_id="r", client="c")
        assert caught.value.kind is ErrorKind.BAD_REQUEST


def test_sampling_and_limits() -> None:
    assert parse(temperature=0, top_k=5).sampling == Sampling(0, 5)
    assert parse(temperature=0.5).sampling == Sampling(0.5, 40)
    assert parse(top_k=100).sampling == Sampling(0.8, 64)
    assert parse(top_p=9.9, metadata={"user_id": "u"}, mcp_servers=[], context_management={}, safeguards=[]) == parse()
    assert parse(max_tokens=1_000_000).max_output_tokens == 65_536
    assert parse(stop_sequences=["ZZZ"]).stop == ("ZZZ",)
    assert len(parse(stop_sequences=[f"s{n}" for n in range(16)]).stop) == 16


def test_formats() -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    wanted = {"type": "json_schema", "schema": schema}
    expected = ResponseFormat("json_schema", schema)
    assert parse(output_config={"effort": "high", "format": wanted}).response_format == expected
    assert parse(output_format=wanted).response_format == expected
    assert parse(output_config={"format": None}).response_format == ResponseFormat()


def test_mid_conversation_tool_changes() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": READ}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "old"}}
    request = parse(messages=[*HI, {"role": "system", "content": [added, removed]}])
    assert [tool.name for tool in request.tools] == ["read_file"]
    assert request.turns[0].text == "hi\n\n[tool read_file is available now][tool old is no longer available]"


def test_counting_needs_no_output_limit() -> None:
    body = {"model": "m", "messages": HI, "tools": [READ], "system": "s"}
    counted = MessagesEdge().parse_count(body, request_id="r", client="c").request
    assert counted.turns == parse(system="s", tools=[READ]).turns
    assert MessagesEdge().count(17) == {"input_tokens": 17}
    with pytest.raises(ApiError):
        MessagesEdge().parse_count({}, request_id="r", client="c")


def test_lone_surrogates_become_replacement_characters_and_nul_stays() -> None:
    assert parse(messages=[{"role": "user", "content": "a\ud800b\0c"}]).turns[0].text == "a\ufffdb\0c"
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "\udfff"}}
    assert assistant(call).request.turns[1].tool_calls[0].arguments == '{"x":"\ufffd"}'


def test_tools_that_a_search_found_come_behind_the_others_in_the_order_of_finding() -> None:
    def tool(name: str, **more: object) -> dict[str, object]:
        return {"name": name, "input_schema": {"type": "object"}, **more}

    def found(*names: str) -> list[dict[str, object]]:
        references = [{"type": "tool_reference", "tool_name": name} for name in names]
        call = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": references}
        return [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]

    before = parsed(tools=[tool("a"), tool("search"), tool("z")]).request.tools
    after = parsed(
        messages=found("m", "b"),
        tools=[tool("a"), tool("b"), tool("m"), tool("p", defer_loading=True), tool("search"), tool("z")],
    )
    assert [one.name for one in before] == ["a", "search", "z"]
    assert [one.name for one in after.request.tools] == ["a", "search", "z", "m", "b", "p"]


def test_tools_that_all_run_at_anthropic_are_refused() -> None:
    with pytest.raises(ApiError) as refused:
        parsed(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert refused.value.param == "tools[0].type"
    assert "web_search_20250305" in refused.value.message
    assert parsed(tools=[{"type": "web_search_20250305", "name": "w"}], tool_choice={"type": "none"}).request.tools == ()
