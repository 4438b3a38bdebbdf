"""The tokenizer of a model folder: bytes of each token, end tokens, control tokens that client text never becomes."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pooled_mlx.prompt.tokens import PieceMemo, TokenizerError, Tokens
from tests.small_tokenizer import CHATML, QWEN_TAGS, byte_level, byte_level_tokens, sentencepiece, write_folder

TEXTS = [
    "plain words",
    "naïve Ελλάδα 日本語 😀👩‍👩‍👧",
    "tabs\tand\r\nCRLF  and trailing   ",
    "NUL \x00 inside",
    "<|im_start|>user\n<think></think><tool_call>",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_spell_the_text(text: str) -> None:
    tokens = byte_level_tokens()
    ids = tokens.encode_plain(text)
    assert tokens.bytes_for(ids.tolist()).decode() == text
    assert not set(ids.tolist()) & tokens.control_ids


@pytest.mark.parametrize("text", ["the an the", "an unknown 日本 sign", "line\nbreak"])
def test_sentencepiece_ids_spell_the_text(text: str) -> None:
    tokens = Tokens(sentencepiece(scheme="never"))
    assert tokens.bytes_for(tokens.encode_plain(text).tolist()).decode() == text


def test_bytes_of_every_id() -> None:
    tokens = byte_level_tokens()
    assert len(tokens.bytes_of) == tokens.vocab_size
    assert {bytes([byte]) for byte in range(256)} <= set(tokens.bytes_of)
    assert tokens.bytes_of[tokens.added["<think>"]] == b"<think>"
    pieces = Tokens(sentencepiece())
    assert pieces.bytes_of[pieces._full.token_to_id("<0x0A>")] == b"\n"
    assert pieces.bytes_of[pieces._full.token_to_id("▁the")] == b" the"


def test_other_decoders_are_asked() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokens = Tokens(tokenizer)
    assert tokens.bytes_of[1] == b"play"
    assert tokens.text_of(2).endswith("ing")


def test_control_tokens_keep_their_ids_in_trusted_text_only() -> None:
    tokens = byte_level_tokens()
    text = "<|im_start|>user\nhi<|im_end|><think>"
    trusted = tokens.encode_with_control(text).tolist()
    assert trusted[0] == tokens.added["<|im_start|>"]
    assert trusted[-1] == tokens.added["<think>"]
    assert not set(tokens.encode_plain(text).tolist()) & tokens.control_ids


def test_vocabulary_that_can_spell_a_control_token_by_itself() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0)] + [(letter, -3.0) for letter in "</s>abc"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    assert tokenizer.encode("a</s>b").ids.count(1) == 1
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokens = Tokens(tokenizer)
    ids = tokens.encode_plain("a</s>b</s>").tolist()
    assert 1 not in ids
    assert tokens.bytes_for(ids) == b"a</s>b</s>"


def test_blanks_and_html_elements_are_text_although_they_are_added() -> None:
    tags = [AddedToken(text, special=False, normalized=False) for text in ("\n\n", "<table>", "</h1>", "<think>")]
    tokens = Tokens(sentencepiece(tags=tags))
    assert set(tokens.control) == {"<unk>", "<s>", "</s>", "<think>"}
    ids = tokens.encode_plain("a\n\nb<table>").tolist()
    assert {tokens.added["\n\n"], tokens.added["<table>"]} <= set(ids)


def test_text_tokens_behind_control_tokens_keep_their_ids() -> None:
    tokenizer = byte_level(tags=("<think>", "<b>", "\t\t"))
    tokens = Tokens(tokenizer)
    assert set(tokens.added) - set(tokens.control) == {"<b>", "\t\t"}
    ids = tokens.encode_plain("x<b>\t\t<think>").tolist()
    assert ids[1:3] == [tokens.added["<b>"], tokens.added["\t\t"]]
    assert tokens.bytes_for(ids) == b"x<b>\t\t<think>"


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    tokens = byte_level_tokens()
    assert tokens.bytes_for(tokens.encode_plain("a\ud800b").tolist()).decode() == "a\ufffdb"


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokens = Tokens(Tokenizer.from_str(tokenizer.to_str()))
    text = "one two three " * 50
    assert tokens.bytes_for(tokens.encode_plain(text).tolist()).decode() == text
    assert tokens.bytes_for(tokens.encode_with_control(text).tolist()).decode() == text


def test_blank_at_the_start_of_a_prompt_only() -> None:
    tokens = Tokens(sentencepiece(scheme="first"))
    assert tokens.bytes_for(tokens.encode_plain("the").tolist()) == b" the"
    assert tokens.bytes_for(tokens.encode_plain("the", inside=True).tolist()) == b"the"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 2}, {}, {"<|im_end|>", "x2"}),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 4}, {"<|im_end|>", "x2", "x3"}),
        ({}, {"eos_token_id": 4}, {"<|im_end|>", "x4"}),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [5]}}, {"<|im_end|>", "x5"}),
        ({}, {}, {"<|im_end|>"}),
    ],
)
def test_end_tokens_of_a_folder(tmp_path: Path, generation: dict, config: dict, expected: set) -> None:
    folder = write_folder(
        tmp_path,
        byte_level(),
        generation_config=generation,
        config=config,
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "model_max_length": 5},
    )
    tokens = Tokens.load(folder)
    ids = {int(name[1:]) if name.startswith("x") else tokens.added[name] for name in expected}
    assert tokens.eos_ids == ids
    assert tokens.named == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


def test_tokens_that_stand_in_the_configuration_only(tmp_path: Path) -> None:
    tokenizer = byte_level(tags=())
    index = tokenizer.get_vocab_size()
    entry = {"content": "<think>", "special": False, "normalized": False}
    folder = write_folder(tmp_path, tokenizer, tokenizer_config={"added_tokens_decoder": {str(index): entry}})
    assert Tokens.load(folder).control["<think>"] == index
    folder = write_folder(tmp_path, tokenizer, tokenizer_config={"added_tokens_decoder": {str(index + 7): entry}})
    with pytest.raises(TokenizerError, match=r"'<think>' the id .* do not belong together"):
        Tokens.load(folder)


def test_damaged_folders_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot be read.*Fetch the model again"):
        Tokens.load(tmp_path)
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match="must be a JSON object"):
        Tokens.load(tmp_path)


def test_memo_stays_within_its_budget_and_gives_the_same_ids() -> None:
    tokens = byte_level_tokens()
    small = Tokens(byte_level(), memo_bytes=4000)
    for number in range(200):
        text = f"message {number} " * (number % 17)
        assert small.encode_plain(text).tolist() == tokens.encode_plain(text).tolist()
        assert small.memo_bytes <= 4000
    first = tokens.encode_plain("again and again")
    assert tokens.encode_plain("again and again") is first
    assert not first.flags.writeable


def test_memo_forgets_the_least_recently_used() -> None:
    memo = PieceMemo(3 * PieceMemo._cost("a", np.zeros(1, np.uint32)))
    ids = np.zeros(1, np.uint32)
    for text in "abc":
        memo.put(text, False, ids)
    assert memo.get("a", False) is ids
    memo.put("d", False, ids)
    assert memo.get("b", False) is None
    assert memo.get("a", False) is ids
    memo.put("x" * 10_000, False, ids)
    assert memo.get("x" * 10_000, False) is None


def test_threads_share_one_tokenizer() -> None:
    tokens = Tokens(byte_level(), memo_bytes=3000)
    texts = [f"text {number} of many" * 5 for number in range(40)]
    expected = [byte_level_tokens().encode_plain(text).tolist() for text in texts]
    results: dict[int, list] = {}

    def work(thread: int) -> None:
        results[thread] = [tokens.encode_plain(text).tolist() for text in texts]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[number] == expected for number in range(4))


def test_names_of_special_tokens_come_from_both_files(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        byte_level(CHATML, QWEN_TAGS),
        special_tokens_map={"pad_token": "<|endoftext|>"},
        tokenizer_config={"eos_token": "<|im_end|>"},
    )
    assert Tokens.load(folder).named == {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"eos_token": "<|im_end|>"}
