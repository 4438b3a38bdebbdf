"""The room as the server sees it, over a tiny hybrid model: before it is ready, ready, full, short of memory, dead."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import Event, Failed, Finished, Text, check_order
from pooled_mlx.core.memory import DeviceFacts
from pooled_mlx.core.ports import Engine, EngineSettings, Prepared
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.engine.loop import EngineDead, Loop
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.replay.assets import replay_template
from pooled_mlx.replay.engine import REPLAY_CARD, Replay, load_replay_model
from pooled_mlx.replay.faults import Faults
from pooled_mlx.replay.script import ReplayScript, ScriptLine
from pooled_mlx.replay.tiny_model import tiny_hybrid_config
from pooled_mlx.runner import model as mlx_backend
from pooled_mlx.runner.devices import read_device
from pooled_mlx.runner.model import LoadedModel, arrays_of, mx
from pooled_mlx.runner.start import MlxSource
from tests.mac_fakes import health_body
from tests.small_tokenizer import byte_level, write_folder

WAIT_SECONDS = 30.0
MIB = 1 << 20
SAID = "One, two, three, four, five."
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: a small tokenizer, the scripted model's template, a configuration."""
    tokenizer = byte_level()
    config = tiny_hybrid_config(-(-tokenizer.get_vocab_size() // 64) * 64)
    settings = {"eos_token": "<|im_end|>", "chat_template": replay_template()}
    return write_folder(tmp_path_factory.mktemp("model"), tokenizer, tokenizer_config=settings, config=config)


class Rooms:
    """Makes rooms, keeps what they say of their end, and stops them all. `gate` holds back the loading of models."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.gate = folder, list[LocalEngine](), threading.Event()
        self.dead: list[str] = []
        self.gate.set()

    def __call__(
        self,
        *lines: ScriptLine,
        load: Callable[[Path], LoadedModel] = load_replay_model,
        device: Callable[[], DeviceFacts] = read_device,
        **settings: Any,
    ) -> LocalEngine:
        def load_when_told(folder: Path) -> LoadedModel:
            assert self.gate.wait(WAIT_SECONDS)
            return load(folder)

        fields = {"context_tokens": 2048, "pool_bytes": 8 * MIB, "prefill_step": 64, "seed": 7, **settings}
        script = ReplayScript(lines or [ScriptLine(1, SAID)])
        room = LocalEngine(
            REPLAY_CARD,
            self.folder,
            EngineSettings(**fields),
            MlxSource(load_when_told, device),
            on_dead=self.dead.append,
            rehearsal=Replay(script),
        )
        self.made.append(room)
        room.start()
        return room

    def ready(self, *lines: ScriptLine, **settings: Any) -> LocalEngine:
        room = self(*lines, **settings)
        assert room.wait_ready(WAIT_SECONDS), room.health()["reason"]
        return room


@pytest.fixture
def rooms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rooms]:
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)
    rooms = Rooms(folder)
    yield rooms
    rooms.gate.set()
    for room in rooms.made:
        room.stop(WAIT_SECONDS)
        assert not room._thread.is_alive()


def request(text: str = "Please count.", **fields: Any) -> Request:
    fields = {"max_output_tokens": 200, **fields}
    return Request(f"request-{text[:9]}-{id(fields)}", (Turn("system", "Be brief. " * 12), Turn("user", text)), **fields)


def answers(room: LocalEngine, requests: Sequence[Request], then: Callable[[], None] = lambda: None) -> list[list[Event]]:
    """Submit all of them, then do something, and collect everything that is said."""

    async def collect(generation: Any) -> list[Event]:
        return [event async for event in generation]

    async def submit() -> list[list[Event]]:
        generations = [room.submit(room.prepare(request)) for request in requests]
        reading = [asyncio.create_task(collect(generation)) for generation in generations]
        await asyncio.to_thread(then)
        return await asyncio.wait_for(asyncio.gather(*reading), WAIT_SECONDS)

    collected = asyncio.run(submit())
    for events in collected:
        check_order(events)
    return collected


def refused(act: Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        act()
    return error.value


def submitted_late(room: LocalEngine) -> None:
    """Submit what was prepared at another time."""

    async def submit() -> None:
        room.submit(Prepared(request(), 10, 10))

    asyncio.run(submit())


def on_engine(room: LocalEngine, command: Callable[[Loop], None]) -> None:
    """Run a command on the engine thread and wait for it."""
    done = threading.Event()

    def run(loop: Loop) -> None:
        try:
            command(loop)
        finally:
            done.set()

    room._thread.call(run)
    assert done.wait(WAIT_SECONDS)


def test_before_it_is_ready_a_room_counts_and_refuses_the_rest(rooms: Rooms) -> None:
    rooms.gate.clear()
    room = rooms()
    engine: Engine = room
    counted = engine.count_tokens(request())
    assert counted > 40
    for act in (lambda: room.prepare(request()), lambda: submitted_late(room), room.pool, lambda: room.plan, lambda: room.loop):
        error = refused(act)
        assert error.kind is ErrorKind.NOT_READY
        assert error.retry_after_seconds
        assert "loading" in error.message
    health = room.health()
    assert (health["ok"], health["ready"], health["state"]) == (True, False, "loading")
    assert "loading" in health["reason"]
    assert health["ctx"] == 2048
    assert not room.wait_ready(0.0)
    rooms.gate.set()
    assert room.wait_ready(WAIT_SECONDS)
    assert room.prepare(request()).prompt_tokens == counted == room.count_tokens(request())


def test_a_ready_room_answers_and_knows_about_it(rooms: Rooms) -> None:
    room = rooms.ready()
    events = answers(room, [request()])[0]
    answer = fold(events)
    assert (answer.text, answer.finish_reason) == (SAID, "stop")
    assert answer.usage.prompt_tokens == room.count_tokens(request())
    assert answer.cache_note
    on_engine(room, lambda loop: None)
    health = room.health()
    assert (health["ok"], health["ready"], health["state"], health["reason"]) == (True, True, "ready", None)
    assert (health["queue"], health["running"], health["served"], health["failed"]) == (0, 0, 1, 0)
    assert health["recent"][-1]["completion_tokens"] == answer.usage.completion_tokens
    assert health["prefill_step"] == 64
    again = fold(answers(room, [request()])[0])
    assert again.usage.cached_tokens > 0
    assert again.text == SAID


def test_health_and_pool_have_the_fields_that_their_readers_know(rooms: Rooms) -> None:
    room = rooms.ready()
    answers(room, [request()])
    on_engine(room, lambda loop: None)
    health, known = room.health(), health_body()
    assert set(known) - {"progress"} <= set(health)  # progress is that of a download
    for part in ("model", "memory"):
        assert set(known[part]) <= set(health[part])
    assert {key for fact in known["recent"] for key in fact} <= set(health["recent"][-1])
    table = (DOCS / "pool.md").read_text().split("## GET /pool")[1].split("\n\n`conversations` is")[0]
    documented = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line[:90])}
    assert set(room.pool()) <= documented
    fields = {line.split("|")[1] for line in table.splitlines() if line.startswith("| `")}
    assert {name for field in fields for name in re.findall(r"`(\w+)`", field)} == set(room.pool())


def test_a_full_queue_refuses_with_its_limit_and_takes_more_later(rooms: Rooms) -> None:
    room = rooms.ready(max_running=1, max_queue=2)
    gate = threading.Event()
    room._thread.call(lambda loop: assert_opened(gate))

    def one_too_many() -> None:
        error = refused(lambda: submitted_late(room))
        assert error.kind is ErrorKind.QUEUE_FULL
        assert error.retry_after_seconds == 5
        assert "limit 2" in error.message
        health = room.health()
        assert health["queue"] + health["running"] == 3
        gate.set()

    for events in answers(room, [request(f"{number}") for number in range(3)], one_too_many):
        assert isinstance(events[-1], Finished)
    assert isinstance(answers(room, [request("again")])[0][-1], Finished)


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(WAIT_SECONDS)


def test_a_request_that_does_not_fit_is_refused_with_numbers_before_any_work(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = rooms.ready()
    steps = room.loop.counters.steps + room.loop.counters.pieces
    long = request("word " * 1100)
    count = room.count_tokens(long)
    error = refused(lambda: room.prepare(long))
    assert (error.kind, error.code) == (ErrorKind.BAD_REQUEST, "context_length_exceeded")
    assert f"{count} tokens > 2048" in error.message
    plan = room.plan
    room._plan = replace(plan, pool_bytes=1000)
    error = refused(lambda: room.prepare(request()))
    needed = plan.fits(room.count_tokens(request()), 200).needed_bytes
    assert (error.kind, error.code) == (ErrorKind.BAD_REQUEST, "context_length_exceeded")
    assert f"{needed} bytes" in error.message
    assert "1000 bytes" in error.message
    room._plan = plan
    with monkeypatch.context() as patch:
        patch.setattr(PromptBuilder, "build", lambda self, request: pytest.fail("it was tokenized"))
        error = refused(lambda: room.prepare(request("x" * (8 * 2048 + 1))))
    assert (error.kind, error.code) == (ErrorKind.BAD_REQUEST, "context_length_exceeded")
    assert room.health()["queue"] + room.health()["running"] == 0
    assert room.loop.counters.steps + room.loop.counters.pieces == steps
    assert isinstance(answers(room, [request()])[0][-1], Finished)


def test_an_answer_ends_where_the_context_does(rooms: Rooms) -> None:
    room = rooms.ready(ScriptLine(1, "word " * 3000))
    empty, hundred = (room.count_tokens(request("one " * count)) for count in (0, 100))
    nearly = request("one " * (100 * (1700 - empty) // (hundred - empty)), max_output_tokens=10_000)
    left = 2048 - room.count_tokens(nearly)
    assert 300 <= left < 400
    answer = fold(answers(room, [nearly])[0])
    assert answer.finish_reason == "context_full"
    assert answer.usage.completion_tokens == left


def test_the_pool_gives_back_memory_and_gets_it_again(rooms: Rooms) -> None:
    rooms.gate.clear()
    room = rooms()
    room.set_pool_share(0.5)  # memory may be short before the model is there
    rooms.gate.set()
    assert room.wait_ready(WAIT_SECONDS)
    on_engine(room, lambda loop: None)
    assert room.health()["memory"]["pool_budget_bytes"] == room.plan.pool_bytes // 2
    assert room.health()["reason"] == "The system is short of memory: the cache pool is held at 50% of its budget."
    assert room.health()["ready"]
    answers(room, [request()])
    assert 0 < room.pool_share_used() < 0.5
    on_engine(room, lambda loop: None)
    assert room.health()["memory"]["pool_bytes"] > 0

    def squeeze() -> None:
        room.set_pool_share(0.0)
        on_engine(room, lambda loop: None)

    events = answers(room, [request("while it runs")], squeeze)[0]
    assert fold(events).text == SAID
    on_engine(room, lambda loop: None)
    memory = room.health()["memory"]
    assert (memory["pool_budget_bytes"], memory["pool_bytes"], memory["live_bytes"]) == (0, 0, 0)
    for share, part in ((-1.0, 0), (7.0, 1), (1.0, 1)):
        room.set_pool_share(share)
        on_engine(room, lambda loop: None)
        assert room.health()["memory"]["pool_budget_bytes"] == part * room.plan.pool_bytes
        assert (room.health()["reason"] is None) == bool(part)
    answers(room, [request()])
    assert fold(answers(room, [request()])[0]).usage.cached_tokens > 0


def test_what_clients_begin_with_stays_while_the_system_lets_us(rooms: Rooms) -> None:
    room = rooms.ready()
    turns = (
        Turn("system", "You are an agent that counts. " * 40),
        Turn("user", "Count."),
        Turn("assistant", "1"),
        Turn("user", "On."),
    )
    answers(room, [Request("agent", turns, max_output_tokens=20, client="agent")])
    room.set_pool_share(0.0, keep_pins=True)
    on_engine(room, lambda loop: None)
    assert "0% of its budget and what clients begin with." in room.health()["reason"]
    assert room.health()["memory"]["pool_bytes"] > 0
    room.set_pool_share(0.0)
    on_engine(room, lambda loop: None)
    assert room.health()["memory"]["pool_bytes"] == 0
    room.set_pool_share(1.0, keep_pins=True)
    on_engine(room, lambda loop: None)
    assert room.health()["reason"] is None


def test_a_device_that_fails_twice_is_said_in_health(rooms: Rooms) -> None:
    room = rooms.ready()
    on_engine(room, lambda loop: [loop._count_device_failure() for _ in range(2)])
    health = room.health()
    assert health["reason"] == "The GPU failed twice within a minute: prompts are read in pieces of 32 tokens now."
    assert (health["ok"], health["ready"], health["prefill_step"]) == (True, True, 32)
    assert fold(answers(room, [request()])[0]).text == SAID


def test_an_answer_that_a_stop_string_cut_is_read_as_the_client_has_it(rooms: Rooms) -> None:
    room = rooms.ready()
    cut = fold(answers(room, [request(stop=("three",))])[0])
    assert (cut.text, cut.finish_reason) == ("One, two, ", "stop")
    on_engine(room, lambda loop: None)
    assert room.pool()["exact_ids"]["answers"] == 0
    first = request()
    sent_back = replace(first, turns=(*first.turns, Turn("assistant", cut.text), Turn("user", "Go on.")))
    assert room.count_tokens(sent_back) == rooms.ready().count_tokens(sent_back)
    answers(room, [request()])
    on_engine(room, lambda loop: None)
    assert room.pool()["exact_ids"]["answers"] == 1


class Metal:
    """MLX's residency sets of a Mac: what is wired of the buffers that there are, in pages, by the rules of its allocator."""

    heap, page = 1 << 20, 16_384

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.limit = 0
        monkeypatch.setattr(mlx_backend, "can_wire", lambda: True)
        for name in ("clear_cache", "set_wired_limit", "get_active_memory"):
            monkeypatch.setattr(mx, name, getattr(self, name))

    def load(self, folder: Path) -> LoadedModel:
        self.model = load_replay_model(folder)
        self.calls.append("load")
        return self.model

    def clear_cache(self) -> None:
        self.calls.append("clear_cache")

    def set_wired_limit(self, limit: int) -> None:
        self.calls.append("set_wired_limit")
        self.limit = limit

    def get_active_memory(self) -> int:
        """Lengths of buffers: those above a page are whole pages."""
        sizes = [array.nbytes for array in self.weights()]
        return sum(size if size <= self.page else -(-size // self.page) * self.page for size in sizes)

    def weights(self) -> Sequence[mx.array]:
        return arrays_of(self.model.module.parameters())

    def pages(self, arrays: Sequence[mx.array]) -> int:
        return sum(-(-array.nbytes // self.page) * self.page for array in arrays if array.nbytes > 256)


def wired_room(rooms: Rooms, metal: Metal, wired: str, recommended: int) -> LocalEngine:
    device = DeviceFacts("a Mac", 8 << 30, True, recommended, 1 << 30)
    room = rooms(load=metal.load, wired=wired, device=lambda: device)
    assert room.wait_ready(WAIT_SECONDS), room.health()["reason"]
    return room


def test_the_weights_are_wired_alone_and_leave_no_room_for_caches(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    metal = Metal(monkeypatch)
    room = wired_room(rooms, metal, "weights", 6 << 30)
    wiring = metal.calls.index("set_wired_limit")
    assert metal.calls[: wiring + 1] == ["load", "clear_cache", "set_wired_limit"]  # nothing else is in memory by then
    assert metal.calls.count("set_wired_limit") == 1
    wired = metal.heap + metal.pages(metal.weights())
    assert wired <= metal.limit  # else one of them has no place, and its room is open
    filling = metal.model._filling
    assert metal.limit - wired - metal.pages(filling) < metal.page  # no later buffer gets in
    assert {array.nbytes for array in filling} == {metal.page}
    assert room.health()["memory"]["wired_bytes"] == metal.limit


@pytest.mark.parametrize("wired", ["auto", "off"])
def test_nothing_is_wired_where_nothing_need_be(rooms: Rooms, monkeypatch: pytest.MonkeyPatch, wired: str) -> None:
    metal = Metal(monkeypatch)
    room = wired_room(rooms, metal, wired, 6 << 30)
    answers(room, [request()])
    assert "set_wired_limit" not in metal.calls
    assert room.health()["memory"]["wired_bytes"] == 0


def test_a_mac_that_cannot_wire_says_that_nothing_is(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    metal = Metal(monkeypatch)
    monkeypatch.setattr(mlx_backend, "can_wire", lambda: False)
    room = wired_room(rooms, metal, "weights", 6 << 30)
    assert "set_wired_limit" not in metal.calls
    assert room.health()["memory"]["wired_bytes"] == 0


@pytest.mark.parametrize(("metal", "system", "expected"), [(True, "15.1", True), (True, "14.7", False), (False, "", False)])
def test_wiring_needs_metal_and_a_system_that_has_it(
    monkeypatch: pytest.MonkeyPatch, metal: bool, system: str, expected: bool
) -> None:
    monkeypatch.setattr(mlx_backend, "has_metal", lambda: metal)
    monkeypatch.setattr("platform.mac_ver", lambda: (system, ("", "", ""), ""))
    assert mlx_backend.can_wire() is expected


def test_a_client_that_leaves_frees_its_place(rooms: Rooms) -> None:
    room = rooms.ready(
        ScriptLine(1, "word " * 300, faults=Faults(token_seconds=WAIT_SECONDS)), ScriptLine(2, SAID), max_running=1
    )

    async def leave() -> list[Event]:
        generation = room.submit(room.prepare(request(max_output_tokens=None)))
        events: list[Event] = []
        async for event in generation:
            events.append(event)
            if isinstance(event, Text):
                generation.cancel()
                generation.cancel()
        return events

    events = asyncio.run(asyncio.wait_for(leave(), WAIT_SECONDS))
    check_order(events)
    assert isinstance(events[-1], Failed)
    assert fold(answers(room, [request()])[0]).text == SAID
    on_engine(room, lambda loop: None)
    health = room.health()
    assert (health["served"], health["failed"], health["queue"], health["running"]) == (1, 0, 0, 0)
    assert [fact["finish"] for fact in health["recent"]] == ["cancelled", "stop"]


def test_a_stop_gives_every_request_its_error_and_is_no_death(rooms: Rooms) -> None:
    room = rooms.ready(ScriptLine(1, "word " * 300, faults=Faults(token_seconds=WAIT_SECONDS)), max_running=1)
    for events in answers(room, [request("a"), request("b")], lambda: room.stop(WAIT_SECONDS)):
        assert isinstance(events[-1], Failed)
        assert events[-1].error.kind is ErrorKind.NOT_READY
    room.stop(WAIT_SECONDS)
    health = room.health()
    assert (health["ok"], health["ready"], health["state"]) == (True, False, "stopping")
    assert refused(lambda: room.prepare(request())).kind is ErrorKind.NOT_READY
    assert refused(lambda: submitted_late(room)).kind is ErrorKind.NOT_READY
    assert rooms.dead == []


def test_a_stop_while_the_model_loads_is_no_death(rooms: Rooms) -> None:
    rooms.gate.clear()
    room = rooms()
    stopping = threading.Thread(target=lambda: room.stop(WAIT_SECONDS))
    stopping.start()
    rooms.gate.set()
    stopping.join(WAIT_SECONDS)
    assert not room.wait_ready(WAIT_SECONDS)
    assert room.health()["state"] == "stopping"
    assert rooms.dead == []


def test_a_model_that_cannot_be_loaded_is_a_death_with_its_reason(rooms: Rooms) -> None:
    def fail(folder: Path) -> LoadedModel:
        raise RuntimeError("injected: the weights are damaged")

    room = rooms(load=fail)
    assert not room.wait_ready(WAIT_SECONDS)
    room.stop(WAIT_SECONDS)
    health = room.health()
    assert (health["ok"], health["ready"], health["state"]) == (False, False, "failed")
    assert "damaged" in health["reason"]
    assert rooms.dead == ["injected: the weights are damaged"]
    error = refused(lambda: room.prepare(request()))
    assert error.kind is ErrorKind.NOT_READY
    assert "damaged" in error.message


def test_a_dead_room_says_so_and_ends_what_ran(rooms: Rooms) -> None:
    room = rooms.ready(ScriptLine(1, SAID), ScriptLine(2, "word " * 300), max_running=1)
    answers(room, [request()])

    def die() -> None:
        def turn() -> None:
            raise EngineDead("injected")

        room._thread.call(lambda loop: setattr(loop, "turn", turn))

    for events in answers(room, [request("a", max_output_tokens=900), request("b", max_output_tokens=900)], die):
        assert isinstance(events[-1], Failed)
        assert events[-1].error.kind is ErrorKind.ENGINE_FAILED
    room._thread.join(WAIT_SECONDS)
    assert rooms.dead == ["injected"]
    health = room.health()
    assert (health["ok"], health["ready"], health["state"], health["reason"]) == (False, False, "failed", "injected")
    assert (health["queue"], health["running"], health["failed"]) == (0, 0, 2)
    for act in (lambda: room.prepare(request()), lambda: submitted_late(room)):
        error = refused(act)
        assert error.kind is ErrorKind.NOT_READY
        assert "dead" in error.message
    assert not room.wait_ready(0.0)
    assert refused(lambda: room.loop).kind is ErrorKind.NOT_READY
    assert room.count_tokens(request()) > 40
    assert "snapshot_age_seconds" in room.pool()
    room.set_pool_share(0.5)
    room.stop(WAIT_SECONDS)
    assert room.health()["state"] == "failed"
