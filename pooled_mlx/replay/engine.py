"""An engine with scripted answers: the tiny hybrid model, SmolLM2's tokenizer with Qwen's tags, and everything else real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pooled_mlx.core.card import ModelCard, SamplingDefaults, ThinkingRule
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.assets import replay_tokenizer_json
from pooled_mlx.replay.faults import Slowness
from pooled_mlx.replay.script import ReplayScript, ScriptedAnswers
from pooled_mlx.replay.tiny_model import tiny_hybrid, tiny_hybrid_config
from pooled_mlx.runner.model import LoadedModel
from pooled_mlx.runner.start import MlxSource

REPLAY_CONTEXT = 131_072
REPLAY_STEP = 512

REPLAY_CARD = ModelCard(
    id="replay",
    label="scripted answers",
    folder="replay",
    context_default=REPLAY_CONTEXT,
    context_max=262_144,
    chat_format="qwen3_coder",
    thinking=ThinkingRule(supported=True, keep_options={"preserve_thinking": True}),
    sampling=SamplingDefaults(temperature=0.0),
)


def write_replay_folder(smollm2_folder: Path, folder: Path) -> None:
    """A model folder without weights: tokenizer, template and configuration of the scripted model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, config = replay_tokenizer_json(smollm2_folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    vocab = _padded(Tokens.load(folder).vocab_size)
    (folder / "config.json").write_text(json.dumps(tiny_hybrid_config(vocab)), encoding="utf-8")


def _padded(size: int) -> int:
    """Models have logits for a multiple of 64 tokens."""
    return -(-size // 64) * 64


def load_replay_model(folder: Path) -> LoadedModel:
    """The tiny hybrid model for the vocabulary of `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return tiny_hybrid(config["text_config"]["vocab_size"])


class Replay:
    """Scripted answers for an engine. Satisfies `engine.admission.Rehearsal`."""

    def __init__(self, script: ReplayScript) -> None:
        self._script = script
        self.pace = Slowness()

    def scripts(self, tokens: Tokens) -> ScriptedAnswers:
        """The answers in the tokens of one vocabulary."""
        return ScriptedAnswers(self._script, tokens)

    def hurry(self) -> None:
        """Be slow no more."""
        self.pace.hurry()


def open_replay_engine(
    script: ReplayScript,
    smollm2_folder: Path,
    folder: Path,
    settings: EngineSettings | None = None,
    *,
    on_dead: Callable[[str], None] = lambda reason: None,
) -> LocalEngine:
    """An engine that answers from `script`; its model folder is written to `folder`."""
    write_replay_folder(smollm2_folder, folder)
    settings = settings or EngineSettings()
    settings = replace(settings, prefill_step=settings.prefill_step or REPLAY_STEP)
    source = MlxSource(load_replay_model)
    engine = LocalEngine(REPLAY_CARD, folder, settings, source, on_dead=on_dead, rehearsal=Replay(script))
    engine.start()
    return engine
