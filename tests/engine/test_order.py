"""Who goes on when, what is asked how often, and what is told how often: the order of things, as seen from outside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.events import Failed, Finished, Text
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel, mx
from tests.counting_runner import CountingRunner, answer
from tests.engine.harness import ModelProxy, PlainAnswer, assert_idle, drive, loop_on, make_loop, make_row, run, solo_greedy
from tests.engine.test_loop import FailingModel
from tests.pool_fakes import Clock
from tests.tiny_models import ARCHITECTURES, llama, tokens

MODEL = llama()
_models: dict[str, LoadedModel] = {"llama": MODEL}


@pytest.fixture(params=["qwen3_5_moe", "llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that were asked for."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def end_of(row: Row) -> Finished | Failed:
    return row.channel.end  # type: ignore[attr-defined]


def texts_of(row: Row) -> int:
    return sum(isinstance(event, Text) for event in row.channel.events)  # type: ignore[attr-defined]


def backlog(row: Row, events: int) -> None:
    row.channel.backlog = events  # type: ignore[misc]


def together(loop: Loop, *rows: Row) -> Callable[[], bool]:
    """True once these rows take their steps in one batch."""
    return lambda: any(set(rows) <= set(batch.rows) for batch in loop.batches)


# --- the pass that is queued ahead


@pytest.mark.parametrize("divisible", [True, False])
def test_a_plain_row_always_has_the_pass_after_next_queued_before_a_token_is_taken(divisible: bool) -> None:
    calls: list[str] = []
    runner = CountingRunner(divisible=divisible, fail=calls.append)
    row = make_row(tokens(20, seed=4), 6)
    run(loop_on(runner, CutRule(64, 256), token_bytes=64, drafts=False), row)
    assert row.out == answer(row.prompt.ids.tolist(), 6)
    decoded = calls[calls.index("choose") :]
    # The first token does not wait for the pass after it; from then on a pass and its choice are queued, then one is taken.
    first, ahead = ["choose", "take", "step", "choose"], ["step", "choose", "take"]
    assert decoded[: 4 + 3 * 5] == [*first, *ahead * 5]


class Log(PlainAnswer):
    """Notes when a token is taken, between what MLX was given to compute."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def feed(self, token: int) -> list[Any]:
        self._log.append("taken")
        return super().feed(token)


def test_the_next_choice_is_queued_before_a_token_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine works beside the CPU, it computes the next token while this one is turned into events."""
    log: list[str] = []
    queue = mx.async_eval

    def queued(*arrays: Any) -> None:
        queue(*arrays)
        if any(isinstance(array, mx.array) and array.ndim == 1 and array.dtype == mx.uint32 for array in arrays):
            log.append("queued")

    row = make_row(tokens(40, seed=1), 6, answer=Log(log))
    monkeypatch.setattr(mx, "async_eval", queued)
    run(make_loop(MODEL), row)
    assert row.out == solo_greedy(MODEL, row.prompt.ids, 6)
    places = [place for place, what in enumerate(log) if what == "taken"]
    assert [log[:place].count("queued") for place in places[:5]] == [1, 3, 4, 5, 6], log


# --- leaving a batch


def test_rows_that_leave_a_batch_in_one_step_keep_each_its_own(model: LoadedModel) -> None:
    rows = [make_row(tokens(length, seed=length), 60, (20,)) for length in (60, 75, 90)]
    loop = make_loop(model)
    drive(loop, {0: rows}, until=together(loop, *rows))
    leaving = rows[:2]
    for row in leaving:
        row.max_tokens = len(row.out) + 5
    drive(loop, {}, until=lambda: any(row.ended for row in rows))
    assert [row.ended for row in rows] == [True, True, False]
    drive(loop, {})
    assert [row.out for row in rows] == [solo_greedy(model, row.prompt.ids, row.max_tokens) for row in rows]
    for row in leaving:
        said = np.concatenate([row.prompt.ids, np.array(row.out, np.uint32)])
        warm = make_row(np.concatenate([said, tokens(30, seed=3)]), 12, (20, len(said)))
        run(loop, warm)
        assert warm.cached_tokens == len(said)
        assert warm.out == solo_greedy(model, warm.prompt.ids, 12)
    assert_idle(loop)


# --- parking


@pytest.mark.parametrize("lengths", [(60, 70), (60, 900)], ids=["one batch", "two groups"])
def test_a_parked_row_goes_on_as_soon_as_its_reader_does(model: LoadedModel, lengths: tuple[int, int]) -> None:
    loop = make_loop(model, park_above=4, park_below=1)
    slow, quick = (make_row(tokens(length, seed=length), 60, (20,)) for length in lengths)
    backlog(slow, 5)
    drive(loop, {0: [slow, quick]}, until=lambda: slow in loop.parked and len(quick.out) == 10)
    assert len(slow.out) < 10
    backlog(slow, 0)
    drive(loop, {}, until=lambda: len(slow.out) == 20)
    assert len(quick.out) < 40, "it waited until the other one was done"
    drive(loop, {})
    assert [row.out for row in (slow, quick)] == [solo_greedy(model, row.prompt.ids, 60) for row in (slow, quick)]
    assert_idle(loop)


def test_a_reader_that_stands_still_has_its_time_and_each_time_all_of_it() -> None:
    clock = Clock()
    loop = make_loop(MODEL, park_above=4, park_below=1, park_limit_seconds=100.0, clock=clock)
    slow, quick = make_row(tokens(60, seed=1), 200), make_row(tokens(70, seed=2), 400)
    backlog(slow, 5)
    drive(loop, {0: [slow, quick]}, until=lambda: slow in loop.parked)
    for _ in range(2):
        clock.advance(90)
        said = len(quick.out)
        drive(loop, {}, until=lambda said=said: len(quick.out) == said + 5)
        assert slow in loop.parked
        backlog(slow, 0)
        said = len(slow.out)
        drive(loop, {}, until=lambda said=said: len(slow.out) == said + 3)
        backlog(slow, 5)
        drive(loop, {}, until=lambda: slow in loop.parked)
    clock.advance(101)
    drive(loop, {}, until=lambda: slow.ended)
    assert not quick.ended
    end = end_of(slow)
    assert isinstance(end, Failed)
    assert "did not read" in end.error.message
    assert slow.out == solo_greedy(MODEL, slow.prompt.ids, 200)[: len(slow.out)]
    quick.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert_idle(loop)


# --- what is told and asked


def test_the_ids_of_an_answer_are_told_once_however_it_ends(model: LoadedModel) -> None:
    told: list[Row] = []
    loop = make_loop(model, remember=told.append)
    left, stays = make_row(tokens(60, seed=1), 30, (20,)), make_row(tokens(70, seed=2), 8, (20,))
    drive(loop, {0: [left, stays]}, until=lambda: len(left.out) == 3)
    left.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert (len(left.out), len(stays.out)) == (3, 8)
    assert sorted(told, key=lambda row: row.id) == sorted([left, stays], key=lambda row: row.id)


def test_the_ids_of_an_answer_that_had_not_begun_are_not_told(model: LoadedModel) -> None:
    told: list[Row] = []
    loop = make_loop(model, remember=told.append)
    row = make_row(tokens(300, seed=1), 30, (20,))
    drive(loop, {0: [row]}, until=lambda: row.position >= 128)
    row.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert told == []


def test_a_row_that_must_wait_for_memory_is_looked_up_once_until_something_changes() -> None:
    looked_up: list[int] = []
    loop = make_loop(MODEL, budget=600 * 1024)
    lookup = loop.pool.lookup

    def counted(ids: Any, *more: Any) -> Any:
        looked_up.append(len(ids))
        return lookup(ids, *more)

    loop.pool.lookup = counted  # type: ignore[method-assign]
    runs, waits = make_row(tokens(50, seed=1), 60), make_row(tokens(333, seed=2), 5)
    for row in (runs, waits):
        row.projected_bytes = 400 * 1024
    drive(loop, {0: [runs]}, until=lambda: len(runs.out) == 5)
    drive(loop, {0: [waits]}, until=lambda: len(runs.out) == 55)
    assert waits in loop.waiting
    assert looked_up.count(333) == 1
    drive(loop, {})
    assert waits.out == solo_greedy(MODEL, waits.prompt.ids, 5)


# --- what a second reading counts


def test_the_counts_of_a_prompt_are_those_of_its_first_whole_reading(model: LoadedModel) -> None:
    ids = np.concatenate([tokens(150, seed=1), tokens(100, seed=2)])
    counts: dict[int, tuple[int, int]] = {}
    for call in (2, 4, 7, 11):
        faulty: Any = FailingModel(model, set())
        loop = make_loop(faulty)
        run(loop, make_row(ids[:150], 2, (100,)))
        faulty.calls, faulty._fails = 0, {call}
        row = make_row(ids, 8, (100, 247))
        run(loop, row)
        assert loop.counters.rebuilds == 1
        assert row.out == solo_greedy(model, ids, 8)
        usage = end_of(row).usage  # type: ignore[union-attr]
        assert usage.cached_tokens == row.cached_tokens
        assert row.cached_tokens + row.prefilled_tokens == len(ids), f"pass {call}"
        counts[call] = (row.cached_tokens, row.prefilled_tokens)
    assert counts[11] == (100, 150), "once the answer has begun, what is read again is no part of its prompt's reading"


# --- forced tokens


class Says:
    """A constraint that forces stretches of tokens, and is told each once and in order."""

    def __init__(self, stretches: Mapping[int, Sequence[int]]) -> None:
        self._stretches, self._taken = stretches, list[int]()

    def stopped(self) -> bool:
        return False

    def forced(self) -> list[int]:
        place = len(self._taken)
        within = (stretch[place - start :] for start, stretch in self._stretches.items() if 0 <= place - start < len(stretch))
        return list(next(within, ()))

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 0xFFFFFFFF

    def consume(self, token: int) -> None:
        assert token in self.forced()[:1] or not self.forced(), "a forced token was left out"
        self._taken.append(token)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in a batch"])
def test_forced_tokens_are_said_once_whatever_fails_between_them(company: bool) -> None:
    def forced_row() -> Row:
        constraint: Any = Says({3: (7, 8, 9, 10), 12: (20, 21, 22)})
        return make_row(tokens(60, seed=1), 18, constraint=constraint)

    plain = forced_row()
    run(make_loop(MODEL), plain)
    assert (plain.out[3:7], plain.out[12:15]) == ([7, 8, 9, 10], [20, 21, 22])
    for call in range(1, 24):
        faulty: Any = FailingModel(MODEL, set())
        loop = make_loop(faulty)
        row, other = forced_row(), make_row(tokens(70, seed=2), 60)
        drive(loop, {0: [other, row] if company else [row]}, until=lambda row=row: len(row.out) >= 1)
        faulty.calls, faulty._fails = 0, {call}
        drive(loop, {})
        assert isinstance(end_of(row), Finished), end_of(row)
        assert row.out == plain.out, f"pass {call}"
        assert texts_of(row) == len(plain.out)


# --- logits that are no numbers


class Bad(ModelProxy):
    """Writes `value` into the logits of ids `start`..`end` in every pass that reads `ids` tokens at once."""

    def __init__(self, start: int, end: int, value: float) -> None:
        super().__init__(MODEL)
        self._place, self._value = slice(start, end), value

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits = super().forward(ids, cache)
        logits[..., self._place] = self._value
        return logits


def test_one_number_that_is_none_among_good_ones_ends_the_answer() -> None:
    ids = tokens(60, seed=1)
    unlikely = next(token for token in range(400) if token not in solo_greedy(MODEL, ids, 5))
    for value in (float("nan"), float("inf")):
        model: Any = Bad(unlikely, unlikely + 1, value)
        row = make_row(ids, 5)
        run(make_loop(model), row)
        assert isinstance(end_of(row), Failed)
        assert row.out == []
    model = Bad(unlikely, unlikely + 1, -float("inf"))
    row = make_row(ids, 5)
    run(make_loop(model), row)
    assert row.out == solo_greedy(MODEL, ids, 5), "some models rule tokens out like this"


def test_what_stands_beside_the_known_tokens_is_never_looked_at() -> None:
    """The vocabulary is padded: what a model gives for ids without a meaning says nothing."""
    ids = tokens(60, vocab=400, seed=1)
    clean: Any = Bad(400, 512, -float("inf"))
    expected = make_row(ids, 12)
    run(make_loop(clean), expected)
    for value in (float("nan"), float("inf"), 1e9):
        model: Any = Bad(400, 512, value)
        rows = [make_row(ids, 12), make_row(tokens(50, vocab=400, seed=2), 20)]
        run(make_loop(model, known_tokens=400), *rows)
        assert isinstance(end_of(rows[0]), Finished)
        assert rows[0].out == expected.out
        assert max(rows[1].out) < 400
