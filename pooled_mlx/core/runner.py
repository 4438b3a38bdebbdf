"""The port between the engine, which decides, and the runner, which computes: values and one protocol.

Caches, buffers and states are named by numbers; ids and small values are all that goes over. Arrays never leave the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.memory import MemoryPlan
from pooled_mlx.core.ports import EngineSettings

Ranges = tuple[tuple[int, int], ...]
"""Stretches `lo..hi` of a path in tokens, ascending, without overlap."""

Run = Sequence[int] | None
"""Tokens of one row that one pass reads; None: the token that was chosen for it last, which nobody has looked at yet."""


@dataclass(frozen=True, slots=True)
class Span:
    """The K/V of the tokens `lo..hi` of a path, in buffer number `buffer`. A value: it keeps nothing alive."""

    buffer: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cache holds of some tokens and at their end: bytes of their K/V, the number of the frozen state, None for a model
    without one, its bytes, and whether all of it is finite."""

    delta_bytes: int
    state: int | None
    state_bytes: int
    finite: bool


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one row draws. `temperature` 0 is greedy; `top_k` 1..64; `top_p`, `min_p` act inside the top-k candidates."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1


_GREEDY_BELOW = 1e-5
"""Dividing by a smaller temperature leaves the range of float32; nothing but the best token has a chance there anyway."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides one row's token number `position` beside its logits, applied in this order.

    `biases` are added; `poison` makes the logits NaN (tests); with `close` set, the weight of the `ends` goes to that token (a
    thought is closed before an answer ends); where `allowed` (bit words `[ceil(vocab / 32)]`) has no bit, nothing is chosen;
    `token` is chosen whatever the logits say.
    """

    sampling: SamplingParameters
    position: int
    biases: tuple[tuple[int, float], ...] = ()
    poison: bool = False
    close: int | None = None
    ends: tuple[int, ...] = ()
    allowed: np.ndarray[Any, Any] | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What the engine must know of a model.

    `divisible`: a cache can be cut at any token and needs no states. `short_tail`: the last token of a piece is read alone,
    because the output layer cannot be computed for it apart.
    """

    divisible: bool
    vocab_size: int
    short_tail: bool = False


class Runner(Protocol):
    """Commands on numbered caches; called by one thread. A command that raises leaves every sealed buffer readable.

    A cache is open from `open` or `reopen` until `seal`, `join`, `leave` or `free`. Sealed, it is a buffer: spans of it can be
    read, and it can be reopened where it ends while it is whole. Positions are those of the path that it was made for.
    """

    @property
    def facts(self) -> RunnerFacts:
        """The model's facts."""
        ...

    def open(self, spans: Sequence[Span], state: int | None, room: int, trims: Mapping[int, Ranges]) -> int:
        """A new cache with copies of `spans`, which make up a path from token 0, and the state at their end; room for `room`
        tokens. Each buffer of `trims` gives up all but its ranges, layer by layer, as soon as that layer was copied. Where
        this raises, they have everything back.
        """
        ...

    def reopen(self, buffer: int, state: int | None) -> None:
        """Open a whole sealed buffer where it ends."""
        ...

    def room_of(self, cache: int) -> int:
        """Tokens that a plain cache can hold without growing."""
        ...

    def grow(self, cache: int, tokens: int) -> None:
        """Give a plain cache room for `tokens` in all."""
        ...

    def read(self, cache: int, ids: np.ndarray[Any, Any], *, last: bool) -> None:
        """Read a piece of a prompt into a plain cache and wait for it; the `last` one leaves logits to choose from."""
        ...

    def mark(self, cache: int, lo: int, hi: int) -> Mark:
        """Freeze the state at the end `hi` of a plain cache, and check it and the K/V of `lo..hi`."""
        ...

    def step(self, cache: int, runs: Sequence[Run], shapes: Sequence[Shape] | None = None, *, places: int = 1) -> None:
        """Queue one pass that reads a run of each row, all of one length; with `shapes`, the choice after it as well.

        With `places` above 1 the run of a plain cache ends in a draft: logits are kept at so many of its last tokens, and
        `keep` says how much of it was right.
        """
        ...

    def choose(self, cache: int, shapes: Sequence[Shape]) -> None:
        """Queue the choice of each row's next token, or of the one after each of the `places`, from the newest logits."""
        ...

    def keep(self, cache: int, tokens: int) -> int:
        """Of the run that a plain cache read last keep the first `tokens`; how many of them it still holds.

        That is all of them where every layer can be cut there, or where all were right. Else the cache is back where it was
        before the run and holds none: they are to be read again.
        """
        ...

    def logits(self, cache: int) -> np.ndarray[Any, Any]:
        """The logits that the next choice of a plain cache's row is made from, float32 `[vocab]`: for checks only."""
        ...

    def take(self, cache: int) -> list[int | None]:
        """Wait for the oldest choice not taken yet: each row's token, None where its logits were not finite."""
        ...

    def can_join(self, cache: int, other: int) -> bool:
        """True when rows of both can share a batch."""
        ...

    def join(self, cache: int, other: int, trims: Mapping[int, Ranges]) -> int:
        """Copy both into one batch, the rows of `other` last, each with one choice not taken yet. Batches that went into it
        are gone; plain caches become sealed buffers that give up all but their ranges of `trims`.
        """
        ...

    def leave(self, cache: int, gone: Sequence[int]) -> tuple[list[int], int | None]:
        """Take rows, by their places, out of a batch: each goes on in a plain cache of its own, in the order of `gone`, and
        the others in the second number, which is plain if one is left and None if none is.
        """
        ...

    def seal(self, cache: int) -> None:
        """Close a plain cache: its K/V can be read as spans from now on, its live state is given up."""
        ...

    def trim(self, buffer: int, ranges: Ranges) -> None:
        """Keep only these ranges of a sealed buffer, in arrays of their own."""
        ...

    def free(self, cache: int) -> None:
        """Give up a cache or a buffer."""
        ...

    def drop(self, state: int) -> None:
        """Give up a state."""
        ...

    def finite(self, spans: Sequence[Span], state: int | None) -> bool:
        """False if any of these holds NaN or infinity."""
        ...

    def bytes_of(self, cache: int) -> int:
        """Bytes of all arrays of a cache, unused ends included; what a frozen state holds as well is not counted here."""
        ...

    def device_failed(self, error: Exception) -> bool:
        """True where an error is the device's: a watchdog, a lack of memory, a command that was broken off."""
        ...

    def clear_unused(self) -> None:
        """Give freed memory back to the system."""
        ...

    def reset(self, keep: Collection[int]) -> None:
        """Clean up after a failed command: give up all caches but those of `keep`, and check that the model still runs.

        Raises what the model raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready: its runner, what was planned for it, and what makes its caches interchangeable with others."""

    runner: Runner
    plan: MemoryPlan
    rule: CutRule
    fingerprint: bytes
    quantization: str
    wired_bytes: int = 0


class Source(Protocol):
    """Where a runner comes from. All but `memory` is called on the engine thread."""

    def load(
        self,
        card: ModelCard,
        folder: Path,
        settings: EngineSettings,
        known_tokens: int,
        on_model: Callable[[int], None],
    ) -> Loaded:
        """Load the model of a folder; `on_model` gets the number of its logits as soon as it is in memory, and may raise.

        Ids from `known_tokens` on stand for no text. Raises what tells a user why the model cannot be served.
        """
        ...

    def memory(self) -> Mapping[str, int]:
        """What is in memory now, for `/health`: `active_bytes`, `peak_bytes`, `cache_bytes`, `process_bytes`."""
        ...

    def leave(self) -> None:
        """The engine thread calls this last."""
        ...
