"""Answers that were generated here come back with the ids they were generated with; nothing else does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.request import Request, Thinking, Tool, ToolCall, Turn
from pooled_mlx.prompt.exact_ids import ExactIds, Known, canonical_answer, history_digest
from pooled_mlx.prompt.prompt import Prompt, PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.assets import replay_template
from pooled_mlx.text.tokens import TokenTable
from tests import template_families as families
from tests.answers import stream_of
from tests.small_tokenizer import CHATML, QWEN_TAGS, byte_level_tokens

ON, OFF = Thinking(on=True), Thinking()
READ = Tool("read_file", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})
CALL_TEXT = "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"


def builder(source: str, keep: bool = True, special=CHATML, tags=QWEN_TAGS, eos=("<|im_end|>",), **card) -> PromptBuilder:
    rule = ThinkingRule(supported=True, keep_options={"preserve_thinking": True} if keep else {})
    return PromptBuilder(
        byte_level_tokens(special, tags, eos=eos),
        ChatTemplate(source),
        ModelCard("t", "T", thinking=rule, **card),
        exact_ids=ExactIds(),
    )


def replay(keep: bool = True) -> PromptBuilder:
    return builder(replay_template(), keep)


def spell(tokens: Tokens, text: str) -> list[int]:
    """Ids of an answer as no tokenizer would choose them: one token a byte, tags by their ids."""
    ids: list[int] = []
    place = 0
    for match in tokens.control_pattern.finditer(text):
        ids += [tokens.bytes_of.index(bytes([byte])) for byte in text[place : match.start()].encode()]
        ids.append(tokens.control[match[0]])
        place = match.end()
    return ids + [tokens.bytes_of.index(bytes([byte])) for byte in text[place:].encode()]


def generate(build: PromptBuilder, request: Request, raw: str, turn: Turn, end: str = "<|im_end|>") -> tuple[Prompt, list[int]]:
    """What the engine does: build the prompt, sample `raw`, remember it as `turn`. Returns prompt and all ids in the cache."""
    prompt = build.build(request)
    out = spell(build.tokens, raw + end)
    known = Known(np.array([*prompt.ids[prompt.head :], *out], dtype=np.uint32), turn.reasoning or "")
    assert build.exact_ids is not None
    build.exact_ids.remember(prompt.history, canonical_answer(turn.text, turn.tool_calls), known)
    return prompt, [*prompt.ids.tolist(), *out]


def ask(*turns: Turn, thinking: Thinking = ON, **more) -> Request:
    return Request("r", turns, thinking=thinking, **more)


def user(text: str) -> Turn:
    return Turn("user", text)


def hits(build: PromptBuilder, request: Request, cached: list[int]) -> bool:
    ids = build.build(request).ids[: len(cached)].tolist()
    return ids == cached


def test_without_the_map_the_same_ids_are_not_found() -> None:
    build = replay()
    answer = Turn("assistant", "four tokens here", reasoning="hm")
    _, cached = generate(build, ask(user("q")), "hm\n</think>\n\nfour tokens here", answer)
    assert hits(build, ask(user("q"), answer, user("next")), cached)
    build.exact_ids = None
    assert not hits(build, ask(user("q"), answer, user("next")), cached)


def test_history_is_the_digest_before_the_head() -> None:
    prompt = replay().build(ask(Turn("system", "s"), user("q")))
    assert prompt.history == history_digest(prompt.ids[: prompt.head])


@pytest.mark.parametrize(
    "change",
    [
        lambda turn: turn,
        lambda turn: replace(turn, text="  Café\n\n"),
        lambda turn: replace(turn, text="Cafe\N{COMBINING ACUTE ACCENT}"),
        lambda turn: replace(turn, tool_calls=(replace(turn.tool_calls[0], id="other"),)),
        lambda turn: replace(turn, tool_calls=(replace(turn.tool_calls[0], arguments='{ "path":"a" }'),)),
        lambda turn: replace(turn, reasoning=None),
        lambda turn: replace(turn, reasoning=""),
        lambda turn: replace(turn, reasoning="\nwhy not "),
    ],
    ids=[
        "as it was",
        "blanks",
        "same letters",
        "call id",
        "spacing",
        "reasoning missing",
        "reasoning empty",
        "reasoning trimmed",
    ],
)
@pytest.mark.parametrize("follow", ["tool", "user"])
def test_an_unedited_turn_is_spliced(change, follow: str) -> None:
    build = replay()
    answer = Turn("assistant", "Café", reasoning="why not", tool_calls=(ToolCall("c1", "read_file", '{"path": "a"}'),))
    _, cached = generate(build, ask(user("q"), tools=(READ,)), f"why not\n</think>\n\nCafé\n\n{CALL_TEXT}", answer)
    sent = change(answer)
    after = [Turn("tool", "r", tool_call_id=sent.tool_calls[0].id)] if follow == "tool" else [user("next")]
    request = ask(user("q"), sent, *after, tools=(READ,))
    assert hits(build, request, cached)
    prompt = build.build(request)
    assert len(cached) in prompt.boundaries
    assert build.tokens.bytes_for(prompt.ids[len(cached) :].tolist()).startswith(b"\n<|im_start|>user\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda turn: replace(turn, text="Cafe"),
        lambda turn: replace(turn, reasoning="why"),
        lambda turn: replace(turn, tool_calls=(replace(turn.tool_calls[0], arguments='{"path": "b"}'),)),
        lambda turn: replace(turn, tool_calls=(replace(turn.tool_calls[0], name="write_file"),)),
        lambda turn: replace(turn, tool_calls=()),
        lambda turn: replace(turn, tool_calls=turn.tool_calls * 2),
    ],
    ids=["text", "reasoning", "arguments", "name", "no call", "call twice"],
)
def test_an_edited_turn_is_rendered_as_it_was_sent(change) -> None:
    build = replay()
    answer = Turn("assistant", "Café", reasoning="why not", tool_calls=(ToolCall("c1", "read_file", '{"path": "a"}'),))
    prompt, cached = generate(build, ask(user("q")), f"why not\n</think>\n\nCafé\n\n{CALL_TEXT}", answer)
    request = ask(user("q"), change(answer), user("next"))
    ids = build.build(request).ids
    assert not hits(build, request, cached)
    assert np.array_equal(ids[: prompt.head], prompt.ids[: prompt.head])
    fresh = replay().build(request)
    assert np.array_equal(ids, fresh.ids)


def test_the_same_answer_after_another_history_is_not_ours() -> None:
    build = replay()
    answer = Turn("assistant", "yes", reasoning="hm")
    generate(build, ask(user("q")), "hm\n</think>\n\nyes", answer)
    for turns in ((user("other"), answer, user("next")), (Turn("system", "s"), user("q"), answer, user("next"))):
        assert np.array_equal(build.build(ask(*turns)).ids, replay().build(ask(*turns)).ids)


def test_a_turn_behind_an_edited_one_is_not_ours() -> None:
    build = replay()
    first, second = Turn("assistant", "one"), Turn("assistant", "two")
    generate(build, ask(user("q"), thinking=OFF), "one", first)
    generate(build, ask(user("q"), first, user("r"), thinking=OFF), "two", second)
    edited = ask(user("q"), replace(first, text="ONE"), user("r"), second, user("s"), thinking=OFF)
    assert np.array_equal(build.build(edited).ids, replay().build(edited).ids)


@pytest.mark.parametrize("keep", [True, False])
def test_a_long_conversation_grows_by_its_new_turns_only(keep: bool) -> None:
    build = replay(keep)
    turns: list[Turn] = [Turn("system", "s"), user("q0")]
    for number in range(6):
        thinking = ON if number % 2 else OFF
        reasoning = f"thought {number}" if number % 2 else None
        answer = Turn("assistant", f"answer {number}", reasoning=reasoning)
        raw = f"thought {number}\n</think>\n\nanswer {number}" if number % 2 else f"answer {number}"
        _, cached = generate(build, ask(*turns, thinking=thinking), raw, answer)
        turns += [answer, user(f"q{number + 1}")]
        for next_thinking in (ON, OFF):
            assert hits(build, ask(*turns, thinking=next_thinking), cached)


CHAIN_CALL = (ToolCall("c1", "read_file", '{"path": "a"}'),)


def test_missing_reasoning_comes_back_only_while_the_template_keeps_it() -> None:
    build = replay(keep=False)
    answer = Turn("assistant", "", reasoning="hm", tool_calls=CHAIN_CALL)
    prompt, cached = generate(build, ask(user("q")), f"hm\n</think>\n\n{CALL_TEXT}", answer)
    bare = replace(answer, reasoning=None)
    result = Turn("tool", "r", tool_call_id="c1")
    assert hits(build, ask(user("q"), bare, result), cached)
    dropped = build.build(ask(user("q"), bare, result, user("next")))
    assert np.array_equal(dropped.ids, replay(keep=False).build(ask(user("q"), bare, result, user("next"))).ids)
    assert prompt.head in dropped.boundaries
    assert hits(build, ask(user("q"), answer, result, user("next")), cached)
    assert hits(replay_sharing(build), ask(user("q"), bare, result, user("next")), cached)


def replay_sharing(build: PromptBuilder) -> PromptBuilder:
    """The keeping variant of a builder, with the same memory."""
    other = replay(keep=True)
    other.exact_ids = build.exact_ids
    return other


def test_the_empty_block_of_the_generation_prompt_stays_where_the_template_drops_it() -> None:
    build = replay(keep=False)
    answer = Turn("assistant", "OK")
    _, cached = generate(build, ask(user("q"), thinking=OFF), "OK", answer)
    assert hits(build, ask(user("q"), answer, user("next"), thinking=OFF), cached)
    assert hits(build, ask(user("q"), answer, user("next"), user("more"), thinking=ON), cached)


def test_mixed_turns_are_rendered_the_same_on_every_request() -> None:
    build = replay()
    turns: list[Turn] = [user("q")]
    renderings: list[list[int]] = []
    for number, sent in enumerate(("same", None, "", "edited", "same")):
        answer = Turn("assistant", f"a{number}", reasoning=f"t{number}")
        generate(build, ask(*turns), f"t{number}\n</think>\n\na{number}", answer)
        reasoning = answer.reasoning if sent == "same" else sent
        turns += [replace(answer, reasoning=reasoning), user("go on")]
        prompt = build.build(ask(*turns))
        renderings.append(prompt.ids[: prompt.head].tolist())
    for shorter, longer in pairwise(renderings):
        assert longer[: len(shorter)] == shorter


def test_an_answer_that_was_cut_off_gets_the_end_token_of_the_template() -> None:
    build = replay()
    answer = Turn("assistant", "half an ans")
    prompt, cached = generate(build, ask(user("q"), thinking=OFF), "half an ans", answer, end="")
    request = ask(user("q"), answer, user("next"), thinking=OFF)
    assert hits(build, request, cached)
    after = build.build(request)
    assert after.ids[len(cached)] == build.tokens.control["<|im_end|>"]
    assert {len(cached), len(cached) + 1} <= set(after.boundaries)
    assert prompt.head in after.boundaries


def test_control_tokens_inside_an_answer_make_no_boundaries() -> None:
    build = replay()
    answer = Turn("assistant", "odd <|im_start|> words")
    _, cached = generate(build, ask(user("q"), thinking=OFF), "odd <|im_start|> words", answer)
    request = ask(user("q"), answer, user("next"), thinking=OFF)
    assert hits(build, request, cached)
    assert [index for _, index in build.build(request).turns] == [0, 1, 2]
    assert len(build.build(request).boundaries) == 3


def test_a_model_that_ends_its_turn_with_the_next_opener() -> None:
    eos = ("<|endoftext|>", "<|user|>", "<|observation|>")
    build = builder(families.GLM, False, families.GLM_SPECIAL, families.GLM_TAGS, eos)
    answer = Turn("assistant", "yes")
    _, cached = generate(build, ask(user("q"), thinking=OFF), "\nyes", answer, end="<|user|>")
    prompt = build.build(ask(user("q"), answer, user("next"), thinking=OFF))
    assert prompt.ids[: len(cached)].tolist() == cached
    text = build.tokens.bytes_for(prompt.ids.tolist()).decode()
    assert text.count("<|user|>") == 2


def test_an_answer_of_no_tokens_at_all() -> None:
    build = builder(families.DEEPSEEK, False, families.DEEPSEEK_SPECIAL, (), ("<｜end▁of▁sentence｜>",))
    silent = Turn("assistant", "")
    _, cached = generate(build, ask(user("q")), "", silent, end="")
    assert hits(build, ask(user("q"), silent, user("next")), cached)


def test_a_template_that_writes_another_end_token_than_the_model() -> None:
    eos = ("<|return|>", "<|call|>", "<|endoftext|>")
    build = builder(families.HARMONY, False, families.HARMONY_SPECIAL, (), eos)
    answer = Turn("assistant", "yes")
    raw = "<|channel|>final<|message|>yes"
    _, cached = generate(build, ask(user("q")), raw, answer, end="<|return|>")
    prompt = build.build(ask(user("q"), answer, user("next")))
    assert prompt.ids[: len(cached)].tolist() == cached
    assert build.tokens.bytes_for(prompt.ids[len(cached) :].tolist()).startswith(b"<|start|>user")


def test_a_model_that_opens_its_block_itself() -> None:
    build = builder(families.QWEN3, False)
    answer = Turn("assistant", "", reasoning="hm", tool_calls=CHAIN_CALL)
    raw = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'
    _, cached = generate(build, ask(user("q")), raw, answer)
    result = Turn("tool", "r", tool_call_id="c1")
    for sent in (answer, replace(answer, reasoning=None)):
        assert hits(build, ask(user("q"), sent, result), cached)
    assert hits(build, ask(user("q"), answer, result, user("next")), cached)
    quick = Turn("assistant", "OK")
    _, cached = generate(build, ask(user("p"), thinking=OFF), "OK", quick)
    assert hits(build, ask(user("p"), quick, user("next"), thinking=OFF), cached)


@pytest.mark.parametrize("name", ["MISTRAL", "GEMMA", "LLAMA", "DEEPSEEK"])
def test_other_families_are_spliced_too(name: str) -> None:
    special = getattr(families, f"{name}_SPECIAL")
    end = {"MISTRAL": "</s>", "GEMMA": "<end_of_turn>", "LLAMA": "<|eot_id|>", "DEEPSEEK": "<｜end▁of▁sentence｜>"}[name]
    build = builder(getattr(families, name), False, special, (), (end,))
    first, second = Turn("assistant", "yes indeed"), Turn("assistant", "no")
    generate(build, ask(Turn("system", "s"), user("q")), "yes indeed", first, end=end)
    turns = (Turn("system", "s"), user("q"), first, user("r"))
    _, cached = generate(build, ask(*turns), "no", second, end=end)
    assert hits(build, ask(*turns, second, user("t")), cached)


@pytest.mark.parametrize("results", [1, 2])
def test_answers_to_tool_results_have_a_header_of_their_own_in_mistrals_way(results: int) -> None:
    build = builder(families.MISTRAL, False, families.MISTRAL_SPECIAL, (), ("</s>",), chat_format="hermes")
    assert build.traits.native_tools
    calls = tuple(ToolCall(f"c{number}", "read_file", "{}") for number in range(results))
    called, said = Turn("assistant", "", tool_calls=calls), Turn("assistant", "done")
    _, cached = generate(build, ask(user("q")), "[TOOL_CALLS] odd", called, end="</s>")
    turns = [user("q"), called, *(Turn("tool", f"r{number}", tool_call_id=f"c{number}") for number in range(results))]
    assert hits(build, ask(*turns), cached)
    prompt, cached = generate(build, ask(*turns), " done", said, end="</s>")
    assert build.tokens.text_of(int(prompt.ids[prompt.head])) == "[/TOOL_RESULTS]"
    assert prompt.head == len(prompt) - 1
    after = build.build(ask(*turns, said, user("next")))
    assert after.ids[: len(cached)].tolist() == cached
    assert [index for _, index in after.turns] == list(range(len(turns) + 2))


def test_turns_that_were_merged_are_not_spliced() -> None:
    build = builder(families.GEMMA, False, families.GEMMA_SPECIAL, (), ("<end_of_turn>",))
    answer = Turn("assistant", "one")
    generate(build, ask(user("q")), "one", answer, end="<end_of_turn>")
    request = ask(user("q"), answer, Turn("assistant", "two"), user("r"))
    text = build.tokens.bytes_for(build.build(request).ids.tolist()).decode()
    assert "one\n\ntwo<end_of_turn>" in text


def test_nothing_is_spliced_where_the_turns_cannot_be_told_apart() -> None:
    source = families.CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if 'skip' not in message.content %}"
    )
    build = builder(source, False)
    answer = Turn("assistant", "yes")
    _, cached = generate(build, ask(user("q")), "yes", answer)
    assert hits(build, ask(user("q"), answer, user("r")), cached)
    odd = build.build(ask(user("q"), answer, user("r"), Turn("assistant", "skip"), user("t")))
    assert odd.turns == ()
    assert odd.head in odd.boundaries
    assert not np.array_equal(odd.ids[: len(cached)], cached)


@pytest.mark.parametrize(("thinking", "opened"), [(ON, "hm\n</think>\n\n"), (OFF, "")])
@pytest.mark.parametrize("said", ["It is <think>so</think> written.", "<think>\nso\n</think>\n\nx", "</think>", "a</think>b"])
def test_thinking_tags_in_an_answer_come_back_as_they_were_generated(thinking: Thinking, opened: str, said: str) -> None:
    build = replay()
    prompt = build.build(ask(user("q"), thinking=thinking))
    names = {index: text for text, index in build.tokens.added.items()}
    table = TokenTable(build.tokens.bytes_of, names, build.tokens.eos_ids)
    request = ask(user("q"), thinking=thinking)
    stream = stream_of(table, "qwen3_coder", request, thinking=prompt.reasoning_open)
    for token in spell(build.tokens, opened + said):
        stream.feed(token)
    stream.finish("stop")
    text, reasoning, _ = stream.parsed()
    assert (text, reasoning) == (said, opened[:2])
    answer = Turn("assistant", text, reasoning=reasoning or None)
    _, cached = generate(build, request, opened + said, answer)
    assert hits(build, ask(user("q"), answer, user("next"), thinking=thinking), cached)
    for other in (replace(answer, text=said + "!"), Turn("assistant", said)):
        ids = build.build(ask(user("Q"), other, user("next"), thinking=thinking)).ids
        without = build.build(ask(user("Q"), replace(other, text="x"), user("next"), thinking=thinking)).ids
        for tag in ("<think>", "</think>"):
            assert (ids == build.tokens.control[tag]).sum() == (without == build.tokens.control[tag]).sum()
