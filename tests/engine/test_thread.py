"""The engine thread: how requests get in, how they end when the engine ends, and who is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import Event, Failed, Finished, Text
from pooled_mlx.engine.loop import EngineDead, Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.engine.thread import EngineStopped, EngineThread
from pooled_mlx.replay.faults import Faults
from tests.engine.harness import ListChannel, assert_idle, make_loop, make_row, solo_greedy
from tests.engine.test_loop import FailingModel
from tests.tiny_models import llama, tokens

WAIT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that were asked for."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


class Reader(ListChannel):
    """A channel whose events another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.over = threading.Event(), threading.Event()

    def put(self, event: Event) -> None:
        super().put(event)
        if isinstance(event, Text):
            self.began.set()
        if isinstance(event, Finished | Failed):
            self.over.set()

    def last(self) -> Finished | Failed:
        """Wait for the end. Raises AssertionError when it does not come, or when there are two."""
        assert self.over.wait(WAIT_SECONDS)
        return self.end


class Engine:
    """An engine thread and what it tells. The model is loaded once `gate` is open; `prepare` may change the loop."""

    def __init__(
        self,
        *,
        open_gate: bool = True,
        prepare: Callable[[Loop], None] = lambda loop: None,
        model: Callable[[], Any] = llama,
        **settings: Any,
    ) -> None:
        self.gate, self.ready = threading.Event(), threading.Event()
        self.dead: list[str] = []
        self.order: list[str] = []
        self._prepare, self._model, self._settings = prepare, model, settings
        self.thread = EngineThread(self._make, self._became_ready, self._died)
        if open_gate:
            self.gate.set()

    def _make(self) -> Loop:
        assert self.gate.wait(WAIT_SECONDS)
        loop = make_loop(self._model(), **self._settings)
        self._prepare(loop)
        return loop

    def _became_ready(self) -> None:
        self.order.append("ready")
        self.ready.set()

    def _died(self, reason: str) -> None:
        self.order.append("dead")
        self.dead.append(reason)

    def ask(self, most: int = 6, seed: int = 1, **fields: Any) -> tuple[Row, Reader]:
        row, reader = make_row(tokens(40, seed=seed), most, **fields), Reader()
        row.channel = reader  # type: ignore[assignment]
        self.thread.submit(row)
        return row, reader

    def question(self, ask: Callable[[Loop], Any]) -> Any:
        answer: Future[Any] = Future()
        self.thread.call(lambda loop: answer.set_result(ask(loop)))
        return answer.result(WAIT_SECONDS)

    def join(self) -> None:
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()
        assert self.thread.loop is None


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes engines; all of them are stopped at the end."""
    made: list[Engine] = []

    def make(**fields: Any) -> Engine:
        made.append(Engine(**fields))
        made[-1].thread.start()
        return made[-1]

    yield make
    for engine in made:
        engine.gate.set()
        engine.thread.stop()
        engine.join()


def refusal(engine: Engine) -> ApiError:
    with pytest.raises(ApiError) as refused:
        engine.ask()
    return refused.value


Make = Callable[..., Engine]


def test_what_is_submitted_while_the_model_loads_is_answered_when_it_is_there(engines: Make) -> None:
    engine = engines(open_gate=False)
    asked = [engine.ask(seed=seed) for seed in (1, 2, 3)]
    assert not engine.ready.is_set()
    engine.gate.set()
    for row, reader in asked:
        assert isinstance(reader.last(), Finished)
        assert row.out == solo_greedy(llama(), row.prompt.ids, 6)
    assert engine.order == ["ready"]


def give_up(loop: Loop) -> None:
    raise EngineStopped


@pytest.mark.parametrize("prepare", [lambda loop: None, give_up], ids=["loaded", "given up"])
def test_a_stop_while_the_model_loads_gives_every_request_its_error(engines: Make, prepare: Callable[[Loop], None]) -> None:
    engine = engines(open_gate=False, prepare=prepare)
    asked = [engine.ask(), engine.ask()]
    engine.thread.stop()
    engine.gate.set()
    engine.join()
    for _, reader in asked:
        end = reader.last()
        assert isinstance(end, Failed)
        assert end.error.kind is ErrorKind.NOT_READY
    assert engine.dead == []
    assert refusal(engine).kind is ErrorKind.NOT_READY


def test_a_model_that_cannot_be_loaded_is_told_once_and_gives_every_request_its_error(engines: Make) -> None:
    def fail() -> None:
        raise RuntimeError("injected: no such weights")

    engine = engines(open_gate=False, model=fail)
    _, reader = engine.ask()
    engine.gate.set()
    end = reader.last()
    assert isinstance(end, Failed)
    assert end.error.kind is ErrorKind.ENGINE_FAILED
    engine.join()
    assert engine.dead == ["injected: no such weights"]
    assert "no such weights" in refusal(engine).message
    engine.thread.stop()
    assert engine.order == ["dead"]


def test_a_stop_ends_every_request_once_running_or_waiting(engines: Make) -> None:
    engine = engines(max_running=2)
    asked = [engine.ask(most=10_000, seed=seed) for seed in range(4)]
    assert asked[0][1].began.wait(WAIT_SECONDS)
    engine.thread.stop()
    engine.thread.stop()
    engine.join()
    for _, reader in asked:
        end = reader.last()
        assert isinstance(end, Failed)
        assert end.error.kind is ErrorKind.NOT_READY
    assert engine.dead == []


def test_a_stop_and_a_cancel_do_not_wait_for_a_scripted_pause(engines: Make) -> None:
    engine = engines()
    slow: dict[str, Any] = {"fault": Faults(token_seconds=100 * WAIT_SECONDS)}
    _, first = engine.ask(**slow)
    assert first.began.wait(WAIT_SECONDS)
    first.cancelled = True
    engine.thread.wake()
    assert isinstance(first.last(), Failed)
    _, second = engine.ask(seed=2, **slow)
    assert second.began.wait(WAIT_SECONDS)
    engine.thread.stop()
    engine.join()
    assert isinstance(second.last(), Failed)


def test_an_engine_that_dies_tells_first_and_then_ends_every_request(engines: Make) -> None:
    engine = engines(model=lambda: FailingModel(llama(), {8}, probe_fails=True), max_running=2)
    asked: list[tuple[Row, Reader]] = []

    class Ordered(Reader):
        def put(self, event: Event) -> None:
            if isinstance(event, Failed):
                engine.order.append("failed")
            super().put(event)

    def submit(loop: Loop) -> None:
        for seed in range(4):
            row, reader = make_row(tokens(40, seed=seed), 100), Ordered()
            row.channel = reader  # type: ignore[assignment]
            loop.submit(row)
            asked.append((row, reader))

    engine.thread.call(submit)
    engine.thread.join(WAIT_SECONDS)
    assert engine.order == ["ready", "dead", "failed", "failed", "failed", "failed"]
    assert len(engine.dead) == 1
    assert "no longer runs" in engine.dead[0]
    for _, reader in asked:
        end = reader.last()
        assert isinstance(end, Failed)
        assert end.error.kind is ErrorKind.ENGINE_FAILED
    assert refusal(engine).kind is ErrorKind.ENGINE_FAILED
    called = threading.Event()
    engine.thread.call(lambda loop: called.set())
    engine.thread.wake()
    engine.join()
    assert not called.is_set()


@pytest.mark.parametrize("error", [EngineDead("injected"), RuntimeError("injected"), SystemExit("injected")], ids=repr)
def test_whatever_a_turn_raises_the_end_is_told_once(engines: Make, error: BaseException) -> None:
    def spoil(loop: Loop) -> None:
        def turn() -> None:
            raise error

        loop.turn = turn  # type: ignore[method-assign]

    engine = engines(prepare=spoil)
    _, reader = engine.ask()
    end = reader.last()
    assert isinstance(end, Failed)
    assert end.error.kind is ErrorKind.ENGINE_FAILED
    engine.join()
    assert len(engine.dead) == 1
    assert "injected" in engine.dead[0]


def test_who_is_told_of_the_end_and_raises_keeps_nobody_from_an_error(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Engine, *_: Any) -> None:
        self.dead.append("told")
        raise RuntimeError("injected")

    monkeypatch.setattr(Engine, "_became_ready", lambda self: fail(self))
    monkeypatch.setattr(Engine, "_died", fail)
    engine = engines(open_gate=False)
    _, reader = engine.ask()
    engine.gate.set()
    assert isinstance(reader.last(), Failed)
    engine.join()
    assert engine.dead == ["told", "told"]


def test_commands_run_in_order_on_the_thread_between_turns(engines: Make) -> None:
    inside = threading.Event()

    def watch(loop: Loop) -> None:
        turn = loop.turn

        def watched() -> None:
            inside.set()
            turn()
            inside.clear()

        loop.turn = watched  # type: ignore[method-assign]

    engine = engines(prepare=watch)
    row, reader = engine.ask(most=200)
    assert reader.began.wait(WAIT_SECONDS)
    seen: list[int] = []

    def note(number: int) -> Callable[[Loop], None]:
        def command(loop: Loop) -> None:
            assert not inside.is_set()
            assert threading.current_thread() is engine.thread
            if number % 3 == 1:
                raise RuntimeError("injected")
            seen.append(number)

        return command

    for number in range(9):
        engine.thread.call(note(number))
    assert engine.question(lambda loop: list(seen)) == [0, 2, 3, 5, 6, 8]
    assert isinstance(reader.last(), Finished)
    assert row.out == solo_greedy(llama(), row.prompt.ids, 200)


def test_an_idle_thread_waits_and_wakes(engines: Make) -> None:
    turns: list[bool] = []
    engine = engines(prepare=lambda loop: setattr(loop, "_after_turn", turns.append))
    assert engine.ready.wait(WAIT_SECONDS)
    for asked in (1, 2):
        row, reader = engine.ask(seed=asked)
        assert isinstance(reader.last(), Finished)
        assert row.out == solo_greedy(llama(), row.prompt.ids, 6)
        engine.question(assert_idle)
    before = engine.question(lambda loop: len(turns))
    engine.thread.wake()
    assert engine.question(lambda loop: len(turns)) - before <= 2
    assert turns[-1] is True


@pytest.mark.parametrize("stage", ["queued", "running"])
def test_a_cancel_from_another_thread_ends_its_request_only(engines: Make, stage: str) -> None:
    engine = engines(max_running=1)
    stays, stays_reader = engine.ask(most=300)
    assert stays_reader.began.wait(WAIT_SECONDS)
    _, gone = engine.ask(seed=2, most=300)
    _, behind = engine.ask(seed=3)
    target = gone if stage == "queued" else stays_reader
    target.cancelled = True
    engine.thread.wake()
    assert isinstance(target.last(), Failed)
    assert isinstance(behind.last(), Finished)
    if stage == "queued":
        assert stays_reader.last()
        assert stays.out == solo_greedy(llama(), stays.prompt.ids, 300)
    else:
        assert isinstance(gone.last(), Finished)
    engine.question(assert_idle)


def test_requests_that_race_with_the_end_are_refused_or_ended_but_never_forgotten(engines: Make) -> None:
    for how in ("stop", "death"):
        engine = engines(max_running=2)
        assert engine.ready.wait(WAIT_SECONDS)
        start = threading.Barrier(5)

        def submit(number: int, engine: Engine = engine, start: threading.Barrier = start) -> list[Reader]:
            start.wait(WAIT_SECONDS)
            readers: list[Reader] = []
            for seed in range(25):
                try:
                    readers.append(engine.ask(most=3, seed=100 * number + seed)[1])
                except ApiError:
                    break
            return readers

        def die(loop: Loop) -> None:
            raise SystemExit("injected")

        with ThreadPoolExecutor(4) as workers:
            waiting = [workers.submit(submit, number) for number in range(4)]
            start.wait(WAIT_SECONDS)
            engine.thread.stop() if how == "stop" else engine.thread.call(die)
            readers = [reader for done in waiting for reader in done.result(WAIT_SECONDS)]
        engine.join()
        for reader in readers:
            assert isinstance(reader.last(), Finished | Failed)
        assert len(engine.dead) == (how == "death")
