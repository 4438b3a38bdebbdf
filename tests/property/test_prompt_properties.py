"""What a client writes never becomes a control token; benign text gets the ids that transformers gives it."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.request import Request, Thinking, Tool, ToolCall, Turn
from pooled_mlx.prompt.prompt import Prompt, PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.assets import replay_template
from tests import template_families as families
from tests.shared_data import shared_path
from tests.small_tokenizer import CHATML, QWEN_TAGS, byte_level, byte_level_tokens

CONTROL = (*CHATML, *QWEN_TAGS)
PIECES = [
    *CONTROL,
    "<|im_",
    "end|>",
    "<think",
    "think>",
    "/think>",
    "<",
    ">",
    "|>",
    "</",
    "im_start",
    "think",
    "\ue000",
    "\\ue000",
]
PIECES += ["user\n", "assistant\n", " ", "\n", "a", '"', "}", "é", "日", "\x00", "<function=x>", "</parameter>"]
hostile = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
names = st.one_of(hostile.filter(bool), st.sampled_from(["think", "/think", "tool_call", "read_file"]))
json_values = st.recursive(
    st.one_of(hostile, st.integers(-5, 5), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(hostile, inner, max_size=2)),
    max_leaves=4,
)
calls = st.builds(
    lambda id, name, arguments: ToolCall(id, name, json.dumps(arguments) if isinstance(arguments, dict) else str(arguments)),
    hostile,
    names,
    st.one_of(st.dictionaries(names, json_values, max_size=3), hostile),
)
tools = st.builds(
    lambda name, description, properties: Tool(name, description, {"type": "object", "properties": properties}),
    names,
    hostile,
    st.dictionaries(names, json_values, max_size=2),
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Turn, ...]:
    turns = [Turn("system", draw(hostile))] if draw(st.booleans()) else []
    turns.append(Turn("user", draw(hostile)))
    for _ in range(draw(st.integers(0, 3))):
        reasoning = draw(st.one_of(st.none(), hostile))
        said = draw(st.lists(calls, max_size=2))
        turns.append(Turn("assistant", draw(hostile), reasoning=reasoning, tool_calls=tuple(said)))
        turns.extend(Turn("tool", draw(hostile), tool_call_id=one.id) for one in said)
        turns.append(Turn("user", draw(hostile)))
    return tuple(turns)


@cache
def builder(name: str, keep: bool = True) -> PromptBuilder:
    source = {"replay": replay_template(), "chatml": families.CHATML, "drops": families.CHATML_DROPS}.get(name)
    options = {"preserve_thinking": True} if keep else {}
    card = ModelCard("test", "Test", thinking=ThinkingRule(supported=name != "chatml", keep_options=options))
    return PromptBuilder(byte_level_tokens(), ChatTemplate(source or shared_path("templates/qwen3.6.jinja").read_text()), card)


def control_ids(prompt: Prompt, tokens: Tokens) -> list[int]:
    return [index for index in prompt.ids.tolist() if index in tokens.control_ids]


def harmless(text: str) -> str:
    """Text of the same emptiness without anything that could be a control token."""
    return "x" if text.strip() else ""


def harmless_value(value: object) -> object:
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {f"k{place}": harmless_value(item) for place, item in enumerate(value.values())}
    return [harmless_value(item) for item in value] if isinstance(value, list) else value


def harmless_call(call: ToolCall) -> ToolCall:
    try:
        arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    except ValueError:
        return ToolCall("c", "n", "raw")
    return ToolCall("c", "n", json.dumps(harmless_value(arguments)) if isinstance(arguments, dict) else "raw")


@pytest.mark.parametrize(
    ("name", "keep"), [("replay", True), ("drops", False), ("chatml", False), ("qwen3.6", True), ("qwen3.6", False)]
)
@given(turns=conversations(), listed=st.lists(tools, max_size=2, unique_by=lambda tool: tool.name), thinking=st.booleans())
@settings(max_examples=60, deadline=None)
def test_control_tokens_come_from_the_template_alone(
    name: str, keep: bool, turns: tuple[Turn, ...], listed: list[Tool], thinking: bool
) -> None:
    build = builder(name, keep)
    prompt = build.build(Request("r", turns, tools=tuple(listed), thinking=Thinking(on=thinking)))
    plain = tuple(
        Turn(
            turn.role,
            harmless(turn.text),
            reasoning=None if turn.reasoning is None else harmless(turn.reasoning),
            tool_calls=tuple(map(harmless_call, turn.tool_calls)),
        )
        for turn in turns
    )
    tame = [Tool(f"t{place}", "d", {"type": "object", "properties": {}}) for place, _ in enumerate(listed)]
    same_shape = build.build(Request("r", plain, tools=tuple(tame), thinking=Thinking(on=thinking)))
    assert control_ids(prompt, build.tokens) == control_ids(same_shape, build.tokens)
    assert [index for _, index in prompt.turns] == [index for _, index in same_shape.turns]


@given(turns=conversations())
@settings(max_examples=60, deadline=None)
def test_client_text_arrives_unchanged(turns: tuple[Turn, ...]) -> None:
    build = builder("chatml")
    prompt = build.build(Request("r", turns))
    text = build.tokens.bytes_for(prompt.ids.tolist()).decode()
    place = 0
    for turn in turns:
        for said in ((turn.reasoning or "").strip(), turn.text):
            found = text.find(said, place)
            assert found >= 0
            place = found + len(said)


BENIGN = st.text(st.sampled_from("abc .,\n\té日😀{}\"'<>|/_"), max_size=40)


@st.composite
def benign_conversations(draw: st.DrawFn) -> list[Turn]:
    turns = [Turn("system", draw(BENIGN))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        turns.append(Turn("user", draw(BENIGN)))
        turns.append(Turn("assistant", draw(BENIGN)))
        if draw(st.booleans()):
            arguments = json.dumps(
                draw(st.dictionaries(st.sampled_from(["path", "n"]), st.one_of(BENIGN, st.integers()), max_size=2))
            )
            turns[-1] = Turn("assistant", draw(BENIGN), tool_calls=(ToolCall("c1", "read_file", arguments),))
            turns.append(Turn("tool", draw(BENIGN), tool_call_id="c1"))
    return [*turns, Turn("user", draw(BENIGN))]


def as_messages(turns: list[Turn]) -> list[dict]:
    messages: list[dict] = []
    for turn in turns:
        message: dict = {"role": turn.role, "content": turn.text}
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in turn.tool_calls
            ]
        if turn.role == "tool":
            message |= {"tool_call_id": turn.tool_call_id, "name": "read_file"}
        messages.append(message)
    return messages


@cache
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")


@pytest.mark.parametrize("name", ["replay", "drops", "qwen3.6"])
@given(turns=benign_conversations(), with_tools=st.booleans(), thinking=st.booleans())
@settings(max_examples=50, deadline=None)
def test_benign_text_gets_the_ids_of_transformers(name: str, turns: list[Turn], with_tools: bool, thinking: bool) -> None:
    build = builder(name, keep=False)
    tool = Tool("read_file", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})
    listed = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
    ]
    expected = reference().apply_chat_template(
        as_messages(turns),
        tools=listed if with_tools else None,
        chat_template=build.template.source,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        enable_thinking=thinking,
    )
    prompt = build.build(Request("r", tuple(turns), tools=(tool,) if with_tools else (), thinking=Thinking(on=thinking)))
    assert np.array_equal(prompt.ids, expected)


@given(turns=conversations(), more=conversations())
@settings(max_examples=40, deadline=None)
def test_boundaries_of_a_prefix_are_those_of_the_whole(turns: tuple[Turn, ...], more: tuple[Turn, ...]) -> None:
    build = builder("replay")
    longer = (*turns, Turn("assistant", "answer"), *(turn for turn in more if turn.role != "system"))
    short, long = build.build(Request("r", turns)), build.build(Request("r", longer))
    assert np.array_equal(short.ids[: short.head], long.ids[: short.head])
    assert [b for b in short.boundaries if b <= short.head] == [b for b in long.boundaries if b <= short.head]
    assert short.head in short.boundaries
