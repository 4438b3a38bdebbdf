"""A tiny random model with the layers of Qwen3.6 (Gated DeltaNet, attention, experts), built on the spot for scripted answers.

Its own words mean nothing: scripted answers bend its logits. Everything around it is real: caches, batches, pool, grammar.
"""

from __future__ import annotations

from typing import Any

from pooled_mlx.runner.model import LoadedModel, mx, wrap_model


def tiny_hybrid_config(vocab_size: int, *, layers: int = 4, hidden: int = 64) -> dict[str, Any]:
    """The configuration of a hybrid mixture-of-experts model with `vocab_size` logits."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab_size,
        "max_position_embeddings": 262_144,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden // 2,
        "shared_expert_intermediate_size": hidden // 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    return {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False, "dtype": "float32"}


def tiny_hybrid(vocab_size: int, *, layers: int = 4, hidden: int = 64, seed: int = 7) -> LoadedModel:
    """The model with seeded random weights in float32."""
    from mlx.utils import tree_map_with_path
    from mlx_lm.models import qwen3_5_moe

    mx.random.seed(seed)
    config = tiny_hybrid_config(vocab_size, layers=layers, hidden=hidden)
    arguments: Any = qwen3_5_moe.ModelArgs.from_dict(config)
    module = qwen3_5_moe.Model(arguments)

    def draw(path: str, array: mx.array) -> mx.array:
        if path.endswith("A_log"):  # slow decay, so that the recurrent state really remembers the prompt
            return mx.log(mx.random.uniform(0.01, 0.3, array.shape))
        if array.ndim < 2:
            return array
        return mx.random.normal(array.shape) * (1.0 / array.shape[-1] ** 0.5)

    module.update(tree_map_with_path(draw, module.parameters()))
    module.set_dtype(mx.float32)
    mx.eval(module.parameters())
    module.eval()
    return wrap_model(module, config, "float32")
