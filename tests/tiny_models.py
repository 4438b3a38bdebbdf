"""Tiny random models of the target architectures, float32, seeded: one for each kind of prompt cache."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pooled_mlx.runner.model import LoadedModel, mx, wrap_model


def qwen3_5_moe(vocab: int = 512, layers: int = 4, seed: int = 0) -> LoadedModel:
    """Gated DeltaNet + attention + experts: recurrent states, which cannot be trimmed."""
    from mlx_lm.models import qwen3_5_moe as family

    mx.random.seed(seed)
    text = {
        "model_type": "qwen3_5_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    config = {"model_type": "qwen3_5_moe", "text_config": text}
    return _random(family.Model(family.ModelArgs.from_dict(config)), config)


def qwen3_moe(vocab: int = 512, layers: int = 3, seed: int = 0) -> LoadedModel:
    """Plain attention with experts."""
    from mlx_lm.models import qwen3_moe as family

    mx.random.seed(seed)
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return _random(family.Model(family.ModelArgs.from_dict(config)), config)


def llama(vocab: int = 512, layers: int = 4, seed: int = 0) -> LoadedModel:
    """Plain attention: prefixes may end anywhere."""
    from mlx_lm.models import llama as family

    mx.random.seed(seed)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return _random(family.Model(family.ModelArgs.from_dict(config)), config)


def qwen3_5(vocab: int = 512, layers: int = 4, interval: int = 4, seed: int = 0) -> LoadedModel:
    """Gated DeltaNet + attention without experts: the CPU backend gathers experts in float32 only."""
    from mlx_lm.models import qwen3_5 as family

    mx.random.seed(seed)
    text = {
        "model_type": "qwen3_5",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": interval,
        "tie_word_embeddings": False,
    }
    config = {"model_type": "qwen3_5", "text_config": text}
    return _random(family.Model(family.ModelArgs.from_dict(config)), config)


def gemma3(vocab: int = 512, layers: int = 7, window: int = 64, seed: int = 0, pattern: int = 6) -> LoadedModel:
    """Sliding-window layers (rotating caches) beside full attention."""
    from mlx_lm.models import gemma3_text as family

    mx.random.seed(seed)
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": vocab,
        "sliding_window": window,
        "sliding_window_pattern": pattern,
    }
    return _random(family.Model(family.ModelArgs.from_dict(config)), config)


ARCHITECTURES = {"qwen3_5_moe": qwen3_5_moe, "qwen3_moe": qwen3_moe, "llama": llama, "gemma3": gemma3}


def in_16_bits(model: LoadedModel, dtype: mx.Dtype, bits: int | None = None) -> LoadedModel:
    """The model with weights, caches and logits in `dtype`; with `bits` its matrices are quantized in groups of 32."""
    from mlx.nn import quantize

    model.module.set_dtype(dtype)
    if bits is not None:
        quantize(model.module, group_size=32, bits=bits)
    mx.eval(model.module.parameters())
    return wrap_model(model.module, model.config, f"{bits}-bit" if bits else str(dtype))


def _random(module: Any, config: dict[str, Any]) -> LoadedModel:
    """Livelier weights than the default ones, so that greedy decoding does not collapse on one token."""
    from mlx.utils import tree_map

    def scale(array: mx.array) -> mx.array:
        return mx.random.normal(array.shape) * (1.0 / (array.shape[-1] ** 0.5)) if array.ndim >= 2 else array

    module.update(tree_map(scale, module.parameters()))
    module.set_dtype(mx.float32)
    mx.eval(module.parameters())
    module.eval()
    return wrap_model(module, config, "float32")


def tokens(count: int, vocab: int = 512, seed: int = 1) -> np.ndarray:
    """`count` random ids, uint32."""
    draw = random.Random(seed)
    return np.array([draw.randrange(vocab) for _ in range(count)], np.uint32)
