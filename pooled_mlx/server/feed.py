"""The events of one generation on their way to one answer."""

from __future__ import annotations

import asyncio
import logging
import math

from pooled_mlx.core.errors import ApiError, engine_failed
from pooled_mlx.core.events import Event, Failed, Finished
from pooled_mlx.core.ports import Generation

logger = logging.getLogger("pooled.server")

MAX_WAITING_EVENTS = 256
"""More are left to the engine, which parks a request that nobody reads."""


class Feed:
    """Collects events in a task of its own, so that waiting for the next one can time out without losing any.

    Ends with `Finished` or `Failed` in every case: an exception of the generation, a generation that stops without an end,
    and `fail` all become a `Failed`.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._events: list[Event] = []
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._task = asyncio.ensure_future(self._collect())

    async def take(self, timeout_seconds: float) -> list[Event]:
        """All events that are there, or the next one; [] when none came within the time."""
        if not self._events and timeout_seconds > 0:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            timer = None if math.isinf(timeout_seconds) else loop.call_later(timeout_seconds, self._wake)
            try:
                await self._reader
            finally:
                self._reader = None
                if timer is not None:
                    timer.cancel()
        events, self._events = self._events, []
        self._room.set()
        return events

    def fail(self, error: ApiError) -> None:
        """End the answer with `error` from outside and stop the engine's work for it. No effect after the end."""
        if not self._ended:
            self._generation.cancel()
            self._task.cancel()
            self._put(Failed(error))

    def close(self) -> None:
        """Nobody reads any more: stop the engine's work. Safe to call twice and after the end."""
        self._generation.cancel()
        self._task.cancel()
        self._ended = True

    async def _collect(self) -> None:
        try:
            async for event in self._generation:
                self._put(event)
                if self._ended:
                    return
                if len(self._events) >= MAX_WAITING_EVENTS:
                    self._room.clear()
                    await self._room.wait()
            self._put(Failed(engine_failed("The engine ended the request without a result.")))
        except asyncio.CancelledError:
            raise
        except ApiError as error:
            self._put(Failed(error))
        except Exception:
            logger.exception("the engine's event stream broke")
            self._put(Failed(engine_failed("The server failed while it answered this request. Its log has the details.")))

    def _put(self, event: Event) -> None:
        if self._ended:
            return
        self._events.append(event)
        self._ended = isinstance(event, Finished | Failed)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
