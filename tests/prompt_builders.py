"""Prompt builders for templates of several families, and short ways to write requests for them."""

from __future__ import annotations

from itertools import pairwise

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.request import Request, Tool, ToolCall, Turn
from pooled_mlx.prompt.prompt import Prompt, PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.assets import replay_template
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
