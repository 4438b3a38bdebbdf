"""The feed between a generation and its answer."""

from __future__ import annotations

import asyncio

import pytest

from pooled_mlx.core.errors import engine_failed, not_ready
from pooled_mlx.core.events import Event, Failed, Finished, Text, Usage
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request
from pooled_mlx.server.feed import MAX_WAITING_EVENTS, Feed
from tests.fakes import FakeGeneration

END = Finished("stop", Usage())
SOON = 10.0


@pytest.fixture
async def generation() -> FakeGeneration:
    return FakeGeneration(Prepared(Request("r", ()), 1, 1))


async def drain(feed: Feed) -> list[Event]:
    events: list[Event] = []
    while not events or not isinstance(events[-1], Finished | Failed):
        taken = await feed.take(SOON)
        assert taken
        events += taken
    return events


async def test_events_in_order(generation: FakeGeneration) -> None:
    feed = Feed(generation)
    sent = [Text(str(number)) for number in range(3 * MAX_WAITING_EVENTS)]
    generation.emit(*sent, END)
    assert await drain(feed) == [*sent, END]


async def test_nothing_in_time(generation: FakeGeneration) -> None:
    feed = Feed(generation)
    assert await feed.take(0.001) == []
    assert await feed.take(0) == []
    assert await feed.take(-1) == []
    generation.emit(Text("late"))
    assert await feed.take(SOON) == [Text("late")]


async def test_what_is_there_comes_at_once_and_together(generation: FakeGeneration) -> None:
    feed = Feed(generation)
    waiting = asyncio.create_task(feed.take(float("inf")))
    await asyncio.sleep(0)
    generation.emit(Text("a"), Text("b"))
    assert await waiting == [Text("a"), Text("b")]


async def test_only_so_many_events_wait(generation: FakeGeneration) -> None:
    feed = Feed(generation)
    generation.emit(*[Text("x")] * 10_000)
    for _ in range(100):
        await asyncio.sleep(0)
    assert generation.taken == MAX_WAITING_EVENTS
    assert len(await feed.take(SOON)) == MAX_WAITING_EVENTS
    feed.close()


@pytest.mark.parametrize("error", [not_ready("stopping"), engine_failed("no progress")])
async def test_failing_from_outside(generation: FakeGeneration, error: Exception) -> None:
    feed = Feed(generation)
    generation.emit(Text("a"))
    assert await feed.take(SOON) == [Text("a")]
    feed.fail(error)  # type: ignore[arg-type]
    (failed,) = await feed.take(SOON)
    assert isinstance(failed, Failed)
    assert failed.error is error
    assert generation.cancelled.is_set()
    generation.emit(Text("b"), END)
    assert await feed.take(0.001) == []


async def test_failing_after_the_end_changes_nothing(generation: FakeGeneration) -> None:
    feed = Feed(generation)
    generation.emit(END)
    assert await feed.take(SOON) == [END]
    feed.fail(not_ready("stopping"))
    assert await feed.take(0.001) == []
    assert not generation.cancelled.is_set()


@pytest.mark.parametrize("fault", [RuntimeError("secret"), KeyError("k")])
async def test_a_broken_stream_fails_without_details(generation: FakeGeneration, fault: Exception) -> None:
    feed = Feed(generation)
    generation.emit(Text("a"), fault)
    failed = (await drain(feed))[-1]
    assert isinstance(failed, Failed)
    assert "secret" not in failed.error.message
    assert failed.error.kind.status == 500


async def test_close_cancels_and_may_be_called_twice(generation: FakeGeneration) -> None:
    feed = Feed(generation)
    feed.close()
    feed.close()
    assert generation.cancelled.is_set()
    generation.emit(Text("a"), END)
    assert await feed.take(0.001) == []
