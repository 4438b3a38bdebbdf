"""A card for a model that has none, from its own files: config, chat template and generation settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pooled_mlx.core.card import ModelCard, SamplingDefaults, ThinkingRule
from pooled_mlx.core.limits import EFFORTS, LONGEST_DEFAULT_CONTEXT, MAX_TOP_K
from pooled_mlx.store.folder import chat_template, read_json, weights_bytes

FALLBACK_CONTEXT = 4096
"""Tokens, for a model that does not say how long its context is."""

_MEMORY_PER_WEIGHT_BYTE = 1.35
_LEVELS = re.compile(r"""['"](minimal|low|medium|high|xhigh|max)['"]""")


def card_id(name: str) -> str:
    """A card id made of a repo id or folder name: "mlx-community/Foo-4bit" gives "foo-4bit"."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    slug = re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")
    return slug[:80] or "model"


def derive_card(folder: Path, *, repo: str | None = None, revision: str | None = None, name: str | None = None) -> ModelCard:
    """The card of the model in `folder`; `repo` and `revision` where it came from a hub. Raises `StoreError`."""
    config = read_json(folder, "config.json")
    template = chat_template(folder) or ""
    context = context_length(config)
    size = weights_bytes(folder)
    label = name or repo or folder.name
    return ModelCard(
        id=card_id(label),
        label=label.rpartition("/")[2],
        repo=repo,
        revision=revision,
        folder=None if repo else str(folder),
        weights_bytes=size,
        context_default=min(context, LONGEST_DEFAULT_CONTEXT),
        context_max=context,
        thinking=thinking_rule(template),
        sampling=sampling_defaults(read_json(folder, "generation_config.json")),
        minimum_memory_bytes=int(size * _MEMORY_PER_WEIGHT_BYTE),
        eos_token_ids=eos_ids(config, read_json(folder, "generation_config.json")),
    )


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens of context that config.json names; a multimodal model keeps them under text_config."""
    for table in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_sequence_length", "model_max_length", "n_positions", "seq_length"):
            value = table.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return FALLBACK_CONTEXT


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end an answer; the generation settings are the newer word where both name some."""
    for table in (generation, config, config.get("text_config") or {}):
        value = table.get("eos_token_id")
        ids = tuple(entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, int))
        if ids:
            return ids
    return ()


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """The published sampling values; what is not published stays at our own default. Greedy is taken only if it is said."""
    own = SamplingDefaults()

    def number(key: str, low: float, high: float, default: float) -> float:
        value = generation.get(key)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return float(value) if usable else default  # type: ignore[arg-type]

    top_k = generation.get("top_k")
    return SamplingDefaults(
        temperature=number("temperature", 0, 2, own.temperature),
        top_k=min(top_k, MAX_TOP_K) if isinstance(top_k, int) and top_k > 0 else own.top_k,
        top_p=number("top_p", 0, 1, own.top_p),
        min_p=number("min_p", 0, 1, own.min_p),
    )


def thinking_rule(template: str) -> ThinkingRule:
    """Whether and how a chat template can be told to think, by the variables that it reads."""
    variables = {name for name in ("enable_thinking", "thinking", "reasoning_effort") if _reads(template, name)}
    if not variables and "<think>" not in template:
        return ThinkingRule()
    keep: dict[str, Any] = {}
    if _reads(template, "preserve_thinking"):
        keep["preserve_thinking"] = True
    if _reads(template, "clear_thinking"):
        keep["clear_thinking"] = False
    effort = "reasoning_effort" if "reasoning_effort" in variables else None
    return ThinkingRule(
        supported=True,
        switch="thinking" if "thinking" in variables and "enable_thinking" not in variables else "enable_thinking",
        effort_variable=effort,
        efforts=_efforts(template) if effort else {},
        keep_options=keep,
    )


def _reads(template: str, variable: str) -> bool:
    """True when the template reads `variable` itself, not an attribute or a string of that name."""
    return (
        re.search(rf"(?<![\w.'\"<]){variable}(?![\w'\">])", "".join(re.findall(r"{[{%].*?[}%]}", template, re.DOTALL)))
        is not None
    )


def _efforts(template: str) -> dict[str, str]:
    """The five effort words, each mapped to the nearest level that the template names, never to a lower one than asked."""
    named = [word for word in EFFORTS if word in _LEVELS.findall(template)] or ["low", "medium", "high"]
    return {
        word: next((level for level in named if EFFORTS.index(level) >= EFFORTS.index(word)), named[-1]) for word in EFFORTS
    }
