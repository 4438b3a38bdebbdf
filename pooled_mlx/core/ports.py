"""What the server needs of an engine. The real one and the tests' fakes both satisfy it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pooled_mlx.core.events import Event
from pooled_mlx.core.memory import Wired
from pooled_mlx.core.request import Request


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The one loaded model, as clients see it. `created` is its load time in Unix seconds."""

    card_id: str
    label: str
    context_tokens: int
    created: int
    quantization: str = "none"
    thinks: bool = False

    @property
    def public_id(self) -> str:
        """The id in `/v1/models` and in every answer."""
        return f"pooled/{self.card_id}"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine runs. None means: chosen from the card and the machine. Sizes in tokens, bytes, rows.

    `seed` fixes the draws of all requests. With `drafts` a request alone reads ahead what it will probably say. `steps_file`
    keeps the measured prefill steps.
    """

    context_tokens: int | None = None
    max_queue: int = 8
    max_running: int = 4
    prefill_step: int | None = None
    prefill_share: float = 0.33
    drafts: bool = False
    pool_bytes: int | None = None
    memory_limit_bytes: int | None = None
    wired: Wired = "auto"
    seed: int | None = None
    steps_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check and may be queued.

    `max_output_tokens` is final: request, default, cap and the context left are all in it. `unenforced` lists what a
    schema of a format asks for and the grammar cannot enforce, `tool_notes` says the same of tools, a sentence each: see
    `core.notices`. `payload` is the engine's own.
    """

    request: Request
    prompt_tokens: int
    max_output_tokens: int
    unenforced: tuple[str, ...] = ()
    tool_notes: tuple[str, ...] = ()
    payload: Any = None


class Generation(Protocol):
    """One submitted request: an asynchronous stream of events that ends with `Finished` or `Failed`."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None:
        """Stop within one decode step or one prefill piece. Safe to call at any time, also twice."""
        ...


class Engine(Protocol):
    """One model, one loop."""

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        ...

    def prepare(self, request: Request) -> Prepared:
        """Render, tokenize, compile and check. CPU work: call it in a worker thread.

        Raises `ApiError` for everything that is wrong with the request; nothing is queued before it returned.
        """
        ...

    def count_tokens(self, request: Request) -> int:
        """The exact prompt length of `request`. Never queued. Raises `ApiError` like `prepare`."""
        ...

    def submit(self, prepared: Prepared) -> Generation:
        """Queue a request; call it on the event loop. Raises `ApiError` (queue full, not ready, engine dead)."""
        ...

    def health(self) -> Mapping[str, Any]:
        """Facts for `/health`: at least ok, ready, reason, model, ctx, queue, running, served."""
        ...

    def pool(self) -> Mapping[str, Any]:
        """Facts for `/pool`."""
        ...
