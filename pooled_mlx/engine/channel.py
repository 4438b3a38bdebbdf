"""The way of events from the engine thread to one consumer on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from pooled_mlx.core.events import Event, Failed, Finished, Prefill, Queued


class Channel:
    """A bounded-by-parking queue: the engine puts, one consumer iterates. Ends with `Finished` or `Failed`.

    The loop is woken once per burst, not once per event. `cancelled` is a plain flag that the engine reads at every token
    and every prefill piece.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], None]) -> None:
        self._loop = loop
        self._on_cancel = on_cancel
        self._items: deque[Event] = deque()
        self._lock = threading.Lock()
        self._wake_pending = False
        self._ready = asyncio.Event()
        self.cancelled = False

    def put(self, event: Event) -> None:
        """Add one event; called on the engine thread. A newer progress event replaces one that was not read yet."""
        with self._lock:
            if self._items and isinstance(event, Queued | Prefill) and isinstance(self._items[-1], Queued | Prefill):
                self._items[-1] = event
            else:
                self._items.append(event)
            if self._wake_pending:
                return
            self._wake_pending = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed: nobody will read any more
            self.cancelled = True

    @property
    def backlog(self) -> int:
        """Events that the consumer has not taken yet."""
        return len(self._items)

    def cancel(self) -> None:
        """The consumer wants no more. Safe to call twice and after the end."""
        if not self.cancelled:
            self.cancelled = True
            self._on_cancel()

    def _wake(self) -> None:
        with self._lock:
            self._wake_pending = False
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The events in order, up to and including the last."""
        while True:
            while self._items:
                with self._lock:
                    event = self._items.popleft()
                yield event
                if isinstance(event, Finished | Failed):
                    return
            self._ready.clear()
            if not self._items:
                await self._ready.wait()
