"""Reasoning, thinking options and dates in prompts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.request import Thinking, Tool, Turn
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate, Dates
from tests import template_families as families
from tests.prompt_builders import DROP, FAMILIES, KEEP, READ, builder, call, qwen, request, text_of, user
from tests.small_tokenizer import byte_level_tokens


def test_effort_and_switch_go_to_the_template() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ think }} {{ level is defined and level }}]"
    rule = ThinkingRule(supported=True, switch="think", effort_variable="level", efforts={"high": "xhigh", "low": "low"})
    build = PromptBuilder(byte_level_tokens(), ChatTemplate(source), ModelCard("t", "T", thinking=rule))
    cases = {
        Thinking(): "[False False]",
        Thinking(on=True): "[True False]",
        Thinking(on=True, effort="high"): "[True xhigh]",
        Thinking(on=True, effort="max"): "[True False]",
        Thinking(on=False, effort="high"): "[False False]",
    }
    for thinking, expected in cases.items():
        assert text_of(build.build(request(user("q"), thinking=thinking)), build.tokens) == f"q{expected}"
    plain = PromptBuilder(byte_level_tokens(), ChatTemplate(source), ModelCard("t", "T"))
    assert text_of(plain.build(request(user("q"), thinking=Thinking(on=True))), plain.tokens) == "q[ False]"


CHAIN = (
    user("q1"),
    Turn("assistant", "a1", reasoning=" first thought \n", tool_calls=(call('{"path": "a"}'),)),
    Turn("tool", "r1", tool_call_id="c1"),
    Turn("assistant", "a2", reasoning="second thought"),
    user("q2"),
)


@pytest.mark.parametrize("rule", [KEEP, DROP], ids=["keep", "drop"])
@pytest.mark.parametrize("name", [*FAMILIES, "qwen"])
def test_reasoning_that_was_sent_is_in_its_turn(name: str, rule: ThinkingRule) -> None:
    build = qwen(rule) if name == "qwen" else builder(name, rule)
    text = text_of(build.build(request(*CHAIN)), build.tokens)
    places = [text.index(said) for said in ("q1", "first thought", "a1", "r1", "second thought", "a2", "q2")]
    assert places == sorted(places)
    assert text.count("first thought") == text.count("second thought") == 1


def test_reasoning_stands_between_control_tokens_also_where_the_template_drops_it() -> None:
    keep, drop = qwen(KEEP), qwen(DROP)
    assert keep.traits.keeps_always
    assert drop.traits.keeps_chain
    assert not drop.traits.keeps_always
    assert np.array_equal(keep.build(request(*CHAIN)).ids, drop.build(request(*CHAIN)).ids)


def test_an_empty_block_of_the_template_is_not_left_beside_the_reasoning() -> None:
    build = builder("glm")
    text = text_of(build.build(request(*CHAIN)), build.tokens)
    assert "<|assistant|>\n<think>second thought</think>\na2" in text


def test_reasoning_that_was_not_sent_is_not_invented() -> None:
    turns = [replace(turn, reasoning=None) for turn in CHAIN]
    empty = [replace(turn, reasoning="") if turn.role == "assistant" else turn for turn in turns]
    for build in (qwen(DROP), qwen(KEEP), builder("chatml")):
        assert np.array_equal(build.build(request(*turns)).ids, build.build(request(*empty)).ids)
        assert "thought" not in text_of(build.build(request(*turns)), build.tokens)


class Clock:
    now = datetime(2026, 11, 28, 23, 59)

    def __call__(self) -> datetime:
        return self.now


def test_the_date_of_a_conversation_stays() -> None:
    clock = Clock()
    build = builder("harmony", dates=Dates(clock))
    turns = (user("one"), Turn("assistant", "two"), user("three"))
    first = build.build(request(*turns[:1]))
    clock.now += timedelta(days=1)
    second = build.build(request(*turns))
    assert "2026-11-28" in text_of(second, build.tokens)
    assert np.array_equal(first.ids[: first.head], second.ids[: first.head])
    assert "2026-11-29" in text_of(build.build(request(user("new talk"))), build.tokens)


def test_another_set_of_tools_is_another_conversation_after_midnight() -> None:
    clock = Clock()
    source = "{{ '<|im_start|>system\\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\\n' }}" + families.QWEN3
    build = PromptBuilder(byte_level_tokens(), ChatTemplate(source), ModelCard("t", "T"), dates=Dates(clock))
    assert build.traits.native_tools
    other = replace(READ, name="write_file")

    def date(*tools: Tool) -> str:
        text = text_of(build.build(request(user("the same words"), tools=tools)), build.tokens)
        return next(day for day in ("2026-11-28", "2026-11-29") if day in text)

    assert date(READ) == "2026-11-28"
    clock.now += timedelta(days=1)
    assert [date(other), date(READ), date(other), date()] == ["2026-11-29", "2026-11-28", "2026-11-29", "2026-11-29"]


def test_a_model_that_opens_its_block_itself() -> None:
    build = builder("qwen3")
    assert build.traits.native_tools
    assert (build.traits.keeps_chain, build.traits.keeps_always) == (True, False)
    on, off = (build.build(request(user("q"), thinking=Thinking(on=way))) for way in (True, False))
    assert (on.opened, on.reasoning_open) == ("", False)
    assert (off.opened, off.reasoning_open) == ("<think>\n\n</think>\n\n", False)
    assert on.head == off.head
