"""One queued request, from its first event to its last: progress watched, metrics fed, log line written once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pooled_mlx.api.edge import StreamRenderer
from pooled_mlx.core.answer import Answer, Fold
from pooled_mlx.core.errors import ApiError, ErrorKind, engine_failed
from pooled_mlx.core.events import Event, Failed, Finished, Prefill, Queued
from pooled_mlx.core.ports import Generation
from pooled_mlx.server.feed import Feed
from pooled_mlx.server.hooks import Watch
from pooled_mlx.server.request_log import RequestRecord
from pooled_mlx.server.settings import ServerSettings

logger = logging.getLogger("pooled.server")


class Exchange:
    """Owns the feed of one request. `close` ends it in every case, whoever gave up first."""

    def __init__(
        self,
        generation: Generation,
        settings: ServerSettings,
        record: RequestRecord,
        on_close: Callable[[Exchange], None],
    ) -> None:
        self.record = record
        self.watch: Watch | None = None
        self.waiting: Queued | Prefill | None = None
        self._feed = Feed(generation)
        self._settings = settings
        self._on_close = on_close
        self._clock = asyncio.get_running_loop().time
        self._last_progress = self._clock()
        self._queued = False
        self._closed = False

    async def next(self, deadline: float) -> list[Event]:
        """The events that are there, or the next; [] at `deadline` (loop time). A running request that makes no progress
        for too long gets a `Failed` 504."""
        limit = self._settings.progress_timeout_seconds
        now = self._clock()
        stuck_at = float("inf") if self._queued else self._last_progress + limit
        events = await self._feed.take(min(deadline, stuck_at) - now)
        now = self._clock()
        if not events and now >= stuck_at:
            error = ApiError(ErrorKind.NO_PROGRESS, f"The request made no progress for {limit:g} seconds and was given up.")
            self.fail(error)
            events = await self._feed.take(0)
        for event in events:
            self._queued = isinstance(event, Queued)
            self.waiting = event if isinstance(event, Queued | Prefill) else None
            self.record.event(event)
            if self.watch is not None:
                self.watch.event(event)
        if events:
            self._last_progress = now
        return events

    def fail(self, error: ApiError) -> None:
        """End the answer with `error`."""
        self._feed.fail(error)

    def close(self) -> None:
        """The exchange is over, or the client has gone: the engine stops its work, the log line is written."""
        if self._closed:
            return
        self._closed = True
        self._feed.close()
        if self.watch is not None:
            self.watch.cancelled()
        self._on_close(self)


async def collect(exchange: Exchange) -> Answer:
    """The whole answer. Raises the `ApiError` of a `Failed`."""
    folding = Fold()
    while True:
        for event in await exchange.next(float("inf")):
            folding.add(event)
            if isinstance(event, Finished):
                return folding.answer


class EventStream:
    """The body of a streamed answer: frames as bytes, keep-alives by the wall clock.

    A plain iterator with `aclose`, for a generator that was never started runs no `finally`.
    """

    def __init__(self, exchange: Exchange, renderer: StreamRenderer, keep_alive_seconds: float) -> None:
        self._exchange = exchange
        self._renderer = renderer
        self._keep_alive_seconds = keep_alive_seconds
        self._clock = asyncio.get_running_loop().time
        self._started = False
        self._ended = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if not self._started:
            self._started = True
            return self._renderer.start().encode("utf-8", "replace")
        if self._ended:
            self._exchange.close()
            raise StopAsyncIteration
        silent_until = self._clock() + self._keep_alive_seconds
        while True:
            events = await self._exchange.next(silent_until)
            self._ended = bool(events) and isinstance(events[-1], Finished | Failed)
            text = self._render(events)
            if not text and not self._ended and self._clock() >= silent_until:
                text = self._renderer.keep_alive(self._exchange.waiting)
                silent_until = self._clock() + self._keep_alive_seconds
            if text:
                return text.encode("utf-8", "replace")
            if self._ended:
                self._exchange.close()
                raise StopAsyncIteration

    def _render(self, events: list[Event]) -> str:
        try:
            return "".join([self._renderer.event(event) for event in events])
        except Exception:
            logger.exception("an event could not be rendered")
            failure = Failed(engine_failed("The server failed while it wrote this answer. Its log has the details."))
            self._ended = True
            self._exchange.record.event(failure)
            return self._renderer.event(failure)

    async def aclose(self) -> None:
        """Nobody reads any more."""
        self._exchange.close()
