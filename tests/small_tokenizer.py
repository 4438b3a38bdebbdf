"""Small tokenizers built on the spot, with the control tokens of several model families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pooled_mlx.prompt.tokens import Tokens

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CORPUS = (
    "the user asks and the assistant answers with a tool call or a text",
    'system prompt, functions, parameters, values and results in JSON: {"name": "read_file", "arguments": {"path": "a"}}',
    "one two three four five six seven eight nine ten; <b>bold</b> [list] (note) - dash _ underscore",
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer.to_str()


def byte_level(special: Sequence[str] = CHATML, tags: Sequence[str] = QWEN_TAGS, *, nfc: bool = False) -> Tokenizer:
    """A byte-level tokenizer with `special` tokens and ordinary added `tags`."""
    tokenizer = Tokenizer.from_str(_trained())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    return tokenizer


def byte_level_tokens(
    special: Sequence[str] = CHATML, tags: Sequence[str] = QWEN_TAGS, *, eos: Sequence[str] = ("<|im_end|>",)
) -> Tokens:
    """`byte_level`, ready to use."""
    tokenizer = byte_level(special, tags)
    return Tokens(tokenizer, eos_ids=[tokenizer.token_to_id(text) for text in eos], named={"eos_token": eos[0]})


def sentencepiece(
    special: Sequence[str] = ("<s>", "</s>"), scheme: str = "first", tags: Sequence[AddedToken] = ()
) -> Tokenizer:
    """A tokenizer in the manner of sentencepiece: blanks as ▁, unknown characters as bytes."""
    vocabulary = {"<unk>": 0, **{text: index for index, text in enumerate(special, 1)}}
    for text in [f"<0x{byte:02X}>" for byte in range(256)] + [
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,!",
        "▁t",
        "he",
        "▁the",
        "an",
        "▁an",
    ]:
        vocabulary.setdefault(text, len(vocabulary))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "n"), ("▁", "an")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", *special)])
    tokenizer.add_tokens(list(tags))
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **files: Mapping[str, object]) -> Path:
    """A model folder: `files` are JSON files by their name without the ending."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
