"""The loop on tiny models of every cache class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.errors import ErrorKind
from pooled_mlx.core.events import Failed, Finished, Prefill, Queued, Text
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.ledger import stored_of
from pooled_mlx.engine.row import Row, Stage
from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine.harness import ModelProxy, assert_idle, drive, drop_slack, make_loop, make_row, run, solo_greedy
from tests.tiny_models import ARCHITECTURES, tokens

_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    name = request.param
    if name not in _models:
        _models[name] = ARCHITECTURES[name]()
    return _models[name]


@pytest.fixture
def hybrid() -> LoadedModel:
    if "qwen3_5_moe" not in _models:
        _models["qwen3_5_moe"] = ARCHITECTURES["qwen3_5_moe"]()
    return _models["qwen3_5_moe"]


PROMPTS = [tokens(length, seed=length) for length in (150, 31, 77, 10)]


@pytest.mark.parametrize("arrival", [{0: (0, 1, 2, 3)}, {0: (0,), 3: (1,), 9: (2,), 20: (3,)}], ids=["together", "staggered"])
def test_batch_rows_equal_solo_greedy(model: LoadedModel, arrival: dict[int, tuple[int, ...]]) -> None:
    solo = [solo_greedy(model, prompt, 24) for prompt in PROMPTS]
    rows = [make_row(prompt, 24, (20, 100)) for prompt in PROMPTS]
    drive(make_loop(model), {turn: [rows[index] for index in indices] for turn, indices in arrival.items()})
    assert [row.out for row in rows] == solo
    for row in rows:
        assert isinstance(row.channel.end, Finished)  # type: ignore[attr-defined]


def test_rows_of_other_sizes_do_not_share_a_padded_batch(hybrid: LoadedModel) -> None:
    long, short = make_row(tokens(900, seed=9), 40), make_row(tokens(12, seed=8), 20)
    loop = make_loop(hybrid)
    widths: list[int] = []
    drive(loop, {0: [long, short]}, until=lambda: widths.append(max((len(g.rows) for g in loop.batches), default=0)) or False)
    assert max(widths) == 1
    assert long.out == solo_greedy(hybrid, long.prompt.ids, 40)
    assert short.out == solo_greedy(hybrid, short.prompt.ids, 20)


def test_a_seeded_row_draws_the_same_alone_and_in_company(model: LoadedModel) -> None:
    rule = SamplingParameters(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=11)
    alone, company = (make_row(PROMPTS[1], 25, sampling=rule) for _ in range(2))
    run(make_loop(model), alone)
    other = make_row(PROMPTS[2], 30, sampling=SamplingParameters(temperature=1.2, seed=5))
    drive(make_loop(model), {0: [make_row(PROMPTS[0], 40), company], 5: [other]})
    assert alone.out == company.out
    assert len(set(alone.out)) > 5


def test_the_end_token_ends_the_answer_and_is_in_the_cache(hybrid: LoadedModel) -> None:
    plain = solo_greedy(hybrid, PROMPTS[0], 12)
    eos = plain[6]
    row = make_row(PROMPTS[0], 12, (100,), eos=(eos,))
    loop = make_loop(hybrid)
    run(loop, row)
    assert row.out == plain[: plain.index(eos) + 1]
    assert row.channel.end.reason == "stop"  # type: ignore[attr-defined]
    assert max(segment.end for segment in loop.pool.segments()) == len(PROMPTS[0]) + len(row.out)


def test_a_later_turn_goes_on_from_the_answer(model: LoadedModel) -> None:
    loop = make_loop(model)
    first = make_row(PROMPTS[0], 20, (100,))
    run(loop, first)
    longer = np.concatenate([PROMPTS[0], np.array(first.out, np.uint32), tokens(50, seed=3)])
    second = make_row(longer, 20, (100, 170))
    run(loop, second)
    assert second.cached_tokens == 170
    assert second.prefilled_tokens == 50
    assert second.out == solo_greedy(model, longer, 20)


def test_usage_counts_what_the_model_really_read(model: LoadedModel) -> None:
    loop = make_loop(model)
    ids = tokens(300, seed=4)
    for _ in range(2):
        row = make_row(ids, 5, (100, 200))
        run(loop, row)
        usage = row.channel.end.usage  # type: ignore[attr-defined]
        assert usage.prompt_tokens == 300
        assert usage.completion_tokens == 5
        assert usage.cached_tokens + row.prefilled_tokens == 300
    assert usage.cached_tokens >= 200


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_cancel_frees_everything_at_every_stage(model: LoadedModel, stage: str) -> None:
    loop = make_loop(model, max_running=1)
    blocker = make_row(PROMPTS[1], 8)
    victim = make_row(tokens(400, seed=6), 200, (100,))
    follower = make_row(PROMPTS[2], 10)

    def cancel_when_there() -> bool:
        there = {
            "queued": victim in loop.waiting,
            "prefill": victim.position > 100 and victim.stage is not Stage.WRITING,
            "decode": len(victim.out) > 5,
        }
        if there[stage]:
            victim.channel.cancelled = True
        return victim.channel.cancelled

    drive(loop, {0: [blocker, victim, follower]}, until=cancel_when_there)
    read = victim.prefilled_tokens
    made = len(victim.out)
    drive(loop, {})
    assert victim.prefilled_tokens == read
    assert len(victim.out) == made
    assert follower.out == solo_greedy(model, PROMPTS[2], 10)
    assert_idle(loop)


def test_a_cancelled_prefill_is_continued_by_the_retry(model: LoadedModel) -> None:
    loop = make_loop(model, spacing=128)
    ids = tokens(600, seed=7)
    first = make_row(ids, 5)
    drive(loop, {0: [first]}, until=lambda: first.position >= 384)
    first.channel.cancelled = True
    drive(loop, {})
    retry = make_row(ids, 12)
    run(loop, retry)
    assert retry.cached_tokens == 384
    assert retry.out == solo_greedy(model, ids, 12)


class FailingModel(ModelProxy):
    """Raises in chosen forward passes of more than one row of work (the reset's own probe has one token)."""

    def __init__(self, model: LoadedModel, fails: set[int], *, probe_fails: bool = False) -> None:
        super().__init__(model)
        self._fails, self._probe_fails = fails, probe_fails
        self.calls = 0

    def forward(self, ids: mx.array, cache: list) -> mx.array:
        if ids.shape == (1, 1) and int(ids[0, 0].item()) == 0 and cache[-1].empty():
            if self._probe_fails and self.calls >= min(self._fails):
                raise RuntimeError("injected: the device is gone")
            return self._model.forward(ids, cache)
        self.calls += 1
        if self.calls in self._fails:
            raise RuntimeError("injected")
        return self._model.forward(ids, cache)


def test_an_engine_fault_once_costs_nobody_the_answer(model: LoadedModel) -> None:
    for call in (1, 2, 3, 9, 15):
        faulty = FailingModel(model, {call})
        loop = make_loop(faulty)  # type: ignore[arg-type]
        rows = [make_row(prompt, 12, (20,)) for prompt in PROMPTS[:3]]
        run(loop, *rows)
        assert [row.out for row in rows] == [solo_greedy(model, prompt, 12) for prompt in PROMPTS[:3]]
        assert loop.counters.failures == 1


def test_a_fault_at_every_step_ends_each_request_once(model: LoadedModel) -> None:
    loop = make_loop(FailingModel(model, set(range(1, 10_000))))  # type: ignore[arg-type]
    rows = [make_row(prompt, 12) for prompt in PROMPTS]
    turns = drive(loop, {0: rows})
    for row in rows:
        end = row.channel.end  # type: ignore[attr-defined]
        assert isinstance(end, Failed)
        assert end.error.kind is ErrorKind.ENGINE_FAILED
    assert turns < 40
    assert_idle(loop)


def test_nan_logits_end_only_their_row(model: LoadedModel) -> None:
    from pooled_mlx.replay.faults import Faults

    for at in (0, 7):
        loop = make_loop(model)
        sick = make_row(PROMPTS[0], 20, fault=Faults("nan", at))
        healthy = make_row(PROMPTS[1], 20)
        run(loop, sick, healthy)
        end = sick.channel.end  # type: ignore[attr-defined]
        assert isinstance(end, Failed)
        assert len([event for event in sick.channel.events if isinstance(event, Text)]) == at  # type: ignore[attr-defined]
        assert healthy.out == solo_greedy(model, PROMPTS[1], 20)
        assert loop.counters.not_finite == 1
        assert not [segment for segment in loop.pool.segments() if segment.kind == "answer" and segment.end > 150]


def test_a_poisoned_state_is_dropped_and_read_again(hybrid: LoadedModel) -> None:
    loop = make_loop(hybrid)
    ids = tokens(300, seed=12)
    run(loop, make_row(ids, 5, (100, 200)))
    drop_slack(loop)
    poisoned = 0
    runner: Any = loop.runner
    for segment in loop.pool.segments():
        for layer in runner._states[stored_of(segment).state].layers:
            if layer is not None:
                layer[1] = layer[1] + float("nan")
                poisoned += 1
    assert poisoned
    row = make_row(ids, 10, (100, 200))
    run(loop, row)
    assert row.out == solo_greedy(hybrid, ids, 10)
    assert row.cached_tokens == 0


def test_a_slow_reader_is_parked_and_resumes_with_the_same_answer(model: LoadedModel) -> None:
    loop = make_loop(model, park_above=4, park_below=1)
    slow, quick = make_row(PROMPTS[0], 30), make_row(PROMPTS[1], 40)

    def read_slowly() -> bool:
        slow.channel.backlog = 5 if len(slow.out) == 10 and not quick.ended else 0  # type: ignore[misc]
        return False

    drive(loop, {0: [slow, quick]}, until=read_slowly)
    assert slow.out == solo_greedy(model, PROMPTS[0], 30)
    assert quick.out == solo_greedy(model, PROMPTS[1], 40)


def test_an_answer_that_ended_at_the_parking_limit_is_kept(model: LoadedModel) -> None:
    """Its reader gave up, but what was said was computed: a client that sends it back goes on from it."""
    remembered: list[Row] = []
    loop = make_loop(model, park_above=4, park_below=1, park_limit_seconds=0.0, remember=remembered.append)
    row = make_row(PROMPTS[2], 40, (20,))
    row.channel.backlog = 5  # type: ignore[misc]
    run(loop, row)
    assert isinstance(row.channel.end, Failed)
    assert row.out
    said = np.concatenate([PROMPTS[2], np.array(row.out, np.uint32)])
    again = make_row(np.concatenate([said, tokens(30, seed=9)]), 3, (20, len(said)))
    run(loop, again)
    assert again.cached_tokens >= len(said) - 1
    assert remembered[0] is row


def test_a_short_prompt_overtakes_a_long_one_which_still_ends(hybrid: LoadedModel) -> None:
    loop = make_loop(hybrid, max_running=3)
    long, short = make_row(tokens(1500, seed=2), 5), make_row(tokens(40, seed=3), 5)
    drive(loop, {0: [long], 2: [short]})
    assert short.times.first_token < long.times.first_token
    assert long.out == solo_greedy(hybrid, long.prompt.ids, 5)


def test_a_running_stream_waits_for_at_most_one_piece(hybrid: LoadedModel) -> None:
    loop = make_loop(hybrid)
    stream = make_row(PROMPTS[1], 200)
    drive(loop, {0: [stream]}, until=lambda: len(stream.out) == 5)
    pieces_between: list[int] = []
    seen = [len(stream.out), loop.counters.pieces]

    def watch() -> bool:
        if len(stream.out) > seen[0]:
            pieces_between.append(loop.counters.pieces - seen[1])
            seen[:] = [len(stream.out), loop.counters.pieces]
        return False

    drive(loop, {0: [make_row(tokens(1000, seed=5), 3)]}, until=watch)
    assert max(pieces_between) == 1
    assert sum(pieces_between) >= 15


def test_twins_wait_for_the_shared_prefill(model: LoadedModel) -> None:
    loop = make_loop(model, spacing=128)
    shared = tokens(500, seed=21)
    twins = [make_row(np.concatenate([shared, tokens(20, seed=seed)]), 6, (500,)) for seed in (1, 2)]
    run(loop, *twins)
    assert loop.counters.prefilled_tokens <= 500 + 2 * 20 + 64
    for twin in twins:
        assert twin.out == solo_greedy(model, twin.prompt.ids, 6)


def test_queue_events_and_progress(hybrid: LoadedModel) -> None:
    loop = make_loop(hybrid, max_running=1)
    rows = [make_row(tokens(130, seed=index), 4) for index in range(3)]
    run(loop, *rows)
    events = rows[2].channel.events  # type: ignore[attr-defined]
    assert events[0] == Queued(2)
    assert Queued(0) in events
    progress = [event for event in events if isinstance(event, Prefill)]
    assert progress[0] == Prefill(0, 130, 0)
    assert progress[-1].done == 130


class Watched(ModelProxy):
    """Notes how much of a row's answer was out at every pass that took one token."""

    def __init__(self, model: LoadedModel, row: Row) -> None:
        super().__init__(model)
        self._row = row
        self.reported: list[int] = []

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        if ids.shape[1] == 1 and self._row.stage is Stage.WRITING:
            self.reported.append(len(self._row.out))
        return super().forward(ids, cache)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
def test_a_first_token_does_not_wait_for_the_pass_after_it(hybrid: LoadedModel, company: bool) -> None:
    other, row = make_row(PROMPTS[0], 40), make_row(PROMPTS[2], 12)
    watched = Watched(hybrid, row)
    drive(make_loop(watched), {0: [other], 8: [row]} if company else {0: [row]})
    assert watched.reported[:4] == [1, 1, 2, 3], "the first token, and then one pass is queued before a token is read"
    assert row.out == solo_greedy(hybrid, PROMPTS[2], 12)
    assert not company or other.out == solo_greedy(hybrid, PROMPTS[0], 40)
