"""The way of events from the engine thread to their reader."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pooled_mlx.core.errors import not_ready
from pooled_mlx.core.events import Event, Failed, Finished, Prefill, Queued, Text, Usage
from pooled_mlx.engine.channel import Channel

WAIT_SECONDS = 30.0


async def collected(channel: Channel) -> list[Event]:
    return [event async for event in channel]


async def test_events_come_in_order_and_progress_that_nobody_read_is_replaced() -> None:
    channel = Channel(asyncio.get_running_loop(), lambda: None)
    end = Finished("stop", Usage())
    for event in (Queued(2), Queued(1), Prefill(0, 9, 0), Prefill(9, 9, 0), Text("a"), Text("b"), end):
        channel.put(event)
    assert channel.backlog == 4
    assert await collected(channel) == [Prefill(9, 9, 0), Text("a"), Text("b"), end]
    assert channel.backlog == 0


async def test_progress_takes_the_place_of_progress_only() -> None:
    channel = Channel(asyncio.get_running_loop(), lambda: None)
    events = (Text("a"), Prefill(0, 9, 0), Text("b"), Queued(1), Finished("stop", Usage()))
    for event in events:
        channel.put(event)
    assert await collected(channel) == list(events)


async def test_a_reader_that_waits_is_woken_once_a_burst_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    channel = Channel(loop, lambda: None)
    woken: list[Any] = []
    call = loop.call_soon_threadsafe

    def count(callback: Any, *args: Any, **fields: Any) -> Any:
        if callback == channel._wake:
            woken.append(callback)
        return call(callback, *args, **fields)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    reading = asyncio.create_task(collected(channel))
    await asyncio.sleep(0)
    thread = threading.Thread(target=lambda: [channel.put(Text(str(number))) for number in range(200)])
    thread.start()
    thread.join(WAIT_SECONDS)
    assert len(woken) == 1
    channel.put(Failed(not_ready("over")))
    events = await asyncio.wait_for(reading, WAIT_SECONDS)
    assert [event.text for event in events if isinstance(event, Text)] == [str(number) for number in range(200)]
    assert isinstance(events[-1], Failed)


async def test_a_cancel_is_told_once() -> None:
    told: list[str] = []
    channel = Channel(asyncio.get_running_loop(), lambda: told.append("cancelled"))
    channel.put(Text("a"))
    for _ in range(3):
        channel.cancel()
    assert (told, channel.cancelled) == (["cancelled"], True)


def test_a_reader_whose_loop_is_closed_counts_as_gone() -> None:
    loop = asyncio.new_event_loop()
    channel = Channel(loop, lambda: None)
    loop.close()
    channel.put(Text("a"))
    channel.put(Failed(not_ready("over")))
    assert channel.cancelled
