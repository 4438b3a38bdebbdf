"""The engine that the server has before the real one: it says what is going on, and hands over when the model is loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError, ErrorKind, not_ready
from pooled_mlx.core.memory import format_size
from pooled_mlx.core.ports import Engine, Generation, ModelInfo, Prepared
from pooled_mlx.core.request import Request
from pooled_mlx.store import Progress


class StartingEngine:
    """Satisfies `core.ports.Engine` from the first moment on. `become` may be called from any thread, once."""

    def __init__(self, card: ModelCard, context_tokens: int | None = None) -> None:
        self._model = ModelInfo(
            card.id, card.label, context_tokens or card.context_default, int(time.time()), thinks=card.thinking.supported
        )
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._progress: Progress | None = None
        self._failure: str | None = None
        self._began = time.monotonic()

    def report(self, progress: Progress) -> None:
        """A download or conversion went on."""
        self._progress = progress

    def become(self, engine: Engine) -> None:
        """From now on this is `engine`."""
        with self._lock:
            self._engine = engine

    def fail(self, reason: str) -> None:
        """There will be no engine."""
        self._failure = reason

    @property
    def engine(self) -> Engine | None:
        """The real engine, once there is one."""
        return self._engine

    @property
    def model(self) -> ModelInfo:
        """The model, or what its card says of it."""
        return self._engine.model if self._engine is not None else self._model

    def prepare(self, request: Request) -> Prepared:
        """Raises `ApiError` 503 until the model is loaded."""
        return self._need().prepare(request)

    def count_tokens(self, request: Request) -> int:
        """Raises `ApiError` 503 until the model is loaded."""
        return self._need().count_tokens(request)

    def submit(self, prepared: Prepared) -> Generation:
        """Raises `ApiError` 503 until the model is loaded."""
        return self._need().submit(prepared)

    def pool(self) -> Mapping[str, Any]:
        """Raises `ApiError` 503 until the model is loaded."""
        return self._need().pool()

    def health(self) -> Mapping[str, Any]:
        """The engine's facts, before it those of the download: `state` "downloading" or "loading", and `progress`."""
        if self._engine is not None:
            return self._engine.health()
        info = self._model
        facts: dict[str, Any] = {
            "ok": self._failure is None,
            "ready": False,
            "state": self._state(),
            "reason": self._reason(),
            "version": __version__,
            "model": {"id": info.public_id, "card": info.card_id, "label": info.label, "context": info.context_tokens},
            "ctx": info.context_tokens,
            "queue": 0,
            "running": 0,
            "served": 0,
            "uptime_seconds": round(time.monotonic() - self._began, 1),
        }
        if (progress := self._progress) is not None:
            facts["progress"] = {
                "stage": progress.stage,
                "done_bytes": progress.done_bytes,
                "total_bytes": progress.total_bytes,
                "bytes_per_second": round(progress.rate),
                "seconds_left": None if progress.seconds_left is None else round(progress.seconds_left),
                "stalled_seconds": round(progress.stalled_seconds),
            }
        return facts

    def _state(self) -> str:
        if self._failure is not None:
            return "failed"
        return "downloading" if self._progress is not None and self._progress.stage == "downloading" else "loading"

    def _reason(self) -> str:
        if self._failure is not None:
            return self._failure
        progress = self._progress
        if progress is None or progress.stage != "downloading":
            return "The model is loading."
        text = f"The model is being downloaded: {format_size(progress.done_bytes)}"
        if progress.fraction is not None:
            text += f" of {format_size(progress.total_bytes or 0)} ({progress.fraction:.0%})"
        if progress.stalled_seconds:
            text += f", no data for {progress.stalled_seconds:.0f} s"
        elif progress.seconds_left is not None:
            text += f", about {max(progress.seconds_left / 60, 1):.0f} min left"
        return text + "."

    def _need(self) -> Engine:
        with self._lock:
            if self._engine is not None:
                return self._engine
        if self._failure is not None:
            raise ApiError(ErrorKind.NOT_READY, f"The server could not start: {self._failure}", retry_after_seconds=5)
        raise not_ready(self._reason())
