"""Which model a machine gets: every card on every Mac, by the memory plan."""

from __future__ import annotations

from functools import partial

import pytest

from pooled_mlx.catalog import Catalog, CatalogError, builtin_folder, load_catalog
from pooled_mlx.choice import AGENT_CONTEXT_TOKENS, Verdict, judge, pick_default
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import GIB, DeviceFacts
from tests.mac_devices import MACS

CATALOG = load_catalog(builtin_folder())
CARDS = CATALOG.cards
GIGABYTES = {facts.memory_bytes // GIB: facts for facts in MACS}

TABLE = {
    8: ("qwen3.5-4b", {"qwen3-1.7b"}),
    16: ("qwen3.5-9b", {"qwen3.5-4b"}),
    24: ("gpt-oss-20b", {"qwen3.5-9b-8bit"}),
    32: ("qwen3.8-27b", {"gpt-oss-20b"}),
    36: ("qwen3.6-35b-moe", {"qwen3.8-27b"}),
    48: ("qwen3.6-35b-moe", {"qwen3.8-27b"}),
    64: ("qwen3.6-35b-moe-8bit", {"qwen3-coder-next"}),
    96: ("qwen3.6-35b-moe-8bit", {"gpt-oss-120b", "qwen3.5-122b-moe", "qwen3.8-27b-8bit"}),
    128: ("qwen3.6-35b-moe-8bit", {"gpt-oss-120b", "qwen3.5-122b-moe", "qwen3.8-27b-8bit"}),
}
"""Gigabytes -> the default and the alternatives of a Mac."""


def test_the_macs_are_those_of_the_table():
    assert set(GIGABYTES) == set(TABLE)


@pytest.mark.parametrize("gigabytes", TABLE)
def test_every_mac_has_its_default_and_an_alternative_with_room_for_an_agent(gigabytes: int):
    facts = GIGABYTES[gigabytes]
    default, alternatives = TABLE[gigabytes]
    assert pick_default(CATALOG, facts).id == default
    for card_id in (default, *alternatives):
        verdict = judge(CARDS[card_id], facts)
        assert verdict.fits, f"{card_id} on {facts.name}: {verdict.why}"
        assert (verdict.context_tokens or 0) >= AGENT_CONTEXT_TOKENS


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.id)
@pytest.mark.parametrize("facts", MACS, ids=lambda facts: facts.name)
def test_every_card_fits_every_mac_or_says_why_not(facts: DeviceFacts, card: ModelCard):
    verdict = judge(card, facts)
    if verdict.fits:
        assert min(AGENT_CONTEXT_TOKENS, card.context_default) <= (verdict.context_tokens or 0) <= card.context_default
        assert card.weights_bytes < facts.limit_bytes
    else:
        assert verdict.why.startswith((f"{card.id} does not fit: it needs", f"{card.id} needs", "only "))
        assert "pooled-mlx models list" not in verdict.why
        smaller = [mac for mac in MACS if mac.memory_bytes < facts.memory_bytes]
        assert not any(judge(card, mac).fits for mac in smaller)


def test_the_35b_is_not_offered_below_36_gb_although_the_plan_holds_it():
    verdict = judge(CARDS["qwen3.6-35b-moe"], GIGABYTES[32])
    assert not verdict.fits
    assert verdict.context_tokens
    assert "qwen3.6-35b-moe needs 36.0 GiB of memory, this machine has 32.0 GiB: 648 MB were swapped" in verdict.why
    assert judge(CARDS["qwen3.6-35b-moe"], GIGABYTES[36]).fits


def test_a_context_too_short_for_an_agent_is_not_offered():
    tight = ModelCard("tight", "Tight", repo="a/b", weights_bytes=20 * GIB, kv_bytes_per_token=100_000, context_default=65_536)
    roomy = DeviceFacts("test", 32 * GIB, True, 22 * GIB, 16 * GIB)
    verdict = judge(ModelCard(**{**as_values(tight), "context_max": 65_536}), roomy)
    assert verdict.context_tokens is not None
    assert verdict.why == f"only {verdict.context_tokens:,} tokens of context fit with tight, a coding agent needs 32,768"
    short = ModelCard(**{**as_values(tight), "context_default": 4096, "context_max": 4096})
    assert judge(short, roomy) == Verdict(4096)


def as_values(card: ModelCard) -> dict:
    return {name: getattr(card, name) for name in card.__slots__}


def test_what_is_not_known_of_a_card_is_taken_as_large():
    facts = GIGABYTES[8]
    unknown = ModelCard("unknown", "Unknown", repo="a/b", weights_bytes=GIB, context_default=131_072, context_max=131_072)
    known = ModelCard(**{**as_values(unknown), "kv_bytes_per_token": 10_000})
    assert (judge(unknown, facts).context_tokens or 0) < (judge(known, facts).context_tokens or 0)


def test_a_memory_limit_chooses_a_smaller_model():
    plan = partial(judge, limit_bytes=10 * GIB)
    assert pick_default(CATALOG, GIGABYTES[64], plan).id == "qwen3.5-9b"


def test_the_plan_decides_and_the_rank_among_what_fits():
    cards = Catalog({name: ModelCard(name, name, repo="a/b", rank=rank) for name, rank in (("a", 1), ("b", 3), ("c", 2))})
    fitting = {"a", "c"}
    chosen = pick_default(cards, MACS[0], lambda card, _: Verdict(1) if card.id in fitting else Verdict(None, f"{card.id}: no"))
    assert chosen.id == "c"
    with pytest.raises(CatalogError, match=r"no model fits this machine\. b: no"):
        pick_default(cards, MACS[0], lambda card, _: Verdict(None, f"{card.id}: no"))


def test_without_metal_the_embedded_model_is_the_default():
    assert pick_default(CATALOG, DeviceFacts("x86_64", 128 * GIB)).id == "smollm2-135m"


def test_a_machine_too_small_for_any_model_is_told_the_numbers():
    with pytest.raises(CatalogError, match=r"smollm2-135m needs 2\.0 GiB of memory, this machine has 1\.0 GiB"):
        pick_default(CATALOG, DeviceFacts("tiny", GIB, True))
    assert pick_default(CATALOG, DeviceFacts("small", 4 * GIB, True)).id == "smollm2-135m"
