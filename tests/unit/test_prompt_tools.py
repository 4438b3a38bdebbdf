"""Tools, past calls and their results in prompts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.request import CustomGrammar, Tool, ToolChoice, Turn
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from tests.prompt_builders import DROP, FAMILIES, READ, builder, call, qwen, request, text_of, user
from tests.small_tokenizer import byte_level_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_system_text_and_tools_reach_every_model(name: str) -> None:
    build = builder(name)
    text = text_of(build.build(request(Turn("system", "Be a pirate."), user("ahoy"), tools=(READ,))), build.tokens)
    assert "Be a pirate." in text
    assert '"name": "read_file"' in text
    assert text.index("pirate") < text.index("ahoy")


@pytest.mark.parametrize("content", ["", "x"])
@pytest.mark.parametrize("name", ["chatml", "replay", "chatml drops", "qwen"])
def test_pairs_of_calls_and_results(name: str, content: str) -> None:
    build = qwen() if name == "qwen" else builder(name)
    turns = (
        user("q"),
        Turn("assistant", tool_calls=(call('{"path": "first"}', "c1"), call('{"path": "second"}', "c2"))),
        Turn("tool", f"2{content}", tool_call_id="c2"),
        Turn("tool", content, tool_call_id="c1"),
    )
    prompt = build.build(request(*turns, tools=(READ,)))
    text = text_of(prompt, build.tokens)
    results = text[text.index("second") :]
    assert f"<tool_response>\n{content}\n</tool_response>\n<tool_response>\n2{content}\n</tool_response>" in results
    assert prompt.turns[-1][1] in (2, 3)


def test_results_that_name_no_call_stay_in_their_order() -> None:
    build = builder("replay")
    calls = (call('{"path": "a"}', "c1"), call('{"path": "b"}', "c2"))
    for ids in ((None, "c1"), ("c2", "c2"), ("x", "c1")):
        turns = (
            user("q"),
            Turn("assistant", tool_calls=calls),
            *(Turn("tool", f"r{i}", tool_call_id=id) for i, id in enumerate(ids)),
        )
        text = text_of(build.build(request(*turns)), build.tokens)
        assert text.index("r0") < text.index("r1")


def test_arguments_of_past_calls_are_never_lost() -> None:
    for build in (builder("replay"), builder("chatml drops"), builder("chatml"), qwen()):
        for arguments in ('{"path": "zebra', '["zebra"]', '"zebra"', "zebra", '{"a": {"b": ["zebra", 1, null, true]}}'):
            prompt = build.build(
                request(user("q"), Turn("assistant", tool_calls=(call(arguments),)), Turn("tool", "r", tool_call_id="c1"))
            )
            assert "zebra" in text_of(prompt, build.tokens)


def test_empty_arguments_are_an_empty_object() -> None:
    build = builder("chatml drops")
    prompts = [
        build.build(request(user("q"), Turn("assistant", tool_calls=(call(arguments),)), Turn("tool", "r", tool_call_id="c1")))
        for arguments in ("", "{}", " \n")
    ]
    assert '"arguments": {}' in text_of(prompts[0], build.tokens)
    assert all(np.array_equal(prompts[0].ids, other.ids) for other in prompts)


def test_spacing_of_arguments_has_no_influence() -> None:
    build = qwen()
    prompts = [
        build.build(request(user("q"), Turn("assistant", tool_calls=(call(arguments),)), Turn("tool", "r", tool_call_id="c1")))
        for arguments in ('{"path":"a","n":1}', '{ "path" : "a" ,\n "n": 1 }')
    ]
    assert np.array_equal(prompts[0].ids, prompts[1].ids)


def test_custom_tools_have_one_string() -> None:
    grammar = CustomGrammar("lark", 'start: "x"')
    tool = Tool("apply_patch", "Patches.", custom=True, grammar=grammar)
    build = builder("replay")
    turns = (
        user("q"),
        Turn("assistant", tool_calls=(call("*** raw\npatch", name="apply_patch", custom=True),)),
        Turn("tool", "r"),
    )
    text = text_of(build.build(request(*turns, tools=(tool,))), build.tokens)
    assert "<parameter=input>\n*** raw\npatch\n</parameter>" in text
    assert '"properties": {"input": {"type": "string"}}' in text
    assert json.dumps(grammar.definition)[1:-1] in text


@pytest.mark.parametrize("parameters", [None, {}, True, {"type": "object", "properties": {}}])
def test_tools_without_parameters(parameters: object) -> None:
    for build in (builder("replay"), builder("chatml"), builder("llama")):
        text = text_of(build.build(request(user("q"), tools=(Tool("noop", parameters=parameters),))), build.tokens)
        assert '"name": "noop"' in text


def test_tools_stay_when_calls_are_forbidden_unless_the_card_says_otherwise() -> None:
    build = builder("replay")
    ask = request(user("q"), tools=(READ,))
    forbidden = replace(ask, tool_choice=ToolChoice("none"))
    assert np.array_equal(build.build(ask).ids, build.build(forbidden).ids)
    build.card = replace(build.card, drop_tools_when_none=True)
    assert "read_file" not in text_of(build.build(forbidden), build.tokens)
    assert build.build(forbidden).tools == ()
    assert "read_file" in text_of(build.build(ask), build.tokens)


def test_templates_that_want_short_ids_get_them() -> None:
    source, special, tags, eos = FAMILIES["mistral"]
    card = ModelCard("test", "Test", chat_format="hermes")
    build = PromptBuilder(byte_level_tokens(special, tags, eos=eos), ChatTemplate(source), card)
    assert build.traits.native_tools
    assert build.traits.short_ids
    text = text_of(
        build.build(
            request(user("q"), Turn("assistant", tool_calls=(call("{}", "call_0123456789"),)), Turn("tool", "r"), tools=(READ,))
        ),
        build.tokens,
    )
    assert "[TOOL_CALLS]" in text
    assert "call_0123456789" not in text


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("name", ["replay", "chatml", "chatml drops"])
@pytest.mark.parametrize("levels", [50, 100_000])
def test_deep_arguments_are_rendered_or_kept_as_text(name: str, levels: int) -> None:
    build = builder(name)
    turns = (user("q"), Turn("assistant", tool_calls=(call(nested(levels)),)), Turn("tool", "r", tool_call_id="c1"))
    text = text_of(build.build(request(*turns)), build.tokens)
    assert text.count("{") >= levels - 1


@pytest.mark.parametrize("name", ["replay", "chatml", "chatml drops"])
def test_what_is_nested_too_deeply_is_refused(name: str) -> None:
    schema: dict = {}
    for _ in range(100_000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ApiError, match="nested too deeply") as refused:
        builder(name).build(request(user("q"), tools=(Tool("deep", parameters=schema),)))
    assert refused.value.kind.status == 400
    while schema:
        schema = schema["properties"]["a"]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("tags", [(), ("<think>", "</think>")], ids=["no tags", "tags"])
def test_what_a_template_leaves_out_beside_calls_is_put_back(name: str, tags: tuple[str, ...]) -> None:
    source, special, _, eos = FAMILIES[name]
    tokens = byte_level_tokens(special, tags, eos=eos)
    build = PromptBuilder(tokens, ChatTemplate(source), ModelCard("t", "T", chat_format="hermes", thinking=DROP))
    assert build.traits.native_tools
    turns = (
        user("q"),
        Turn("assistant", " I look <think>.", reasoning="needs </think> care", tool_calls=(call('{"path": "a"}'),)),
        Turn("tool", "r", tool_call_id="c1"),
    )
    prompt = build.build(request(*turns, tools=(READ,)))
    text = text_of(prompt, tokens)
    assert "<think>\nneeds </think> care\n</think>\n\nI look <think>." in text
    assert text.index("I look") < text.rindex('{"path": "a"}')
    ids = prompt.ids.tolist()
    for tag in tags:
        assert ids.count(tokens.control[tag]) == 1
    bare = build.build(request(turns[0], replace(turns[1], text="", reasoning=None), turns[2], tools=(READ,)))
    assert text.replace("<think>\nneeds </think> care\n</think>\n\nI look <think>.", "").replace("\n\n\n\n", "\n\n") == text_of(
        bare, tokens
    )
