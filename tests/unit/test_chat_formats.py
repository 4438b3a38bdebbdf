from __future__ import annotations

import json

import pytest

from pooled_mlx import chat_formats
from pooled_mlx.chat_formats import hermes
from pooled_mlx.chat_formats.base import AnswerSpec
from pooled_mlx.core.request import Request, Tool, ToolCall, Turn
from tests.answers import PATCH, READ, TAGS
from tests.shared_data import shared_path

NAMES = (
    *("deepseek", "deepseek_v32", "deepseek_v4", "gemma", "glm", "harmony", "hermes", "kimi", "lfm2", "llama3", "minimax"),
    *("mistral", "olmo3", "plain", "pythonic", "qwen3_coder", "seed_oss"),
)


def test_every_module_is_a_format_and_nothing_else_is() -> None:
    assert chat_formats.names() == NAMES
    for name in NAMES:
        chat_format = chat_formats.get(name)
        assert chat_format.end_of_thought is None or chat_format.end_of_thought in chat_format.tags


def test_an_unknown_format_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="'nope' is unknown; known are deepseek, deepseek_v32, "):
        chat_formats.get("nope")
    with pytest.raises(ValueError, match="rules"):
        chat_formats.get("rules")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "plain"),
        ("", "plain"),
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "hermes"),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n</function>\n</tool_call>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>", "glm"),
        ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}", "mistral"),
        ("{{ '<|tool_call>call:' + function['name'] + '{' }}", "gemma"),
        ("<|start_header_id|>assistant{{ '\"parameters\": ' }}", "llama3"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}", "deepseek"),
        ("{%- set dsml = '｜DSML｜' %}<{{ dsml }}function_calls><{{ dsml }}invoke name=", "deepseek_v32"),
        ("{%- set dsml = '｜DSML｜' %}<{{ dsml }}tool_calls><{{ dsml }}invoke name=", "deepseek_v4"),
        ("{%- set begin = '<minimax:tool_call>' %}{{ '<invoke name=\"' + name + '\">' }}", "minimax"),
        ("<seed:tool_call>\n<function=name>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>", "seed_oss"),
        ('{{- "<|tool_call_start|>[" + calls | join(", ") + "]<|tool_call_end|>" -}}', "lfm2"),
        ("{{ '<function_calls>' + name + '(' + arguments + ')</function_calls>' }}", "olmo3"),
        (
            "<|header_start|>system put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
            "pythonic",
        ),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi"),
    ],
)
def test_the_format_is_found_in_the_template(template: str | None, name: str) -> None:
    assert chat_formats.detect(template, TAGS) == name


def test_the_format_of_every_real_template() -> None:
    known = {"qwen3.6": "qwen3_coder"}
    for path in sorted(shared_path("templates").glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        assert chat_formats.detect(template, TAGS) == known[path.stem]
        certain = [name for name in NAMES if chat_formats.get(name).recognises(template, frozenset(TAGS)) > 1]
        assert certain == [known[path.stem]]


def test_generic_instructions_list_every_tool_as_json() -> None:
    tools = [READ, PATCH, Tool("noop", description="does\nnothing")]
    text = hermes.generic_instructions(tools)
    listed = [json.loads(line)["function"] for line in text.splitlines() if line.startswith('{"type"')]
    assert [function["name"] for function in listed] == ["read_file", "apply_patch", "noop"]
    assert listed[0]["parameters"] == READ.parameters
    assert listed[1]["parameters"]["required"] == ["input"]
    assert listed[2] == {"name": "noop", "description": "does\nnothing", "parameters": {"type": "object", "properties": {}}}
    assert '<tool_call>\n{"name": ' in text


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (ToolCall("1", "f", '{"a":  "é"}'), '{"a":  "é"}'),
        (ToolCall("1", "f", ""), "{}"),
        (ToolCall("1", "f", "not json"), '"not json"'),
        (ToolCall("1", "f", "raw\ntext", custom=True), '{"input": "raw\\ntext"}'),
    ],
)
def test_a_past_call_is_rendered_as_the_model_would_write_it(call: ToolCall, arguments: str) -> None:
    assert hermes.render_call(call) == f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def test_a_tool_result_is_rendered_between_its_tags() -> None:
    assert hermes.render_tool_result(Turn("tool", "4", tool_call_id="1")) == "<tool_response>\n4\n</tool_response>"


def test_a_spec_without_tools_has_no_degraded_ones() -> None:
    assert AnswerSpec(Request("r", ())).degraded == {}
