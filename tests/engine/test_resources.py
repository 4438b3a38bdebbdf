"""What rows hold is given back whatever ends them, and the budget covers what is really in memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.errors import not_ready
from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.engine.loop import EngineDead, Loop
from pooled_mlx.engine.row import Row, Stage
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.layers import arrays_in
from pooled_mlx.runner.model import LoadedModel, mx, wrap_model
from pooled_mlx.runner.runner import measure_shape
from tests.engine.harness import (
    ModelProxy,
    PlainAnswer,
    assert_idle,
    drive,
    drop_slack,
    make_loop,
    make_row,
    reopenable,
    run,
    solo_greedy,
)
from tests.engine.test_loop import FailingModel
from tests.tiny_models import ARCHITECTURES, tokens

SLACK_BYTES = 16 * 1024
_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=["qwen3_5_moe", "llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured log records keep tracebacks, and these the arrays of the frames in them."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def slack_bytes(loop: Loop) -> int:
    """MLX does not copy a slice whose parent is at most 16 KiB larger: with arrays as small as here that adds up."""
    runner: Any = loop.runner
    parts = [[state.layers for state in runner._states.values()], [buffer.caches for buffer in runner._buffers.values()]]
    return SLACK_BYTES * (2 + len(arrays_in(parts)))


def active_bytes() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def cancel_when(row: Row, there: Callable[[], bool]) -> Callable[[], bool]:
    def check() -> bool:
        if there():
            row.channel.cancelled = True
        return row.channel.cancelled

    return check


def end_by_finishing(model: LoadedModel) -> Loop:
    loop = make_loop(model)
    run(loop, *(make_row(tokens(length, seed=length), 12, (20, 90)) for length in (150, 100, 30)))
    return loop


def end_by_cancel_in_decode(model: LoadedModel) -> Loop:
    loop = make_loop(model)
    rows = [make_row(tokens(length, seed=length), 40, (20, 90)) for length in (150, 100)]
    drive(loop, {0: rows}, until=cancel_when(rows[0], lambda: len(rows[0].out) > 3))
    drive(loop, {})
    return loop


def end_by_cancel_before_the_first_token(model: LoadedModel) -> Loop:
    loop = make_loop(model)
    row = make_row(tokens(150, seed=1), 40, (20, 90))
    drive(loop, {0: [row]}, until=cancel_when(row, lambda: row.stage is Stage.WRITING))
    drive(loop, {})
    return loop


def end_by_cancel_in_prefill(model: LoadedModel) -> Loop:
    loop = make_loop(model)
    row = make_row(tokens(500, seed=1), 40, (20, 90))
    drive(loop, {0: [row]}, until=cancel_when(row, lambda: row.position > 200))
    drive(loop, {})
    return loop


def end_by_cancel_while_parked(model: LoadedModel) -> Loop:
    loop = make_loop(model, park_above=4, park_below=1)
    rows = [make_row(tokens(length, seed=length), 40, (20, 90)) for length in (150, 100)]
    rows[0].channel.backlog = 5  # type: ignore[misc]
    drive(loop, {0: rows}, until=cancel_when(rows[0], lambda: rows[0] in loop.parked))
    drive(loop, {})
    return loop


def end_by_the_parking_limit(model: LoadedModel) -> Loop:
    loop = make_loop(model, park_above=4, park_below=1, park_limit_seconds=0.0)
    row = make_row(tokens(150, seed=1), 40, (20, 90))
    row.channel.backlog = 5  # type: ignore[misc]
    run(loop, row)
    return loop


def end_by_nan(model: LoadedModel) -> Loop:
    loop = make_loop(model)
    run(loop, make_row(tokens(150, seed=1), 12, (20, 90)))
    run(loop, *(make_row(tokens(150, seed=1), 12, (20, 90), fault=Faults("nan", at)) for at in (0, 5)))
    return loop


def end_by_exception_in_a_row(model: LoadedModel) -> Loop:
    loop = make_loop(model)
    run(loop, make_row(tokens(150, seed=1), 12, (20, 90), fault=Faults("raise", 5)), make_row(tokens(90, seed=2), 9))
    return loop


def end_after_one_failed_step(model: LoadedModel) -> Loop:
    loop = make_loop(FailingModel(model, {4}))  # type: ignore[arg-type]
    run(loop, *(make_row(tokens(length, seed=length), 12, (20, 90)) for length in (150, 100)))
    return loop


def end_by_failed_steps(model: LoadedModel) -> Loop:
    loop = make_loop(FailingModel(model, set(range(4, 10_000))))  # type: ignore[arg-type]
    run(loop, *(make_row(tokens(length, seed=length), 12, (20, 90)) for length in (150, 100)))
    return loop


def end_by_a_failed_reset(model: LoadedModel) -> Loop:
    loop = make_loop(FailingModel(model, {6}, probe_fails=True))  # type: ignore[arg-type]
    rows = [make_row(tokens(length, seed=length), 12, (20, 90)) for length in (150, 100)]
    with pytest.raises(EngineDead):
        run(loop, *rows)
    loop.abort(not_ready("gone"))
    return loop


def end_by_abort(model: LoadedModel) -> Loop:
    loop = make_loop(model, max_running=2)
    run(loop, make_row(tokens(80, seed=3), 4))
    rows = [make_row(tokens(length, seed=length), 40, (20, 90)) for length in (150, 100, 50)]
    drive(loop, {0: rows}, until=lambda: len(rows[0].out) > 3)
    loop.abort(not_ready("The server is shutting down."))
    assert all(isinstance(row.channel.end, Failed) for row in rows)  # type: ignore[attr-defined]
    return loop


ENDINGS = [value for name, value in list(globals().items()) if name.startswith("end_")]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_every_ending_gives_everything_back(model: LoadedModel, ending: Callable[[LoadedModel], Loop]) -> None:
    before = active_bytes()
    loop = ending(model)
    assert active_bytes() - before <= loop.pool.used_bytes + slack_bytes(loop)
    assert_idle(loop)
    assert active_bytes() - before <= loop.pool.segment_bytes + slack_bytes(loop)
    loop.pool.clear()
    assert active_bytes() - before <= SLACK_BYTES


def wide_llama(layers: int = 2) -> LoadedModel:
    """So much K/V a token that MLX's habit of not copying small slices does not show."""
    from mlx_lm.models import llama as family

    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "head_dim": 256,
    }
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 512, "rope_theta": 10000.0, **sizes}
    module = family.Model(family.ModelArgs.from_dict(config))
    mx.eval(module.parameters())
    return wrap_model(module, config)


@pytest.mark.parametrize("make", [wide_llama, ARCHITECTURES["qwen3_5_moe"]])
def test_memory_stays_inside_the_budget(make: Callable[[], LoadedModel]) -> None:
    """What is really allocated, the cache kept ready included, is what the pool counts and never above its budget."""
    model = make()
    shape = measure_shape(model)
    budget = 700 * shape.kv_bytes_per_token + 8 * shape.row_bytes
    before = active_bytes()
    loop = make_loop(model, budget=budget)
    history = tokens(40, seed=1)
    for turn in range(8):
        history = np.concatenate([history, tokens(60, seed=turn)])
        row = make_row(history, 8, (40, len(history) - 3))
        row.projected_bytes = shape.kv_bytes_per_token * (len(history) + 8) + 2 * shape.row_bytes
        other = make_row(tokens(120, seed=100 + turn), 4, (60,))
        other.projected_bytes = shape.kv_bytes_per_token * 124 + 2 * shape.row_bytes
        for request in (row, other):
            run(loop, request)
            assert isinstance(request.channel.end, Finished)  # type: ignore[attr-defined]
            assert loop.pool.used_bytes <= budget
            assert active_bytes() - before <= loop.pool.used_bytes + slack_bytes(loop)
    assert loop.pool.counters["hits"] >= 5
    assert any(name.startswith("evicted") for name in loop.pool.counters)


def test_a_long_conversation_is_in_memory_once_while_it_is_read_and_written() -> None:
    """Also where the cache that computed its beginning is gone, so that its segments are copied into a new one."""
    model = wide_llama(layers=8)
    token_bytes = measure_shape(model).kv_bytes_per_token
    history = tokens(600, seed=1)
    loop = make_loop(model, token_bytes=token_bytes)
    before = active_bytes()

    def peak_of(*rows: Row) -> float:
        """The peak while these rows run, in tokens of K/V."""
        active_bytes()
        mx.reset_peak_memory()
        for row in rows:
            row.projected_bytes = token_bytes * (len(row.prompt.ids) + row.max_tokens)
        run(loop, *rows)
        assert all(isinstance(row.channel.end, Finished) for row in rows)  # type: ignore[attr-defined]
        return (mx.get_peak_memory() - before) / token_bytes

    cold = make_row(history, 8, (40, 590))
    assert peak_of(cold) < 1.4 * 768
    history = np.concatenate([cold.ids[: cold.position], tokens(40, seed=2)])
    hot = make_row(history, 8, (40, 590, 640))
    assert peak_of(hot) < 1.4 * 768
    assert hot.cached_tokens >= 600
    run(loop, make_row(tokens(20, seed=3), 4))
    drop_slack(loop)
    history = np.concatenate([hot.ids[: hot.position], tokens(40, seed=4)])
    warm = make_row(history, 8, (40, 590, 640, 690))
    assert peak_of(warm) < 1.4 * 1024  # it must grow, and gets room for an eighth more than its 700 tokens
    assert warm.cached_tokens >= 640
    assert warm.out == solo_greedy(model, history, 8)
    assert_idle(loop)


@pytest.mark.parametrize(("budget_tokens", "widest"), [(3000, 2), (1300, 1)])
def test_rows_share_a_batch_only_where_their_copies_fit(budget_tokens: int, widest: int) -> None:
    model = wide_llama()
    token_bytes = measure_shape(model).kv_bytes_per_token
    loop = make_loop(model, budget=budget_tokens * token_bytes, token_bytes=token_bytes)
    rows = [make_row(tokens(400, seed=seed), 30, (100, 390)) for seed in (1, 2)]
    for row in rows:
        row.projected_bytes = token_bytes * 512
    widths = [0]
    drive(loop, {0: rows}, until=lambda: widths.append(max((len(g.rows) for g in loop.batches), default=0)) or False)
    assert max(widths) == widest
    assert [row.out for row in rows] == [solo_greedy(model, row.prompt.ids, 30) for row in rows]
    assert_idle(loop)


def test_a_request_does_not_evict_what_it_is_about_to_reuse(model: LoadedModel) -> None:
    shape = measure_shape(model)
    ids = tokens(400, seed=4)
    longer = np.concatenate([ids, tokens(40, seed=5)])
    size = shape.kv_bytes_per_token * (len(longer) + 30) + 2 * shape.row_bytes
    loop = make_loop(model, budget=size + 2 * shape.row_bytes + 10 * SLACK_BYTES)
    first, second = make_row(ids, 4, (100, 300)), make_row(longer, 4, (100, 300, 404))
    first.projected_bytes = second.projected_bytes = size
    run(loop, first)
    run(loop, second)
    assert second.cached_tokens >= 300
    assert second.out == solo_greedy(model, longer, 4)


def test_the_hot_cache_goes_with_its_leaf(model: LoadedModel) -> None:
    before = active_bytes()
    loop = make_loop(model)
    run(loop, make_row(tokens(150, seed=1), 12, (100,)))
    assert len(reopenable(loop)) == 1
    loop.pool.drop(loop.pool.leaves()[0], "test")
    other = make_row(tokens(50, seed=2), 200)
    drive(loop, {0: [other]}, until=lambda: len(other.out) == 2)
    assert reopenable(loop) == []
    assert other in loop.running
    loop.abort(not_ready("over"))
    loop.pool.clear()
    assert active_bytes() - before <= SLACK_BYTES


def test_a_budget_of_nothing_leaves_nothing(model: LoadedModel) -> None:
    before = active_bytes()
    loop = make_loop(model)
    run(loop, make_row(tokens(150, seed=1), 12, (100,)))
    loop.set_pool_budget(0)
    assert loop.pool.used_bytes == 0
    assert active_bytes() - before <= SLACK_BYTES
    row = make_row(tokens(150, seed=1), 5, (100,))
    row.projected_bytes = 1000
    run(loop, row)
    assert row.out == solo_greedy(model, row.prompt.ids, 5)
    assert loop.pool.segment_bytes == 0
    loop.set_pool_budget(1 << 30)
    again = make_row(tokens(150, seed=1), 5, (100,))
    run(loop, again, make_row(tokens(150, seed=1), 5, (100,)))
    assert loop.pool.segment_bytes > 0


def test_rows_whose_path_left_the_pool_keep_nothing_of_it(model: LoadedModel) -> None:
    before = active_bytes()
    loop = make_loop(model)
    rows = [make_row(tokens(length, seed=length), 20, (20, 90)) for length in (150, 100)]
    drive(loop, {0: rows}, until=lambda: len(rows[0].out) == 5 and len(rows[1].out) > 0)
    loop.pool.clear()
    drive(loop, {})
    assert [row.out for row in rows] == [solo_greedy(model, row.prompt.ids, 20) for row in rows]
    assert loop.pool.segment_bytes == 0
    assert_idle(loop)
    assert active_bytes() - before <= SLACK_BYTES


class StopsAt(PlainAnswer):
    """An answer that a stop string ends after so many tokens."""

    def __init__(self, count: int) -> None:
        self._left = count

    def feed(self, token: int) -> list:
        self._left -= 1
        if self._left == 0:
            self.stop = "stop"
        return super().feed(token)


def test_an_answer_that_ends_inside_a_forced_run_leaves_no_wrong_state(model: LoadedModel) -> None:
    loop = make_loop(model)
    ids, run_of_tokens = tokens(90, seed=4), tokens(12, seed=5).tolist()
    row = make_row(ids, 40, (80,), answer=StopsAt(5), forced=list(run_of_tokens))
    run(loop, row)
    assert row.out == run_of_tokens[:5]
    longer = np.concatenate([ids, np.array(row.out, np.uint32), tokens(20, seed=6)])
    warm = make_row(longer, 10, (80, len(ids) + 5))
    run(loop, warm)
    assert warm.out == solo_greedy(model, longer, 10)
    assert_idle(loop)


def test_a_long_forced_run_is_read_in_pieces(model: LoadedModel) -> None:
    widths: list[int] = []

    class Watched(ModelProxy):
        def forward(self, ids: mx.array, cache: list) -> mx.array:
            widths.append(ids.shape[1])
            return model.forward(ids, cache)

    loop = make_loop(Watched(model), step=16, minimum=8)  # type: ignore[arg-type]
    forced = tokens(100, seed=5).tolist()
    row = make_row(tokens(30, seed=4), 110, forced=list(forced))
    run(loop, row)
    assert row.out[:100] == forced
    assert max(widths) <= 16
    assert len(widths) < 40
