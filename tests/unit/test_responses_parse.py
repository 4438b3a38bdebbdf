"""Responses bodies: every kind of item and tool, stored history, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.blobs import encode_blob
from pooled_mlx.api.edge import Parsed
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Finished, Reasoning, Text, Usage
from pooled_mlx.core.request import (
    CustomGrammar,
    Request,
    ResponseFormat,
    Sampling,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
)
from tests.wire import HEADER

READ = {"type": "function", "name": "read_file", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}


def parsed(edge: ResponsesEdge | None = None, request_id: str = "r1", **fields: Any) -> Parsed:
    body = {"model": "m", "input": "hi"} | fields
    body = {name: value for name, value in body.items() if value is not ...}
    return (edge or ResponsesEdge()).parse(body, request_id=request_id, client="test")


def parse(**fields: Any) -> Request:
    return parsed(**fields).request


def turns(*items: Any, **fields: Any) -> tuple[Turn, ...]:
    return parse(input=list(items), **fields).turns


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def call(call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "read_file", "arguments": '{"path": "a"}'} | fields


def output(call_id: str = "c1", value: Any = "text") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def test_the_smallest_body() -> None:
    assert parse() == Request("r1", (Turn("user", "hi"),), client="test")
    assert parse(input="", max_output_tokens=1).turns == (Turn("user", ""),)
    assert turns({"role": "user", "content": "hi"}) == turns(user("hi")) == parse().turns


def test_system_texts_lead_and_late_ones_move() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]}
    system = {"role": "system", "content": "c"}
    assert turns(developer, system, user("hi"), instructions="a") == (Turn("system", "a\n\nb\n\nc"), Turn("user", "hi"))
    assert turns(user("hi"), developer) == (Turn("user", "hi\n\nb"),)


def test_parts_are_joined_and_images_and_files_are_notes() -> None:
    content = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "file:///etc/passwd"},
        {"type": "input_file", "file_id": "f"},
        {"type": "input_text", "text": "b"},
    ]
    assert turns({"role": "user", "content": content})[0].text == (
        "a[image omitted: this model reads text only][file omitted: this model reads text only]b"
    )


def test_one_answer_is_one_turn() -> None:
    items = [
        user("hi"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": encode_blob("exact")},
        {"type": "message", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "ok"}]},
        call("c1"),
        call("c2", arguments={"path": "b"}),
        output("c1"),
        output("c2", [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]),
    ]
    assert turns(*items)[1:] == (
        Turn(
            "assistant",
            "ok",
            "exact",
            (ToolCall("c1", "read_file", '{"path": "a"}'), ToolCall("c2", "read_file", '{"path":"b"}')),
        ),
        Turn("tool", "text", tool_call_id="c1", name="read_file"),
        Turn("tool", "x[image omitted: this model reads text only]", tool_call_id="c2", name="read_file"),
    )


def test_separate_answers_stay_separate() -> None:
    say = {"type": "message", "role": "assistant", "content": "c"}
    assert [turn.text for turn in turns(user("a"), say, {**say, "content": "d"}, user("e"))] == ["a", "c", "d", "e"]
    rounds = turns(user("a"), call("c1"), output("c1"), call("c2"), output("c2"))
    assert [turn.role for turn in rounds] == ["user", "assistant", "tool", "assistant", "tool"]
    new = turns(user("a"), call("c1"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, output("c1"))
    assert [(turn.role, turn.reasoning) for turn in new[1:3]] == [("assistant", None), ("assistant", "s")]


@pytest.mark.parametrize(
    ("fields", "expected", "warned"),
    [
        ({"encrypted_content": encode_blob("exact"), "content": [{"type": "reasoning_text", "text": "shown"}]}, "exact", 0),
        ({"encrypted_content": "c3R1Yg==", "summary": [{"type": "summary_text", "text": "sum"}]}, "sum", 1),
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}, "ab", 0),
        ({"encrypted_content": None, "content": None, "summary": []}, None, 0),
    ],
)
def test_reasoning_items(fields: dict[str, Any], expected: str | None, warned: int) -> None:
    got = parsed(input=[user("a"), {"type": "reasoning", **fields}, call(), output()])
    assert got.request.turns[1].reasoning == expected
    assert len(got.warnings) == warned


def test_custom_calls_keep_their_raw_text() -> None:
    items = [
        user("a"),
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin\r\n\ttext  "},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ]
    assert turns(*items, tools=[PATCH])[1:] == (
        Turn("assistant", tool_calls=(ToolCall("c1", "apply_patch", "*** Begin\r\n\ttext  ", custom=True),)),
        Turn("tool", "ok", tool_call_id="c1", name="apply_patch"),
    )


@pytest.mark.parametrize("value", ["", None, []])
def test_empty_outputs(value: Any) -> None:
    assert turns(user("a"), call(), output(value=value))[-1].text == ""


def test_tools_of_every_kind() -> None:
    namespace = {"type": "namespace", "name": "agents", "tools": [{**READ, "name": "spawn"}, {**PATCH, "name": "raw"}]}
    got = parsed(
        tools=[
            {"type": "web_search"},
            {"type": "namespace", "name": "x", "tools": []},
            {"type": "local_shell"},
            READ,
            namespace,
        ],
        input=[{"type": "additional_tools", "role": "developer", "tools": [PATCH, {"type": "tool_search"}]}, user("hi")],
    )
    grammar = CustomGrammar("lark", "start: /.+/s")
    assert got.request.tools == (
        Tool("read_file", "", {"type": "object"}, False),
        Tool("spawn", "", {"type": "object"}, False, namespace="agents"),
        Tool("raw", "Patch.", custom=True, namespace="agents", grammar=grammar),
        Tool("apply_patch", "Patch.", custom=True, grammar=grammar),
    )
    assert got.request.turns == (Turn("user", "hi"),)
    assert len(got.warnings) == 3


def test_the_same_name_in_two_places_is_qualified_for_the_model() -> None:
    spaces = [{"type": "namespace", "name": name, "tools": [READ]} for name in ("a", "b")]
    items = [user("hi"), call("c1", namespace="b"), output("c1")]
    request = parse(tools=[READ, *spaces], input=items)
    assert [tool.name for tool in request.tools] == ["read_file", "a__read_file", "b__read_file"]
    assert request.turns[1].tool_calls[0].name == "b__read_file"
    assert request.turns[1].tool_calls[0].namespace == "b"


def test_choices() -> None:
    space = {"type": "namespace", "name": "agents", "tools": [{**READ, "name": "spawn"}]}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
    for choice, expected in (
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "read_file"}, ToolChoice("named", "read_file")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("named", "apply_patch")),
        (allowed, ToolChoice("required", allowed=("apply_patch",))),
        ({**allowed, "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]}, ToolChoice(allowed=("spawn",))),
    ):
        assert parse(tools=[READ, PATCH, space], tool_choice=choice).tool_choice == expected


def test_the_rest_of_the_fields() -> None:
    assert parse(max_output_tokens=99_999).max_output_tokens == 65_536
    assert parse(temperature=0).sampling == Sampling(0, 40)
    assert parse(top_k=200).sampling == Sampling(0.8, 64)
    assert parse(parallel_tool_calls=False).parallel_tool_calls is False
    assert parse(max_tool_calls=3).max_calls == 3
    assert parse(max_tool_calls=128).max_calls == 16
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "name": "A", "schema": schema, "strict": True}
    assert parse(text={"format": wanted, "verbosity": "low"}).response_format == ResponseFormat(
        "json_schema", schema, "A", True
    )
    assert parse(text={"format": {"type": "json_object"}}).response_format == ResponseFormat("json_object")
    assert parse(text={"verbosity": "low"}).response_format == ResponseFormat()
    plain = parse(
        top_p=9.9,
        metadata={"a": "b"},
        user="u",
        service_tier="flex",
        prompt_cache_key="k",
        truncation="disabled",
        client_metadata={},
        background=False,
        conversation=None,
        top_logprobs=0,
        include=["web_search_call.action.sources"],
    )
    assert plain == parse()


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [
        (None, Thinking()),
        ({"summary": "auto"}, Thinking()),
        ({"effort": "none"}, Thinking()),
        ({"effort": "minimal"}, Thinking()),
        ({"effort": "low"}, Thinking(True, "low")),
        ({"effort": "max"}, Thinking(True, "max")),
        ({"effort": "frantic"}, Thinking(True)),
    ],
)
def test_effort(reasoning: Any, expected: Thinking) -> None:
    got = parsed(reasoning=reasoning)
    assert got.request.thinking == expected
    assert len(got.warnings) == (1 if reasoning == {"effort": "frantic"} else 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ...}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "banana", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "hologram"}]}, "input[0].type"),
        ({"input": [{"type": "invented", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "gone"}]}, "input[0].id"),
        ({"input": [user("a"), {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[1].call_id"),
        ({"input": [user("a"), call()]}, "input"),
        ({"input": [user("a"), {"role": "assistant", "content": "b"}]}, "input"),
        ({"input": [{"role": "developer", "content": "only"}]}, "input"),
        ({"input": "x" * 4_000_001}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}, "tools": [READ]}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [READ]}, "tools": [READ]}, "tool_choice.mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "tools": [READ]},
            "tool_choice.tools[0].type",
        ),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [READ]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [READ]}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [READ, READ]}, "tools"),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "ebnf"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "odd"}}]}, "tools[0].format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tool_calls": 129}, "max_tool_calls"),
        ({"temperature": 2.1}, "temperature"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "A"}}}, "text.format.schema"),
        ({"instructions": 5}, "instructions"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": "resp_gone"}, "previous_response_id"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_an_unknown_previous_response_has_its_code() -> None:
    assert refused(previous_response_id="resp_gone").code == "previous_response_not_found"


def test_hosted_items_are_skipped_with_one_warning() -> None:
    searched = {"type": "web_search_call", "id": "ws", "status": "completed"}
    got = parsed(input=[user("a"), searched, searched, user("b")])
    assert [turn.text for turn in got.request.turns] == ["a", "b"]
    assert len(got.warnings) == 1


def finish_first(edge: ResponsesEdge, **fields: Any) -> None:
    first = parsed(edge, "one", instructions="Be brief.", tools=[READ], **fields)
    events = [
        Reasoning("think"),
        Text("ok"),
        CallStart(0, "c1", "read_file"),
        CallArguments(0, '{"path": "a"}'),
        CallEnd(0),
        Finished("tool_calls", Usage(1, 1)),
    ]
    edge.whole(first, HEADER, fold(events))


def test_a_previous_response_gives_the_whole_history_without_its_instructions() -> None:
    edge = ResponsesEdge()
    finish_first(edge)
    second = parsed(edge, "two", input=[output()], previous_response_id="resp_one")
    assert second.request.turns == (
        Turn("user", "hi"),
        Turn("assistant", "ok", "think", (ToolCall("c1", "read_file", '{"path": "a"}'),)),
        Turn("tool", "text", tool_call_id="c1", name="read_file"),
    )
    assert second.request.tools == ()
    edge.whole(second, HEADER, fold([Text("done"), Finished("stop", Usage(1, 1))]))
    third = parsed(edge, "three", input="more", previous_response_id="resp_two", instructions="New.")
    assert [turn.text for turn in third.request.turns] == ["New.", "hi", "ok", "text", "done", "more"]


def test_a_reference_stands_for_the_stored_item() -> None:
    edge = ResponsesEdge()
    finish_first(edge)
    items = [user("hi"), {"type": "item_reference", "id": "rs_one_0"}, {"id": "msg_one_1"}, call(), output()]
    assert parsed(edge, input=items).request.turns[1].reasoning == "think"
    assert parsed(edge, input=items).request.turns[1].text == "ok"


def test_store_false_keeps_nothing() -> None:
    edge = ResponsesEdge()
    finish_first(edge, store=False)
    assert len(edge.store) == 0
    finish_first(edge, store=None)
    assert len(edge.store) == 1


def test_additional_tools_stay_with_the_history() -> None:
    edge = ResponsesEdge()
    items = [{"type": "additional_tools", "tools": [READ]}, user("hi")]
    edge.whole(parsed(edge, "one", input=items), HEADER, fold([Text("a"), Finished("stop", Usage(1, 1))]))
    assert [tool.name for tool in parsed(edge, input="b", previous_response_id="resp_one").request.tools] == ["read_file"]


def test_counting() -> None:
    edge = ResponsesEdge()
    assert edge.parse_count({"input": "hi"}, request_id="r1", client="test").request == parse()
    assert edge.count(5) == {"object": "response.input_tokens", "input_tokens": 5}


def test_a_clients_own_items_are_notes() -> None:
    user = {"type": "message", "role": "user", "content": "go on"}
    items = [
        {"type": "message", "role": "user", "content": "first"},
        {"type": "compaction_trigger"},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "abc"}},
        {"type": "agent_message", "content": [{"type": "output_text", "text": "The other agent is done."}]},
        {"type": "compaction", "summary": [{"type": "summary_text", "text": "So far: nothing."}]},
        user,
    ]
    got = parse(input=items)
    words = "\n\n".join(turn.text for turn in got.turns)
    assert all(part in words for part in ("first", "The other agent is done.", "So far: nothing.", "go on"))
    assert [turn.role for turn in got.turns] == ["user", "user"]


def test_deferred_tools_come_last_and_tools_of_later_items_behind_them() -> None:
    def function(name: str, **more: object) -> dict[str, object]:
        return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **more}

    later = {"type": "additional_tools", "tools": [function("found")]}
    user = {"type": "message", "role": "user", "content": "hi"}
    tools = [function("b", defer_loading=True), function("a"), function("c")]
    assert [tool.name for tool in parse(input=[user, later], tools=tools).tools] == ["a", "c", "b", "found"]


def test_tools_that_all_run_at_openai_are_refused() -> None:
    with pytest.raises(ApiError) as refused:
        parse(tools=[{"type": "web_search"}])
    assert refused.value.param == "tools[0].type"
    assert parse(tools=[{"type": "web_search"}], tool_choice="none").tools == ()
