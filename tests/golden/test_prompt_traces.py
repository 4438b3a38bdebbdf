"""Recorded conversations of real clients as prompts: each is a beginning of the next, up to its generation prompt."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.prompt.exact_ids import ExactIds, Known, canonical_answer
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.replay.assets import replay_template
from tests import template_families as families
from tests.golden.test_traces import MAIN_LOOPS, Replay
from tests.shared_data import shared_path
from tests.small_tokenizer import byte_level_tokens

KEEP = ThinkingRule(supported=True, keep_options={"preserve_thinking": True})
RULES = {"replay": KEEP, "qwen3.6": KEEP, "drops": ThinkingRule(supported=True), "chatml": ThinkingRule()}


def builder(name: str, exact_ids: ExactIds | None = None) -> PromptBuilder:
    source = {"replay": replay_template(), "drops": families.CHATML_DROPS, "chatml": families.CHATML}.get(name)
    template = ChatTemplate(source or shared_path("templates/qwen3.6.jinja").read_text())
    return PromptBuilder(byte_level_tokens(), template, ModelCard("t", "T", thinking=RULES[name]), exact_ids=exact_ids)


plain_builder = cache(builder)


@pytest.mark.parametrize("name", sorted(MAIN_LOOPS))
@pytest.mark.parametrize("template", RULES)
def test_each_prompt_begins_with_the_one_before(template: str, name: str) -> None:
    requests = Replay(name).requests()
    build = plain_builder(template)
    loop = [request for request in (requests[number] for number in MAIN_LOOPS[name]) if request is not None]
    assert len(loop) == len(MAIN_LOOPS[name])
    for (first, before), (second, after) in pairwise((request, build.build(request)) for request in loop):
        shared = before.head
        if template == "drops" and any(turn.role == "user" for turn in second.turns[len(first.turns) :]):
            # This template renders a tool chain anew once the next question is asked: what stood before it stays.
            shared = max(start for start, index in before.turns if first.turns[index].role == "user")
        assert np.array_equal(before.ids[:shared], after.ids[:shared])
        assert shared in after.boundaries
        assert before.system_end == after.system_end > 0
        assert [b for b in before.boundaries if b <= shared] == [b for b in after.boundaries if b <= shared]


@pytest.mark.parametrize("name", sorted(MAIN_LOOPS))
def test_answers_of_ours_are_found_again(name: str) -> None:
    """The recorded answers, generated in tokens that no tokenizer would choose."""
    requests = Replay(name).requests()
    loop = [request for request in (requests[number] for number in MAIN_LOOPS[name]) if request is not None]
    build = builder("qwen3.6", ExactIds())
    tokens = build.tokens
    spelled = [tokens.bytes_of.index(bytes([byte])) for byte in b"anything at all"]
    for before, after in pairwise(loop):
        prompt = build.build(before)
        answer = after.turns[len(before.turns)]
        ids = [*prompt.ids[prompt.head :].tolist(), *spelled, *tokens.eos_ids]
        known = Known(np.array(ids, np.uint32), answer.reasoning or "")
        assert build.exact_ids is not None
        build.exact_ids.remember(prompt.history, canonical_answer(answer.text, answer.tool_calls), known)
        following = build.build(after)
        cached = [*prompt.ids[: prompt.head].tolist(), *ids]
        assert following.ids[: len(cached)].tolist() == cached
        assert len(cached) in following.boundaries


def test_conversations_of_claude_share_system_and_tools() -> None:
    entry = json.loads(shared_path("traces/claude.jsonl").read_text().splitlines()[0])
    body = json.dumps(entry["body"])
    assert body.count("2.1.332.b08") == 1
    other = json.loads(
        body.replace("2.1.332.b08", "2.1.400.1f3").replace("cc_entrypoint=sdk-cli;", "cc_entrypoint=cli; cch=77777;")
    )
    edge = MessagesEdge()
    first, second = (edge.parse(sent, request_id="r", client="trace").request for sent in (entry["body"], other))
    for template in RULES:
        build = plain_builder(template)
        prompt = build.build(first)
        assert np.array_equal(prompt.ids, build.build(second).ids)
        assert b"billing" not in build.tokens.bytes_for(prompt.ids.tolist())
