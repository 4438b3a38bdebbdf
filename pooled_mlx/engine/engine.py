"""The local engine: one loaded model behind the `core.ports.Engine` interface."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pooled_mlx import __version__, chat_formats
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError, ErrorKind, not_ready, queue_full
from pooled_mlx.core.events import Event
from pooled_mlx.core.memory import MemoryPlan
from pooled_mlx.core.ports import EngineSettings, ModelInfo, Prepared
from pooled_mlx.core.request import Request
from pooled_mlx.core.runner import Source
from pooled_mlx.engine.admission import Admission, Grammars, Rehearsal
from pooled_mlx.engine.channel import Channel
from pooled_mlx.engine.loop import Loop, LoopSettings, Pace
from pooled_mlx.engine.pool import Match, Pool
from pooled_mlx.engine.report import Facts, PoolReporter
from pooled_mlx.engine.row import Row
from pooled_mlx.engine.thread import EngineStopped, EngineThread
from pooled_mlx.prompt.exact_ids import ExactIds, Known, canonical_answer
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.reasons import RecentPrompts
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.text.tokens import TokenTable

_log = logging.getLogger("pooled.engine")


class _Generation:
    """One submitted request, as the server sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._channel.__aiter__()

    def cancel(self) -> None:
        """Stop within one decode step or one prefill piece."""
        self._channel.cancel()


class LocalEngine:
    """One model, one loop, one pool. Satisfies `core.ports.Engine`.

    `start` returns at once; the model is loaded on the engine thread by `load_model`. `on_dead` is called, on that thread,
    when the engine cannot go on. The constructor reads tokenizer and template and raises what they raise.
    """

    def __init__(
        self,
        card: ModelCard,
        folder: Path,
        settings: EngineSettings,
        source: Source,
        *,
        on_dead: Callable[[str], None] = lambda reason: None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._card, self._folder, self._settings, self._source = card, folder, settings, source
        self._on_dead, self._rehearsal = on_dead, rehearsal
        self._pace: Pace = rehearsal.pace if rehearsal is not None else lambda rows, what, tokens: None
        self._tokens = Tokens.load(folder)
        eos_ids = frozenset(card.eos_token_ids) or self._tokens.eos_ids
        template = ChatTemplate.load(folder, self._tokens.named)
        self._exact_ids = ExactIds()
        builder = PromptBuilder(self._tokens, template, card, exact_ids=self._exact_ids)
        self.call_form = builder.call_form
        self._format = chat_formats.get(self.call_form.format)
        names = {index: text for text, index in self._tokens.added.items()}
        self._grammars: Future[Grammars | None] = Future()
        self._table = TokenTable(self._tokens.bytes_of, names, eos_ids)
        self._admission = Admission(
            card,
            builder,
            self._format,
            self._table,
            grammars=self._grammars.result,
            scripts=rehearsal.scripts(self._tokens) if rehearsal is not None else None,
            seed=settings.seed,
        )
        self._facts = Facts()
        self._reporter: PoolReporter | None = None
        self._recent: RecentPrompts | None = None
        self._plan: MemoryPlan | None = None
        self._wired_bytes = 0
        self._pool_share, self._held = 1.0, ""
        self._ready = threading.Event()
        self._state, self._reason = "loading", "The model is loading."
        context = settings.context_tokens or card.context_default
        self._model = ModelInfo(card.id, card.label, context, int(time.time()), "", card.thinking.supported)
        self._thread = EngineThread(self._make_loop, self._became_ready, self._died, source.leave)

    # --- life

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def wait_ready(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the model is loaded or cannot be; True when it is."""
        self._ready.wait(timeout_seconds)
        return self._state == "ready"

    def stop(self, timeout_seconds: float | None = 30.0) -> None:
        """End every request with an error and join the engine thread. Safe to call twice, at any time, from any thread."""
        if self._state in ("loading", "ready"):
            self._state, self._reason = "stopping", "The server is shutting down."
        self._thread.stop()
        if self._rehearsal is not None:
            self._rehearsal.hurry()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                _log.warning("the engine has not ended after %s seconds", timeout_seconds)
        self._ready.set()

    def set_pool_share(self, share: float, *, keep_pins: bool = False) -> None:
        """Let the pool keep `share` (0..1) of its budget, from any thread: the system is short of memory, or no longer.

        Takes effect between two steps. Running requests keep what they hold; with `keep_pins` what clients begin with stays
        too. `/health` says so while it is less than all.
        """
        part = min(max(share, 0.0), 1.0)

        def command(loop: Loop) -> None:
            loop.set_pool_budget(int(self.plan.pool_bytes * part), keep_pins=keep_pins)
            what = " and what clients begin with" if keep_pins and part < 1.0 else ""
            if part != self._pool_share:
                _log.info("the cache pool may take %.0f %% of its budget%s", 100 * part, what)
            self._pool_share = part
            self._held = f"The system is short of memory: the cache pool is held at {part:.0%} of its budget{what}."

        self._thread.call(command)

    def pool_share_used(self) -> float:
        """What the pool and all requests take, as a share of its planned budget; from any thread."""
        loop = self._thread.loop
        return loop.pool.used_bytes / max(self.plan.pool_bytes, 1) if loop is not None else 0.0

    def forget(self, client: str) -> None:
        """End the requests of this client, from any thread, and drop what is stored of them and nobody else goes on from.

        Takes effect between two steps, before anything that is submitted later.
        """
        self._thread.call(lambda loop: loop.forget(client))

    def _make_loop(self) -> Loop:
        settings = self._settings
        loaded = self._source.load(self._card, self._folder, settings, self._tokens.vocab_size, self._model_is_loaded)
        runner, plan, rule = loaded.runner, loaded.plan, loaded.rule
        pool = Pool(plan.pool_bytes, loaded.fingerprint, divisible=runner.facts.divisible, rule=rule)
        self._plan, self._wired_bytes = plan, loaded.wired_bytes
        self._recent = RecentPrompts(rule, divisible=pool.divisible)
        self._reporter = PoolReporter(pool, self._exact_ids)
        self._model = replace(
            self._model, quantization=loaded.quantization, context_tokens=plan.context_tokens, created=int(time.time())
        )
        loop_settings = LoopSettings(
            max_running=settings.max_running,
            prefill_share=settings.prefill_share,
            drafts=settings.drafts,
            token_bytes=plan.shape.kv_bytes_per_token,
            state_bytes=plan.shape.row_bytes,
        )
        return Loop(
            runner,
            pool,
            loop_settings,
            self._facts,
            self._remember,
            self._explain,
            after_turn=self._report,
            pace=self._pace,
        )

    def _model_is_loaded(self, vocab_size: int) -> None:
        if self._thread.stopping:
            raise EngineStopped
        self._start_grammars(vocab_size)

    def _start_grammars(self, vocab_size: int) -> None:
        """Build the grammar tokenizer beside everything else: it takes seconds for a large vocabulary."""

        eos_ids = sorted(self._table.eos_ids)

        def build() -> None:
            try:
                self._grammars.set_result(Grammars.load(self._folder, self._format, n_vocab=vocab_size, eos_ids=eos_ids))
            except BaseException as error:  # whoever waits for the grammars must learn of it
                self._grammars.set_exception(error)

        threading.Thread(target=build, name="pooled-grammars", daemon=True).start()

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
    def plan(self) -> MemoryPlan:
        """The memory plan. Raises ApiError before the model is ready."""
        if self._plan is None:
            raise not_ready(self._reason)
        return self._plan

    @property
    def loop(self) -> Loop:
        """The running loop, for tests and benchmarks. Raises ApiError before the model is ready."""
        if self._thread.loop is None:
            raise not_ready(self._reason)
        return self._thread.loop

    def prepare(self, request: Request) -> Prepared:
        """Render, tokenize, compile and check. Raises `ApiError`."""
        self._check_ready()
        return self._admission.prepare(request, self.plan)

    def count_tokens(self, request: Request) -> int:
        """The exact prompt length. Raises `ApiError` for what cannot be rendered."""
        return self._admission.count(request)

    def submit(self, prepared: Prepared) -> _Generation:
        """Queue a request; call it on the event loop. Raises `ApiError`."""
        self._check_ready()
        limit = self._settings.max_queue
        if self._facts.in_flight >= limit + self._settings.max_running:
            raise queue_full(limit)
        channel = Channel(asyncio.get_running_loop(), self._thread.wake)
        row = self._admission.row(prepared, channel, self.plan)
        self._facts.submitted(row)
        try:
            self._thread.submit(row)
        except ApiError:
            self._facts.withdrawn(row)
            raise
        return _Generation(channel)

    def health(self) -> Mapping[str, Any]:
        """Facts for `/health`."""
        queued, running = self._facts.counts()
        info, loop = self._model, self._thread.loop
        plan = self._plan.facts() if self._plan is not None else {}
        return {
            "ok": self._state != "failed",
            "ready": self._state == "ready",
            "state": self._state,
            "reason": self._reason or self._limited(loop) or None,
            "version": __version__,
            "model": {
                "id": info.public_id,
                "card": info.card_id,
                "label": info.label,
                "quantization": info.quantization,
                "context": info.context_tokens,
                "chat_format": self.call_form.format,
            },
            "ctx": info.context_tokens,
            "queue": queued,
            "running": running,
            "served": self._facts.served,
            "failed": self._facts.failed,
            "repairs": self._facts.repairs,
            "uptime_seconds": round(time.monotonic() - self._facts.began, 1),
            "requests": self._facts.requests(),
            "recent": self._facts.recent(),
            "rates": self._facts.rates(),
            "memory": {
                **plan,
                "pool_budget_bytes": loop.pool.budget_bytes if loop is not None else plan.get("pool_budget_bytes", 0),
                "pool_bytes": loop.pool.segment_bytes if loop is not None else 0,
                "live_bytes": loop.pool.used_bytes - loop.pool.segment_bytes if loop is not None else 0,
                **self._source.memory(),
                "wired_bytes": self._wired_bytes,
            },
            "sampling": self._admission.sampling_facts(),
            "prefill_step": loop.pool.rule.step if loop is not None else None,
        }

    def pool(self) -> Mapping[str, Any]:
        """Facts for `/pool`: the newest report that the engine thread made."""
        if self._reporter is None:
            raise not_ready(self._reason)
        return self._reporter.latest()

    # --- inside

    def _limited(self, loop: Loop | None) -> str:
        """Why a ready engine is less than it could be, "" where it is not."""
        parts = [self._held] if self._pool_share < 1.0 else []
        if loop is not None and loop.counters.halved:
            parts.append(
                f"The GPU failed twice within a minute: prompts are read in pieces of {loop.pool.rule.step} tokens now."
            )
        return " ".join(parts)

    def _check_ready(self) -> None:
        if self._state == "ready":
            return
        if self._state == "failed":
            raise ApiError(ErrorKind.NOT_READY, f"The engine is dead: {self._reason}", retry_after_seconds=5)
        raise not_ready(self._reason)

    def _explain(self, row: Row, match: Match) -> None:
        """Say why the row's prompt was reused so far and not further."""
        if self._recent is None or self._reporter is None or row.probe is not None:
            return
        facts = row.prepared.payload.facts
        reason = self._recent.explain(facts, match.tokens, match.matched, self._decode)
        row.cache_note = reason.note(words=False)
        self._reporter.explained(row.id, facts.label, reason, match.parent)
        self._recent.remember(facts)

    def _report(self, idle: bool) -> None:
        if self._reporter is not None:
            self._reporter.refresh(force=idle)

    def _decode(self, ids: Any) -> str:
        return self._tokens.bytes_for(ids).decode("utf-8", "replace")

    def _remember(self, row: Row) -> None:
        """Keep the ids of an answer that a client may send back. One cut by a stop string reads otherwise there,
        and without a known start of the answer nothing can be put in its place."""
        if row.answer.stop is not None or row.prompt.head == 0 or row.probe is not None:
            return
        text, reasoning, calls = row.answer.parsed()
        prompt = row.prompt
        ids = np.concatenate([prompt.ids[prompt.head :], np.asarray(row.out, np.uint32)])
        self._exact_ids.remember(prompt.history, canonical_answer(text, calls), Known(ids, reasoning))
        if self._recent is not None:
            self._recent.remember(row.prepared.payload.facts.answered(row.out, text, calls, reasoning))


def open_engine(
    card: ModelCard,
    folder: Path,
    settings: EngineSettings,
    source: Source,
    *,
    on_dead: Callable[[str], None] = lambda reason: None,
) -> LocalEngine:
    """An engine that begins to load its model at once."""
    engine = LocalEngine(card, folder, settings, source, on_dead=on_dead)
    engine.start()
    return engine
