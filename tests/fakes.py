"""An engine without a model: it satisfies `core.ports.Engine`, answers what a test scripts, and shows what it was asked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from pooled_mlx.core.errors import ApiError, prompt_too_long
from pooled_mlx.core.events import Event, Failed, Finished, Text, Usage
from pooled_mlx.core.ports import ModelInfo, Prepared
from pooled_mlx.core.request import Request

DEFAULT_OUTPUT_TOKENS = 16_384
MODEL = ModelInfo(card_id="fake-1b", label="Fake 1B", context_tokens=32_768, created=1_760_000_000)


def hello(prompt_tokens: int) -> list[Event]:
    """The answer of an engine that was given no script."""
    return [Text("Hello"), Text(" there."), Finished("stop", Usage(prompt_tokens, 3))]


class FakeGeneration:
    """Events that the test puts in. `cancelled` is set by the server."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.cancelled = asyncio.Event()
        self.cancel_count = 0
        self.taken = 0
        self._events: deque[Event | Exception] = deque()
        self._changed = asyncio.Event()

    @property
    def request(self) -> Request:
        return self.prepared.request

    def emit(self, *events: Event | Exception) -> None:
        """Put events in; an exception is raised at its place."""
        self._events.extend(events)
        self._changed.set()

    def finish(self, reason: Any = "stop", completion_tokens: int = 1, **fields: Any) -> None:
        """Put the end in."""
        self.emit(Finished(reason, Usage(self.prepared.prompt_tokens, completion_tokens), **fields))

    def cancel(self) -> None:
        self.cancel_count += 1
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Exception):
                    raise event
                self.taken += 1
                yield event
                if isinstance(event, Finished | Failed):
                    return
            self._changed.clear()
            await self._changed.wait()


class FakeEngine:
    """Scripted answers in the order of the requests, `hello` where the script has run out.

    `script` takes the events of one answer. `hold()` leaves the next requests without events: the test gets each
    `FakeGeneration` from `next_generation` and drives it. `prepare_hook` and `submit_error` stand for what may go wrong.
    """

    def __init__(self, model: ModelInfo = MODEL) -> None:
        self.model = model
        self.requests: list[Request] = []
        self.counted: list[Request] = []
        self.generations: list[FakeGeneration] = []
        self.prepare_hook: Callable[[Request], None] | None = None
        self.submit_error: ApiError | None = None
        self.unenforced: tuple[str, ...] = ()
        self.facts: dict[str, Any] = {"ok": True, "ready": True, "reason": None}
        self._scripts: deque[Sequence[Event | Exception]] = deque()
        self._held = False
        self._started: asyncio.Queue[FakeGeneration] = asyncio.Queue()

    def script(self, *events: Event | Exception) -> None:
        """The next answer."""
        self._scripts.append(events)

    def hold(self) -> None:
        """From now on answers come from the test alone."""
        self._held = True

    async def next_generation(self) -> FakeGeneration:
        """The next request that was submitted."""
        return await self._started.get()

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def prepare(self, request: Request) -> Prepared:
        if self.prepare_hook is not None:
            self.prepare_hook(request)
        self.requests.append(request)
        length = self._length(request)
        room = self.model.context_tokens - length
        if room < 32:
            raise prompt_too_long(length, self.model.context_tokens)
        limit = min(request.max_output_tokens or DEFAULT_OUTPUT_TOKENS, room)
        return Prepared(request, length, limit, unenforced=self.unenforced)

    def count_tokens(self, request: Request) -> int:
        self.counted.append(request)
        return self._length(request)

    def submit(self, prepared: Prepared) -> FakeGeneration:
        if self.submit_error is not None:
            raise self.submit_error
        generation = FakeGeneration(prepared)
        self.generations.append(generation)
        if self._scripts:
            generation.emit(*self._scripts.popleft())
        elif not self._held:
            generation.emit(*hello(prepared.prompt_tokens))
        self._started.put_nowait(generation)
        return generation

    def health(self) -> Mapping[str, Any]:
        running = sum(not generation.cancelled.is_set() for generation in self.generations)
        counts = {"queue": 0, "running": running, "served": len(self.generations)}
        return {**self.facts, "model": {"id": self.model.public_id}, "ctx": self.model.context_tokens, **counts}

    def pool(self) -> Mapping[str, Any]:
        return {"segments": [], "bytes": 0}

    def _length(self, request: Request) -> int:
        """A prompt length that grows with every word a client sent."""
        texts = [turn.text for turn in request.turns] + [turn.reasoning for turn in request.turns if turn.reasoning]
        texts += [call.arguments for turn in request.turns for call in turn.tool_calls]
        return 4 + sum(len(text.split()) + 4 for text in texts) + 8 * len(request.tools)
