"""Which models fit a machine, and which one it gets by itself: the memory plan decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pooled_mlx.catalog import EMBEDDED_CARD, Catalog, CatalogError
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import (
    CacheShape,
    DeviceFacts,
    DoesNotFitError,
    format_size,
    loaded_bytes,
    plan_memory,
    score_cell_bytes,
)

AGENT_CONTEXT_TOKENS = 32_768
"""Tokens of context below which a model is offered to nobody: the system prompt and tools of a coding agent alone take half."""

_UNKNOWN_KV_BYTES = 131_072  # per token, where neither a card nor a loaded model says it: a dense model of 30 layers


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a machine makes of a card. `context_tokens` is what the memory plan holds, None where it holds none; `why` says why
    the model is not offered there, "" where it is."""

    context_tokens: int | None
    why: str = ""

    @property
    def fits(self) -> bool:
        """True when the model is offered."""
        return not self.why


Plan = Callable[[ModelCard, DeviceFacts], Verdict]


def judge(card: ModelCard, facts: DeviceFacts, *, limit_bytes: int | None = None) -> Verdict:
    """The verdict of the memory plan, under the user's own limit where there is one, and of what was measured of this model.

    A model without a context that an agent can work in is not offered, unless its own is that short.
    """
    shape = CacheShape(card.kv_bytes_per_token or _UNKNOWN_KV_BYTES, card.state_bytes)
    weights = loaded_bytes(card.weights_bytes, facts.has_metal)
    context, default = card.context_max, card.context_default
    attention = card.attention
    try:
        plan = plan_memory(
            facts,
            weights,
            shape,
            context_max=context,
            context_default=default,
            limit_bytes=limit_bytes,
            cell_bytes=score_cell_bytes(attention.heads, attention.head_dim, facts.has_metal) if attention else 0,
            model=card.id,
        )
    except DoesNotFitError as error:
        return Verdict(None, error.reason)
    if card.minimum_memory_bytes > facts.memory_bytes:
        needed, there = format_size(card.minimum_memory_bytes), format_size(facts.memory_bytes)
        why = f"{card.id} needs {needed} of memory, this machine has {there}"
        source = card.sources.get("minimum_memory_bytes")
        return Verdict(plan.context_tokens, f"{why}: {source}" if source else why)
    wanted = min(AGENT_CONTEXT_TOKENS, card.context_default)
    if plan.context_tokens < wanted:
        short = f"only {plan.context_tokens:,} tokens of context fit with {card.id}, a coding agent needs {wanted:,}"
        return Verdict(plan.context_tokens, short)
    return Verdict(plan.context_tokens)


def pick_default(catalog: Catalog, facts: DeviceFacts, plan: Plan = judge) -> ModelCard:
    """The card of the highest rank that fits; without Metal the embedded one if it does, since larger ones are too slow there.

    Raises `CatalogError` when none fits.
    """
    ranked = catalog.ranked()
    if not facts.has_metal:
        ranked.sort(key=lambda card: card.id != EMBEDDED_CARD)
    for card in ranked:
        if plan(card, facts).fits:
            return card
    smallest = min(ranked, key=lambda card: card.weights_bytes)
    raise CatalogError(f"no model fits this machine. {plan(smallest, facts).why}")
