"""Failures at places other than the forward pass: nobody loses an answer that can be had, and nothing wrong is kept."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import Failed, Finished, Text
from pooled_mlx.engine.pool import Match
from pooled_mlx.engine.report import Facts
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine.harness import ModelProxy, assert_idle, drive, drop_slack, make_loop, make_row, run, solo_greedy
from tests.engine.test_resources import SLACK_BYTES, active_bytes, wide_llama
from tests.tiny_models import ARCHITECTURES, tokens

SHARED = tokens(130, seed=50)
_models: dict[str, LoadedModel] = {}
_solo: dict[tuple[int, bytes, int], list[int]] = {}


@pytest.fixture(params=["qwen3_5_moe", "llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured log records keep tracebacks, and these the arrays of the frames in them."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def prompt(length: int, seed: int) -> np.ndarray:
    return np.concatenate([SHARED, tokens(length, seed=seed)])


def end_of(row: Row) -> Finished | Failed:
    return row.channel.end  # type: ignore[attr-defined]


def solo(model: LoadedModel, row: Row) -> list[int]:
    """What mlx-lm's own generator answers, computed once."""
    key = (id(model), row.prompt.ids.tobytes(), row.max_tokens)
    if key not in _solo:
        _solo[key] = solo_greedy(model, row.prompt.ids, row.max_tokens)
    return _solo[key]


class Breaks:
    """A function that raises in some of its calls, counted from 1, before or after it did its work."""

    def __init__(self, inner: Callable[..., Any], calls: set[int], *, late: bool = False) -> None:
        self._inner, self._breaks, self._late = inner, calls, late
        self.calls = self.raised = 0

    def __call__(self, *args: Any, **fields: Any) -> Any:
        self.calls += 1
        due = self.calls in self._breaks
        result = self._inner(*args, **fields) if self._late or not due else None
        if due:
            self.raised += 1
            raise RuntimeError("injected")
        return result


def break_in(monkeypatch: pytest.MonkeyPatch, place: str, calls: set[int], *, late: bool = False) -> Breaks:
    """Make calls of `place`, a module's function or a class's method (`module:Class.name`), raise."""
    module, _, name = place.partition(":")
    owner: Any = importlib.import_module(f"pooled_mlx.{module}")
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    broken = Breaks(getattr(owner, name), calls, late=late)
    monkeypatch.setattr(owner, name, lambda *args, **fields: broken(*args, **fields))
    return broken


STEPS = [
    "engine.ledger:Ledger.join",
    "runner.runner:MlxRunner.join",
    "engine.ledger:Ledger.leave",
    "runner.runner:MlxRunner.leave",
    "runner.batch:extract",
    "runner.runner:MlxRunner.step",
    "runner.runner:MlxRunner.choose",
    "runner.runner:MlxRunner.take",
    "engine.ledger:Ledger.open",
    "runner.runner:MlxRunner.open",
    "runner.runner:MlxRunner.read",
    "runner.runner:MlxRunner.mark",
    "engine.keep:Keeper._store",
    "engine.ledger:Ledger.grow",
    "engine.pool:Pool.insert",
    "engine.pool:Pool.lease",
    "engine.ledger:Ledger.evict_for",
    "engine.ledger:Ledger.adopt",
]
ENDS = ["engine.keep:Keeper._keep", "runner.runner:MlxRunner.trim"]


def four_rows() -> dict[int, list[Row]]:
    """Rows that share a stored beginning, join one another and leave at different times."""
    sizes = ((91, 6), (77, 25), (68, 14), (100, 9))
    rows = [make_row(prompt(length, length), most, (130, 130 + length - 3)) for length, most in sizes]
    return {0: [rows[0]], 2: [rows[1]], 9: [rows[2], rows[3]]}


@pytest.mark.parametrize(
    ("place", "call", "late"),
    [*((place, 1, False) for place in STEPS), *((place, 2, place != "engine.pool:Pool.lease") for place in STEPS)],
)
def test_a_step_that_fails_anywhere_costs_nobody_the_answer(
    model: LoadedModel, place: str, call: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(model)
    run(loop, make_row(prompt(5, 1), 3, (130,)))
    arrivals = four_rows()
    with monkeypatch.context() as patch:
        broken = break_in(patch, place, {call}, late=late)
        drive(loop, arrivals)
    assert broken.raised == 1
    for row in (row for rows in arrivals.values() for row in rows):
        assert isinstance(end_of(row), Finished), end_of(row)
        assert row.out == solo(model, row)
    assert_idle(loop)
    again = make_row(prompt(91, 91), 6, (130, 218))
    run(loop, again)
    assert again.cached_tokens
    assert again.out == solo(model, again)


@pytest.mark.parametrize("place", ENDS)
def test_what_fails_after_the_answer_costs_a_later_hit_only(
    model: LoadedModel, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(model)
    with monkeypatch.context() as patch:
        broken = break_in(patch, place, {1, 2})
        rows = [make_row(prompt(20, seed), 5, (130,)) for seed in (1, 2, 3)]
        for row in rows:
            run(loop, row)
            drop_slack(loop)
    assert broken.raised == 2
    rows.append(make_row(prompt(20, 1), 5, (130,)))
    run(loop, rows[-1])
    for row in rows:
        assert isinstance(end_of(row), Finished)
        assert row.out == solo(model, row)
    assert_idle(loop)


@pytest.mark.parametrize("place", ["runner.runner:MlxRunner.join", "runner.runner:MlxRunner.open", "engine.keep:Keeper._store"])
def test_a_second_failure_ends_the_requests_that_it_hits_and_no_others(
    model: LoadedModel, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(model, max_running=2)
    run(loop, make_row(prompt(5, 1), 3, (130,)))
    arrivals = four_rows()
    with monkeypatch.context() as patch:
        break_in(patch, place, {1, 2, 3})
        drive(loop, arrivals)
    rows = [row for rows in arrivals.values() for row in rows]
    failed = [row for row in rows if isinstance(end_of(row), Failed)]
    assert len(failed) <= 2
    assert failed or "join" in place, "a row that was read again joins no batch"
    for row in rows:
        expected = solo(model, row)
        end = end_of(row)
        if isinstance(end, Failed):
            assert end.error.kind is ErrorKind.ENGINE_FAILED
            assert "failed at this step: injected" in end.error.message
            assert row.out == expected[: len(row.out)]
        else:
            assert row.out == expected
    assert_idle(loop)


class Allergic(ModelProxy):
    """A model that fails whenever it reads one token."""

    def __init__(self, model: LoadedModel, token: int) -> None:
        super().__init__(model)
        self._token = token

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        if bool((ids == self._token).any().item()):
            raise RuntimeError("injected")
        return self._model.forward(ids, cache)


def test_a_request_that_always_fails_takes_nobody_with_it(model: LoadedModel) -> None:
    for place in ("prompt", "answer"):
        well, sick = make_row(tokens(60, seed=1), 30, (20,)), make_row(tokens(70, seed=2), 30, (20,))
        alone = {row: solo(model, row) for row in (well, sick)}
        harmless = {0, *well.prompt.ids.tolist(), *alone[well]}
        if place == "prompt":
            token = next(token for token in sick.prompt.ids[30:].tolist() if token not in harmless)
            said = 0
        else:
            harmless.update(sick.prompt.ids.tolist())
            token = next(token for token in alone[sick][1:-1] if token not in harmless)
            said = alone[sick].index(token) + 1
        loop = make_loop(Allergic(model, token))  # type: ignore[arg-type]
        run(loop, well, sick)
        end = end_of(sick)
        assert isinstance(end, Failed)
        assert end.error.kind is ErrorKind.ENGINE_FAILED
        assert said - 1 <= len(sick.out) <= said
        assert well.out == alone[well]
        assert loop.counters.failures == 2
        assert_idle(loop)


@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_a_request_that_is_over_is_not_read_again_after_a_failed_step(
    model: LoadedModel, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(model)
    over, stays = (make_row(tokens(60, seed=seed), most, (20,)) for seed, most in ((1, 12), (3, 30)))
    drive(loop, {0: [over, stays]}, until=lambda: len(loop.batches) == 1 and len(over.out) == 10)
    over.channel.cancelled = how == "cancelled"
    with monkeypatch.context() as patch:
        broken = break_in(patch, "runner.runner:MlxRunner.leave", {1})
        drive(loop, {})
    assert broken.raised == 1
    assert isinstance(end_of(over), Finished if how == "finished" else Failed)
    assert over.out == solo(model, over)[: 12 if how == "finished" else 10]
    assert not over.retried
    assert stays.retried
    assert stays.out == solo(model, stays)
    assert_idle(loop)


def test_a_parked_request_that_cannot_go_on_is_read_again(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(model, park_above=4, park_below=1)
    slow, quick = make_row(prompt(20, 1), 20, (130,)), make_row(prompt(30, 2), 30, (130,))
    slow.channel.backlog = 5  # type: ignore[misc]
    drive(loop, {0: [slow, quick]}, until=lambda: slow in loop.parked and len(quick.out) > 2)
    slow.channel.backlog = 0  # type: ignore[misc]
    with monkeypatch.context() as patch:
        broken = break_in(patch, "engine.loop:Loop._start_writing", {1})
        drive(loop, {})
    assert broken.raised == 1
    for row in (slow, quick):
        assert row.out == solo(model, row)
    texts = [event for event in slow.channel.events if isinstance(event, Text)]  # type: ignore[attr-defined]
    assert len(texts) == 20
    assert_idle(loop)


def test_a_prefix_that_could_not_be_restored_holds_no_more_memory_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama(layers=4)
    loop = make_loop(model)
    ids = tokens(300, seed=1)
    run(loop, make_row(ids, 2, (40, 200)))
    drop_slack(loop)
    before = active_bytes() - loop.pool.used_bytes
    long = make_row(np.concatenate([ids[:290], tokens(900, seed=2)]), 2, (40, 200))
    with monkeypatch.context() as patch:
        broken = break_in(patch, "runner.layers:_joined", {6, 14})
        run(loop, long)
    assert broken.raised == 2
    assert isinstance(end_of(long), Failed)
    assert_idle(loop)
    del long, broken
    assert active_bytes() - before - loop.pool.used_bytes <= 4 * SLACK_BYTES
    again = make_row(ids, 2, (40, 200))
    run(loop, again)
    assert again.cached_tokens >= 200
    assert again.out == solo(model, again)


# --- those that only listen


def test_a_memory_or_an_explanation_that_fails_costs_nobody_the_answer(model: LoadedModel) -> None:
    def remember(row: Row) -> None:
        raise RuntimeError("injected")

    def explain(row: Row, match: Match) -> None:
        raise RuntimeError("injected")

    loop = make_loop(model, remember=remember, explain=explain)
    rows = [make_row(prompt(20, seed), 10, (130,)) for seed in (1, 2)]
    run(loop, *rows)
    for row in rows:
        assert isinstance(end_of(row), Finished)
        assert row.out == solo(model, row)
    assert (loop.counters.failures, loop.counters.rebuilds) == (0, 0)
    assert_idle(loop)


@pytest.mark.parametrize("what", ["started", "prefilled", "token", "ended"])
def test_an_observer_that_fails_costs_nobody_the_answer(model: LoadedModel, what: str) -> None:
    class Careless(Facts):
        pass

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    setattr(Careless, what, fail)
    loop = make_loop(model, observer=Careless(), max_running=2)
    rows = [make_row(prompt(20, seed), 10, (130,)) for seed in (1, 2, 3)]
    gone = make_row(prompt(40, 4), 10, (130,))
    drive(loop, {0: [*rows, gone]}, until=lambda: setattr(gone.channel, "cancelled", len(rows[0].out) > 3) or False)
    for row in rows:
        assert isinstance(end_of(row), Finished), what
        assert row.out == solo(model, row)
    error = end_of(gone)
    assert isinstance(error, Failed)
    assert isinstance(error.error, ApiError)
    assert (loop.counters.failures, loop.counters.rebuilds) == (0, 0)
    assert_idle(loop)
