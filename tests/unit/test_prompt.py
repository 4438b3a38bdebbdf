"""From a request to ids: turns, tools, reasoning and boundaries, on templates of several families."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.request import CustomGrammar, Request, Thinking, Tool, ToolCall, ToolChoice, Turn
from pooled_mlx.engine.prompt import Prompt, PromptBuilder
from pooled_mlx.engine.replay_assets import replay_template
from pooled_mlx.engine.templates import ChatTemplate, Dates
from pooled_mlx.engine.tokens import Tokens
from tests import template_families as families
from tests.shared_data import shared_path
from tests.small_tokenizer import CHATML, QWEN_TAGS, byte_level_tokens

KEEP = ThinkingRule(supported=True, keep_options={"preserve_thinking": True})
DROP = ThinkingRule(supported=True)
READ = Tool("read_file", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
FAMILIES = {
    "chatml": (families.CHATML, CHATML, (), ("<|im_end|>",)),
    "chatml drops": (families.CHATML_DROPS, CHATML, QWEN_TAGS, ("<|im_end|>",)),
    "qwen3": (families.QWEN3, CHATML, QWEN_TAGS, ("<|im_end|>",)),
    "replay": (replay_template(), CHATML, QWEN_TAGS, ("<|im_end|>",)),
    "llama": (families.LLAMA, families.LLAMA_SPECIAL, (), ("<|eot_id|>",)),
    "mistral": (families.MISTRAL, families.MISTRAL_SPECIAL, (), ("</s>",)),
    "gemma": (families.GEMMA, families.GEMMA_SPECIAL, (), ("<eos>", "<end_of_turn>")),
    "glm": (families.GLM, families.GLM_SPECIAL, families.GLM_TAGS, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "deepseek": (families.DEEPSEEK, families.DEEPSEEK_SPECIAL, ("<think>", "</think>"), ("<｜end▁of▁sentence｜>",)),
    "harmony": (families.HARMONY, families.HARMONY_SPECIAL, (), ("<|return|>", "<|call|>", "<|endoftext|>")),
}


def builder(name: str, rule: ThinkingRule = DROP, **more) -> PromptBuilder:
    source, special, tags, eos = FAMILIES[name]
    card = ModelCard("test", "Test", thinking=rule)
    return PromptBuilder(byte_level_tokens(special, tags, eos=eos), ChatTemplate(source), card, **more)


def qwen(rule: ThinkingRule = KEEP) -> PromptBuilder:
    source = shared_path("templates/qwen3.6.jinja").read_text()
    return PromptBuilder(byte_level_tokens(), ChatTemplate(source), ModelCard("q", "Q", thinking=rule))


def request(*turns: Turn, **more) -> Request:
    return Request("r1", turns, **more)


def user(text: str) -> Turn:
    return Turn("user", text)


def call(arguments: str, id: str = "c1", name: str = "read_file", **more) -> ToolCall:
    return ToolCall(id, name, arguments, **more)


def text_of(prompt: Prompt, tokens: Tokens) -> str:
    return tokens.bytes_for(prompt.ids.tolist()).decode()


def marked(prompt: Prompt, tokens: Tokens) -> list[str]:
    """The prompt's text, cut at its boundaries."""
    cuts = [0, *prompt.boundaries, len(prompt)]
    return [tokens.bytes_for(prompt.ids[a:b].tolist()).decode() for a, b in pairwise(cuts)]


def test_a_prompt_and_its_places() -> None:
    build = builder("replay", KEEP)
    prompt = build.build(
        request(
            Turn("system", "Sys."),
            user("hi"),
            Turn("assistant", "ok", tool_calls=(call('{"path": "a"}'), call('{"path": "b"}', "c2"))),
            Turn("tool", "A", tool_call_id="c1"),
            Turn("tool", "B", tool_call_id="c2"),
            Turn("assistant", "done"),
            user("more"),
            thinking=Thinking(on=True),
        )
    )
    assert marked(prompt, build.tokens) == [
        "<|im_start|>system\nSys.<|im_end|>\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\nok\n\n<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=read_file>\n<parameter=path>\nb\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>",
        "\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\ndone<|im_end|>",
        "\n<|im_start|>user\nmore<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
    ]
    assert prompt.head == prompt.boundaries[-1]
    assert prompt.system_end == prompt.boundaries[0]
    assert prompt.turns == tuple(zip((0, *prompt.boundaries[:5]), (0, 1, 2, 3, 5, 6), strict=True))
    assert prompt.opened == "<think>\n"
    assert prompt.reasoning_open
    assert prompt.ids.dtype == np.uint32
    assert not prompt.ids.flags.writeable


def test_thinking_off_closes_the_block_in_the_generation_prompt() -> None:
    prompt = builder("replay", KEEP).build(request(user("hi")))
    assert prompt.opened == "<think>\n\n</think>\n\n"
    assert not prompt.reasoning_open


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_head_and_a_boundary_for_each_turn(name: str) -> None:
    build = builder(name)
    turns = (user("one"), Turn("assistant", "two"), user("three"), Turn("assistant", "four"), user("five"))
    prompt = build.build(request(*turns))
    assert prompt.head in prompt.boundaries
    assert prompt.turns[-1][1] == 4
    starts = {start for start, _ in prompt.turns}
    assert {start for start in starts if start} <= set(prompt.boundaries)
    assert [index for _, index in prompt.turns] == [0, 1, 2, 3, 4]
    rest = build.tokens.bytes_for(prompt.ids[prompt.head :].tolist()).decode()
    assert rest.startswith(build.traits.header.rstrip())
    assert "five" not in rest
    for text in ("one", "two", "three", "four", "five"):
        assert text in text_of(prompt, build.tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_longer_conversation_keeps_the_boundaries_of_its_beginning(name: str) -> None:
    build = builder(name)
    turns = [
        Turn("system", "Sys."),
        user("one"),
        Turn("assistant", "two"),
        user("three"),
        Turn("assistant", "four"),
        user("five"),
    ]
    short, long = build.build(request(*turns[:4])), build.build(request(*turns))
    same = next(
        (place for place, (a, b) in enumerate(zip(short.ids, long.ids, strict=False)) if a != b), min(len(short), len(long))
    )
    assert same >= short.head
    assert [b for b in short.boundaries if b <= short.head] == [b for b in long.boundaries if b <= short.head]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_one_role_and_a_missing_system_turn_are_no_problem(name: str) -> None:
    build = builder(name)
    text = text_of(
        build.build(request(user("aaa"), user("bbb"), Turn("assistant", "ccc"), Turn("assistant", "ddd"), user("eee"))),
        build.tokens,
    )
    places = [text.index(said) for said in ("aaa", "bbb", "ccc", "ddd", "eee")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", FAMILIES)
def test_system_text_and_tools_reach_every_model(name: str) -> None:
    build = builder(name)
    text = text_of(build.build(request(Turn("system", "Be a pirate."), user("ahoy"), tools=(READ,))), build.tokens)
    assert "Be a pirate." in text
    assert '"name": "read_file"' in text
    assert text.index("pirate") < text.index("ahoy")


@pytest.mark.parametrize("name", FAMILIES)
def test_after_compaction_there_may_be_no_user_turn(name: str) -> None:
    build = builder(name)
    turns = (
        Turn("system", "Sys."),
        Turn("assistant", tool_calls=(call('{"path": "a"}'),)),
        Turn("tool", "found", tool_call_id="c1"),
    )
    prompt = build.build(request(*turns, tools=(READ,)))
    text = text_of(prompt, build.tokens)
    assert "read_file" in text
    assert text.index('"path": "a"' if '"path": "a"' in text else "<parameter=path>") < text.index("found")
    assert np.array_equal(prompt.ids, build.build(request(*turns, tools=(READ,))).ids)


@pytest.mark.parametrize("turns", [(), (Turn("system", "s"),)], ids=["nothing", "system only"])
def test_nothing_to_answer_is_refused(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(ApiError, match="no user message") as refused:
        qwen().build(request(*turns))
    assert (refused.value.kind.status, refused.value.param) == (400, "messages")


def test_an_assistant_turn_last_is_refused() -> None:
    with pytest.raises(ApiError, match="last message is from the assistant") as refused:
        qwen().build(request(user("hi"), Turn("assistant", "1, 2,")))
    assert refused.value.param == "messages[1].role"


def test_what_a_template_refuses_is_a_clear_400() -> None:
    source = "{{ raise_exception('Never on a Sunday.') if 'b' in messages[0].content else messages[-1].content }}"
    build = PromptBuilder(byte_level_tokens(), ChatTemplate(source), ModelCard("t", "T"))
    with pytest.raises(ApiError, match=r"chat template refuses this conversation: Never on a Sunday\.") as refused:
        build.build(request(user("b")))
    assert refused.value.kind.status == 400


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


def test_the_date_of_a_conversation_stays() -> None:
    class Clock:
        now = datetime(2026, 11, 28, 23, 59)

        def __call__(self) -> datetime:
            return self.now

    clock = Clock()
    build = builder("harmony", dates=Dates(clock))
    turns = (user("one"), Turn("assistant", "two"), user("three"))
    first = build.build(request(*turns[:1]))
    clock.now += timedelta(days=1)
    second = build.build(request(*turns))
    assert "2026-11-28" in text_of(second, build.tokens)
    assert np.array_equal(first.ids[: first.head], second.ids[: first.head])
    assert "2026-11-29" in text_of(build.build(request(user("new talk"))), build.tokens)


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


def test_a_model_that_opens_its_block_itself() -> None:
    build = builder("qwen3")
    assert build.traits.native_tools
    assert (build.traits.keeps_chain, build.traits.keeps_always) == (True, False)
    on, off = (build.build(request(user("q"), thinking=Thinking(on=way))) for way in (True, False))
    assert (on.opened, on.reasoning_open) == ("", False)
    assert (off.opened, off.reasoning_open) == ("<think>\n\n</think>\n\n", False)
    assert on.head == off.head
