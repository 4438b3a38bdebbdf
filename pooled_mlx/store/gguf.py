"""GGUF to an mlx-lm model folder, bit for bit: nothing is requantized.

`mx.load` reads GGUF's Q4_0, Q4_1 and Q8_0 blocks of 32 weights as MLX affine groups of 32: the same integers and scales in
another order. Only llama-architecture files with a byte-level BPE tokenizer are converted, which is what the catalog has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE = 32
"""Weights that share one scale in GGUF's legacy block formats."""

_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|scales|biases)")
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF format


class GgufError(Exception):
    """The file cannot be converted; the message says which part is not supported."""


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model in `source` to the existing empty folder `target`.

    Writes model.safetensors, config.json, generation_config.json, tokenizer.json and tokenizer_config.json. Must run on a
    thread that may use MLX; nothing stays allocated. Raises `GgufError`.
    """
    try:
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise GgufError(f"{source.name} is not a readable GGUF file: {error}") from error
    tensors, raw = loaded
    metadata = {key: _plain(value) for key, value in raw.items()}
    config = model_config(metadata, tensors)
    weights = {_tensor_name(name): tensor for name, tensor in tensors.items()}
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    if quantization := _quantization(weights):
        config["quantization"] = quantization
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(target / "config.json", config)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write_json(target / "generation_config.json", ends)
    build_tokenizer(metadata).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", tokenizer_config(metadata))
    del tensors, weights, loaded
    mx.clear_cache()


def _plain(value: Any) -> Any:
    """A metadata value without MLX: numbers, text, lists."""
    if isinstance(value, mx.array):
        return value.item() if value.ndim == 0 else value.tolist()
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise GgufError(f"the GGUF file has no {key}")
    return metadata[key]


def model_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of mlx-lm's llama for GGUF metadata. Raises `GgufError` for another architecture."""
    architecture = _need(metadata, "general.architecture")
    if architecture != "llama":
        raise GgufError(f"the GGUF file holds a {architecture!r} model; only 'llama' can be converted")
    if any(name.startswith("rope_freqs") for name in tensors):
        raise GgufError("the GGUF file has its own rope frequencies, which cannot be converted")
    hidden, heads = _need(metadata, "llama.embedding_length"), _need(metadata, "llama.attention.head_count")
    rope_dimensions = metadata.get("llama.rope.dimension_count", hidden // heads)
    if rope_dimensions != hidden // heads:
        raise GgufError(f"rotary embedding over {rope_dimensions} of {hidden // heads} dimensions cannot be converted")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": _need(metadata, "llama.block_count"),
        "intermediate_size": _need(metadata, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": _need(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": len(_need(metadata, "tokenizer.ggml.tokens")),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        # llama.cpp stores q and k rows permuted for interleaved rotation, which MLX calls traditional.
        "rope_traditional": True,
        "max_position_embeddings": _need(metadata, "llama.context_length"),
        "bos_token_id": _need(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _need(metadata, "tokenizer.ggml.eos_token_id"),
    }


def _tensor_name(name: str) -> str:
    """mlx-lm's name of a GGUF tensor."""
    block = _BLOCK_TENSOR.fullmatch(name)
    if block and block.group(2) in _BLOCK_NAMES:
        return f"model.layers.{block.group(1)}.{_BLOCK_NAMES[block.group(2)]}.{block.group(3)}"
    top, _, part = name.partition(".")
    if top in _TOP_NAMES and part in ("weight", "scales", "biases"):
        return f"{_TOP_NAMES[top]}.{part}"
    raise GgufError(f"the GGUF file has a tensor that cannot be placed: {name}")


def _quantization(weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's quantization table: the most common width as the default, the others by layer."""
    bits: dict[str, int] = {}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            bits[layer] = weights[f"{layer}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    if not bits:
        return {}
    common = Counter(bits.values()).most_common(1)[0][0]
    table: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common}
    for layer, width in bits.items():
        if width != common:
            table[layer] = {"group_size": GROUP_SIZE, "bits": width}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and weight.ndim == 2 and layer not in bits:
            table[layer] = False
    return table


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in GGUF metadata. Raises `GgufError` for a kind whose splitting rules are not known here."""
    kind, rules = _need(metadata, "tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or rules not in ("smollm", "gpt-2"):
        raise GgufError(f"the tokenizer '{kind}' with the splitting rules '{rules}' cannot be converted")
    tokens, types = _need(metadata, "tokenizer.ggml.tokens"), _need(metadata, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _need(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = (  # type: ignore[assignment]
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split]) if rules == "smollm" else split
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json that transformers and mlx-lm read."""
    tokens = _need(metadata, "tokenizer.ggml.tokens")
    if "tokenizer.chat_template" not in metadata:
        raise GgufError("the GGUF file has no chat template")
    named = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
        )
        if key in metadata
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
