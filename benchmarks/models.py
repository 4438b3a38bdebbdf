"""The models under measurement: the embedded one, its float32 twin on disk, a tiny hybrid, and one that computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pooled_mlx.catalog import load_catalog
from pooled_mlx.cli.common import convert
from pooled_mlx.core.card import ModelCard
from pooled_mlx.engine.mlx_backend import KVCache, LoadedModel, load, mx, wrap_model
from pooled_mlx.store import ensure_model
from pooled_mlx.store.paths import cache_folder

SMALL = "smollm2-135m"


def small_card() -> ModelCard:
    """The card of the embedded model."""
    return load_catalog().get(SMALL)


def small_folder() -> Path:
    """The embedded model's folder, fetched where it is missing."""
    return ensure_model(small_card(), convert=convert).folder


def float32_folder() -> Path:
    """The embedded model as mlx-lm loads it: the same float32 weights that we run on the CPU backend."""
    from mlx_lm.utils import save_model

    folder = cache_folder() / "benchmarks" / "smollm2-float32"
    if (folder / "model.safetensors").is_file():
        return folder
    source = small_folder()
    folder.mkdir(parents=True, exist_ok=True)
    model = load(source)
    save_model(folder, model.module)
    config = {key: value for key, value in model.config.items() if not key.startswith("quantization")}
    import json

    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


class _Nothing:
    """A model that computes nothing: one fixed row of logits, and a cache that only counts."""

    def __init__(self, vocab: int) -> None:
        row = mx.zeros(vocab)
        row[5000] = 10.0
        self._row = row[None, None]
        mx.eval(self._row)
        self.layers = [None]

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def parameters(self) -> dict[str, Any]:
        return {"row": self._row}

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        batch, tokens = ids.shape
        new = mx.zeros((batch, 1, tokens, 1))
        keys, _ = cache[0].update_and_fetch(new, new)
        return mx.broadcast_to(self._row + keys[:, :1, :1, :1].reshape(batch, 1, 1), (batch, tokens, self._row.shape[-1]))


def null_model(vocab: int) -> LoadedModel:
    """A model without any computation, to see what everything around a model costs."""
    return wrap_model(_Nothing(vocab), {"model_type": "nothing"})
