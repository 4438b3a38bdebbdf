"""The room: one loaded model behind the `core.ports.Engine` interface."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pooled_mlx import __version__, chat_formats
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError, ErrorKind, not_ready, prompt_too_long, queue_full
from pooled_mlx.core.ports import ModelInfo, Prepared
from pooled_mlx.core.request import Request
from pooled_mlx.engine.calibrate import measure_step, spacing_for, stored_step
from pooled_mlx.engine.channel import Channel
from pooled_mlx.engine.cuts import CutRule
from pooled_mlx.engine.exact_ids import ExactIds, Known, canonical_answer
from pooled_mlx.engine.facts import Facts
from pooled_mlx.engine.loop import Loop, LoopSettings
from pooled_mlx.engine.mlx_backend import LoadedModel, load, memory_now, mx
from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.prefill import divisible
from pooled_mlx.engine.prompt import Prompt, PromptBuilder
from pooled_mlx.engine.rows import Row
from pooled_mlx.engine.sampler import MAX_TOP_K, SamplingParameters
from pooled_mlx.engine.templates import ChatTemplate
from pooled_mlx.engine.thread import EngineThread
from pooled_mlx.engine.tokens import Tokens
from pooled_mlx.text.answer_stream import AnswerStream
from pooled_mlx.text.tokens import TokenTable

_log = logging.getLogger("pooled.engine")

DEFAULT_OUTPUT_TOKENS = 16_384
MOST_OUTPUT_TOKENS = 65_536
LEAST_CONTEXT_LEFT = 32
"""A prompt must leave so many tokens of the context for its answer."""
_CHARACTERS_PER_TOKEN = 8
"""No tokenizer served here makes text shorter than this on average; longer text is refused before it is tokenized."""
_FORCED_THINKING_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RoomSettings:
    """How the room runs. None means: chosen from the card and the machine. Sizes in tokens, bytes, rows."""

    context_tokens: int | None = None
    max_queue: int = 8
    max_running: int = 4
    prefill_step: int | None = None
    prefill_share: float = 0.3
    pool_bytes: int | None = None
    seed: int | None = None
    steps_file: Path | None = None


@dataclass(frozen=True, slots=True)
class _Payload:
    prompt: Prompt
    context_limited: bool
    grammar: Any = None


class _Generation:
    """One submitted request, as the server sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __aiter__(self) -> Any:
        return self._channel.__aiter__()

    def cancel(self) -> None:
        """Stop within one decode step or one prefill piece."""
        self._channel.cancel()


class Room:
    """One model, one loop, one pool. Satisfies `core.ports.Engine`.

    `start` returns at once; the model is loaded on the engine thread. `on_dead` is called, on that thread, when the engine
    cannot go on.
    """

    def __init__(
        self,
        card: ModelCard,
        folder: Path,
        settings: RoomSettings,
        *,
        on_dead: Callable[[str], None] = lambda reason: None,
        load_model: Callable[[Path], LoadedModel] = load,
    ) -> None:
        self._card, self._folder, self._settings = card, folder, settings
        self._on_dead, self._load_model = on_dead, load_model
        self._tokens = Tokens.load(folder)
        template = ChatTemplate.load(folder, self._tokens.named)
        added = self._tokens.added
        self._format_name = card.chat_format or chat_formats.detect(template.source, added)
        self._format = chat_formats.get(self._format_name)
        self._exact_ids = ExactIds()
        self._builder = PromptBuilder(self._tokens, template, card, exact_ids=self._exact_ids)
        names = {index: text for text, index in added.items()}
        self._table = TokenTable(self._tokens.bytes_of, names, self._tokens.eos_ids)
        self._close_thinking_id = added.get("</think>")
        self._facts = Facts()
        self._ready = threading.Event()
        self._state, self._reason = "loading", "The model is loading."
        context = settings.context_tokens or card.context_default
        self._model = ModelInfo(card.id, card.label, context, int(time.time()), "", card.thinking.supported)
        self._thread = EngineThread(self._make_loop, self._became_ready, self._died)
        self._rule: CutRule | None = None

    # --- life

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def wait_ready(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the model is loaded or cannot be; True when it is."""
        self._ready.wait(timeout_seconds)
        return self._state == "ready"

    def stop(self, timeout_seconds: float | None = 30.0) -> None:
        """End every request with an error and join the engine thread."""
        if self._state in ("loading", "ready"):
            self._state, self._reason = "stopping", "The server is shutting down."
        self._thread.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _make_loop(self) -> Loop:
        model = self._load_model(self._folder)
        key = _files_key(self._folder)
        step = model.largest_piece(self._settings.prefill_step or self._measured_step(model, key))
        self._rule = CutRule(step, spacing_for(step), min(64, step))
        self._model = replace(self._model, quantization=model.quantization, created=int(time.time()))
        shape = cache_shape(model)
        fingerprint = f"{key} {model.quantization} mlx {_minor('mlx')} mlx-lm {_minor('mlx-lm')} {self._rule} layout 1"
        pool = Pool(
            self._settings.pool_bytes or _default_pool_bytes(),
            fingerprint.encode(),
            divisible=divisible(model),
            rule=self._rule,
        )
        settings = LoopSettings(
            max_running=self._settings.max_running,
            prefill_share=self._settings.prefill_share,
            token_bytes=shape[0],
            state_bytes=shape[1],
        )
        return Loop(model, pool, self._rule, settings, self._facts, self._remember)

    def _measured_step(self, model: LoadedModel, key: str) -> int:
        path = self._settings.steps_file
        if path is None:
            return measure_step(model)
        return stored_step(path, key, lambda: measure_step(model))

    def _became_ready(self) -> None:
        if self._state == "loading":
            self._state, self._reason = "ready", ""
        self._ready.set()

    def _died(self, reason: str) -> None:
        self._state, self._reason = "failed", reason
        self._ready.set()
        self._on_dead(reason)

    # --- core.ports.Engine

    @property
    def model(self) -> ModelInfo:
        """The model as clients see it."""
        return self._model

    @property
    def loop(self) -> Loop:
        """The running loop, for tests and benchmarks. Raises ApiError before the model is ready."""
        if self._thread.loop is None:
            raise not_ready(self._reason)
        return self._thread.loop

    def prepare(self, request: Request) -> Prepared:
        """Render, tokenize and check. Raises `ApiError`."""
        self._check_ready()
        prompt = self._build(request)
        count, context = len(prompt.ids), self._model.context_tokens
        asked = min(request.max_output_tokens or DEFAULT_OUTPUT_TOKENS, MOST_OUTPUT_TOKENS)
        left = context - count
        payload = _Payload(prompt, context_limited=left < asked)
        return Prepared(request, count, min(asked, left), (), payload)

    def count_tokens(self, request: Request) -> int:
        """The exact prompt length. Raises `ApiError` for what cannot be rendered."""
        return len(self._builder.build(request).ids)

    def submit(self, prepared: Prepared) -> _Generation:
        """Queue a request; call it on the event loop. Raises `ApiError`."""
        self._check_ready()
        limit = self._settings.max_queue
        if self._facts.in_flight >= limit + self._settings.max_running:
            raise queue_full(limit)
        channel = Channel(asyncio.get_running_loop(), self._thread.wake)
        row = self._row(prepared, channel)
        self._facts.submitted(row)
        self._thread.submit(row)
        return _Generation(channel)

    def health(self) -> Mapping[str, Any]:
        """Facts for `/health`."""
        queued, running = self._facts.counts()
        ready = self._state == "ready"
        info = self._model
        memory = memory_now()
        loop = self._thread.loop
        return {
            "ok": self._state not in ("failed",),
            "ready": ready,
            "state": self._state,
            "reason": self._reason or None,
            "version": __version__,
            "model": {
                "id": info.public_id,
                "card": info.card_id,
                "label": info.label,
                "quantization": info.quantization,
                "context": info.context_tokens,
                "chat_format": self._format_name,
            },
            "ctx": info.context_tokens,
            "queue": queued,
            "running": running,
            "served": self._facts.served,
            "failed": self._facts.failed,
            "uptime_seconds": round(time.monotonic() - self._facts.began, 1),
            "requests": self._facts.requests(),
            "recent": self._facts.recent(),
            "rates": self._facts.rates(),
            "memory": {
                "pool_budget_bytes": loop.pool.budget_bytes if loop else None,
                "pool_bytes": loop.pool.segment_bytes if loop else 0,
                "live_bytes": loop.pool.reserved_bytes if loop else 0,
                "weights_bytes": loop.model.weights_bytes if loop else None,
                "active_bytes": memory.active,
                "peak_bytes": memory.peak,
                "cache_bytes": memory.cache,
            },
            "sampling": self._sampling_facts(),
            "prefill_step": self._rule.step if self._rule else None,
        }

    def pool(self) -> Mapping[str, Any]:
        """Facts for `/pool`."""
        loop = self.loop
        return {
            "budget_bytes": loop.pool.budget_bytes,
            "used_bytes": loop.pool.used_bytes,
            "counters": dict(loop.pool.counters),
        }

    # --- inside

    def _check_ready(self) -> None:
        if self._state == "ready":
            return
        if self._state == "failed":
            raise ApiError(ErrorKind.NOT_READY, f"The engine is dead: {self._reason}", retry_after_seconds=5)
        raise not_ready(self._reason)

    def _build(self, request: Request) -> Prompt:
        context = self._model.context_tokens
        characters = sum(len(turn.text) + len(turn.reasoning or "") for turn in request.turns)
        if characters > _CHARACTERS_PER_TOKEN * context:
            raise prompt_too_long(characters // _CHARACTERS_PER_TOKEN, context)
        prompt = self._builder.build(request)
        if len(prompt.ids) + LEAST_CONTEXT_LEFT > context:
            raise prompt_too_long(len(prompt.ids), context)
        return prompt

    def _row(self, prepared: Prepared, channel: Channel) -> Row:
        request, payload = prepared.request, prepared.payload
        constraint = payload.grammar.matcher() if payload.grammar is not None else None
        answer = AnswerStream(
            self._table,
            self._format,
            request,
            reasoning_open=payload.prompt.reasoning_open,
            new_call_id=_new_call_id,
            constrained=constraint is not None,
        )
        loop = self.loop
        token_bytes, state_bytes = loop.settings.token_bytes, loop.settings.state_bytes
        return Row(
            prepared=prepared,
            prompt=payload.prompt,
            channel=channel,
            answer=answer,
            sampling=self._sampling(request),
            max_tokens=prepared.max_output_tokens,
            context_limited=payload.context_limited,
            eos_ids=self._tokens.eos_ids,
            close_thinking_id=self._close_thinking_id,
            thinking_budget=self._thinking_budget(prepared),
            constraint=constraint,
            projected_bytes=token_bytes * (prepared.prompt_tokens + prepared.max_output_tokens) + 2 * state_bytes,
        )

    def _thinking_budget(self, prepared: Prepared) -> int | None:
        request = prepared.request
        if not request.thinking.on:
            return None
        forced = request.tool_choice.mode in ("required", "named") or request.response_format.kind != "text"
        limits = [request.thinking.budget_tokens] if request.thinking.budget_tokens is not None else []
        if forced:
            limits.append(min(prepared.max_output_tokens // 2, _FORCED_THINKING_TOKENS))
        return min(limits) if limits else None

    def _sampling(self, request: Request) -> SamplingParameters:
        defaults = self._card.sampling_for(request.thinking.on)
        asked = request.sampling
        return SamplingParameters(
            temperature=defaults.temperature if asked.temperature is None else asked.temperature,
            top_k=min(MAX_TOP_K, defaults.top_k if asked.top_k is None else asked.top_k),
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            seed=secrets.randbits(64) if self._settings.seed is None else self._settings.seed,
        )

    def _sampling_facts(self) -> dict[str, Any]:
        return {
            name: {"temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p}
            for name, rule in (("answer", self._card.sampling_for(False)), ("thinking", self._card.sampling_for(True)))
        }

    def _remember(self, row: Row) -> None:
        """Keep the ids of an answer that a client may send back. One cut by a stop string reads otherwise there."""
        if row.answer.stop is not None:
            return
        text, reasoning, calls = row.answer.parsed()
        prompt = row.prompt
        ids = np.concatenate([prompt.ids[prompt.head :], np.asarray(row.out, np.uint32)])
        self._exact_ids.remember(prompt.history, canonical_answer(text, calls), Known(ids, reasoning))


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _minor(package: str) -> str:
    return ".".join(version(package).split(".")[:2])


def _files_key(folder: Path) -> str:
    """A digest of the model's configuration and of its weight files' names and sizes."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def cache_shape(model: LoadedModel) -> tuple[int, int]:
    """Bytes of K/V per token and bytes of the recurrent and window states of one row, measured on a short prompt."""
    from pooled_mlx.engine.segments import Backing, SegmentData

    caches = model.make_cache()
    mx.eval(model.forward(mx.array([[0, 0]]), caches), [cache.state for cache in caches])
    data = SegmentData(Backing(caches), 0, 2)
    return data.delta_bytes // 2, data.state_bytes


def _default_pool_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total) // 4


def open_room(
    card: ModelCard,
    folder: Path,
    settings: RoomSettings | None = None,
    *,
    on_dead: Callable[[str], None] = lambda reason: None,
) -> Room:
    """A room that begins to load its model at once."""
    room = Room(card, folder, settings or RoomSettings(), on_dead=on_dead)
    room.start()
    return room
