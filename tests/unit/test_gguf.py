from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.gguf_writer import q4_1, q8_0, write_gguf

mx = pytest.importorskip("mlx.core")

from pooled_mlx.store.gguf import GgufError, convert_gguf  # noqa: E402

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "a", "b", "c", "1", "2", "ab", "Ġab"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "llama.context_length": 512,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def _model(rng: np.random.Generator) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, np.ndarray]]:
    """Tensors of a small llama (Q4_1 blocks, Q8_0 embedding, F32 norms) and their meaning by mlx-lm's names."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    meaning: dict[str, np.ndarray] = {}

    def add(name: str, target: str, kind: str, rows: int, columns: int) -> None:
        data, meaning[target] = (q4_1 if kind == "Q4_1" else q8_0)(rng, rows, columns)
        tensors[name + ".weight"] = (kind, (rows, columns), data)

    def norm(name: str, target: str) -> None:
        meaning[target] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        tensors[name + ".weight"] = ("F32", (HIDDEN,), meaning[target].tobytes())

    add("token_embd", "model.embed_tokens", "Q8_0", len(TOKENS), HIDDEN)
    norm("output_norm", "model.norm")
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        block, layer = f"blk.{i}.", f"model.layers.{i}."
        norm(block + "attn_norm", layer + "input_layernorm")
        norm(block + "ffn_norm", layer + "post_attention_layernorm")
        for short, target, rows, columns in (
            ("attn_q", "self_attn.q_proj", HIDDEN, HIDDEN),
            ("attn_k", "self_attn.k_proj", kv, HIDDEN),
            ("attn_v", "self_attn.v_proj", kv, HIDDEN),
            ("attn_output", "self_attn.o_proj", HIDDEN, HIDDEN),
            ("ffn_gate", "mlp.gate_proj", INNER, HIDDEN),
            ("ffn_up", "mlp.up_proj", INNER, HIDDEN),
            ("ffn_down", "mlp.down_proj", HIDDEN, INNER),
        ):
            add(block + short, layer + target, "Q4_1", rows, columns)
    return tensors, meaning


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors, meaning = _model(np.random.default_rng(7))
    write_gguf(tmp_path / "m.gguf", METADATA, tensors)
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
    return folder, meaning


def test_every_weight_means_exactly_what_the_gguf_blocks_mean(made: tuple[Path, dict[str, np.ndarray]]):
    folder, meaning = made
    weights: Any = mx.load(str(folder / "model.safetensors"))
    table = json.loads((folder / "config.json").read_text())["quantization"]
    for name, expected in meaning.items():
        if name + ".scales" not in weights:
            got = weights[name + ".weight"]
        else:
            bits = table.get(name, table)["bits"]
            scales, biases = (weights[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            got = mx.dequantize(weights[name + ".weight"], scales, biases, group_size=32, bits=bits)
        assert np.array_equal(np.array(got), expected), name
    assert len(weights) == 3 * (1 + 7 * LAYERS) + 1 + 2 * LAYERS


def test_the_integers_are_the_files_own(made: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    """Unpacked codes and scales of one Q4_1 tensor equal the bytes of the GGUF file: nothing was quantized anew."""
    folder, _ = made
    data = np.frombuffer(_model(np.random.default_rng(7))[0]["blk.1.ffn_up.weight"][2], np.uint8).reshape(-1, 20)
    codes = np.concatenate([data[:, 4:] & 15, data[:, 4:] >> 4], axis=1)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    packed = np.array(weights["model.layers.1.mlp.up_proj.weight"]).reshape(-1, 4)
    unpacked = np.stack([(packed >> (4 * i)) & 15 for i in range(8)], axis=-1).reshape(-1, 32)
    assert np.array_equal(unpacked, codes)
    assert np.array_equal(
        np.array(weights["model.layers.1.mlp.up_proj.scales"]).reshape(-1).view(np.uint8), data[:, :2].reshape(-1)
    )
    assert np.array_equal(
        np.array(weights["model.layers.1.mlp.up_proj.biases"]).reshape(-1).view(np.uint8), data[:, 2:4].reshape(-1)
    )


def test_mlx_lm_loads_the_folder(made: tuple[Path, dict[str, np.ndarray]]):
    from mlx_lm.utils import load_model

    model, config = load_model(made[0])
    logits = model(mx.array([[1, 4, 5]]))
    assert logits.shape == (1, 3, len(TOKENS))
    assert bool(mx.all(mx.isfinite(logits)))
    assert config["rope_traditional"] is True


def test_tokenizer_and_template(made: tuple[Path, dict[str, np.ndarray]]):
    from tokenizers import Tokenizer

    folder, _ = made
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|> ab12<|im_end|>", add_special_tokens=False).ids == [1, 10, 7, 8, 2]
    assert tokenizer.decode([10, 7, 8]) == " ab12"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["chat_template"]) == ("<|im_end|>", "{{ messages }}")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "holds a 'gemma3' model"),
        ({"tokenizer.ggml.pre": "tekken"}, "splitting rules 'tekken'"),
        ({"llama.rope.dimension_count": 8}, "over 8 of 16 dimensions"),
        ({"tokenizer.chat_template": None}, "no chat template"),
        ({"llama.block_count": None}, r"has no llama\.block_count"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    metadata = {key: value for key, value in {**METADATA, **change}.items() if value is not None}
    write_gguf(tmp_path / "m.gguf", metadata, _model(np.random.default_rng(1))[0])
    with pytest.raises(GgufError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_unknown_tensor_is_refused(tmp_path: Path):
    tensors, _ = _model(np.random.default_rng(1))
    tensors["blk.0.ffn_gate_inp.weight"] = ("F32", (4,), b"\0" * 16)
    write_gguf(tmp_path / "m.gguf", METADATA, tensors)
    with pytest.raises(GgufError, match=r"cannot be placed: blk\.0\.ffn_gate_inp\.weight"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_not_a_gguf_file(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"hello")
    with pytest.raises(GgufError, match=r"m\.gguf is not a readable GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)
