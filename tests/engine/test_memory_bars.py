"""What the books say is what MLX holds: walks on real caches, and what must not be copied or forgotten."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from pooled_mlx.core.memory import request_bytes
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.layers import arrays_in
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.runner import MlxRunner, measure_shape
from tests.engine.harness import assert_idle, make_loop, make_row, run
from tests.engine.walk import Step, Walk, check_rows, steps
from tests.tiny_models import ARCHITECTURES, tokens

LEEWAY_BYTES = 16 << 20
_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=["llama", "qwen3_5_moe", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured log records keep tracebacks, and these the arrays of the frames in them."""
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


def reachable_bytes(runner: MlxRunner) -> int:
    """Bytes of all arrays of caches and states, those that share their data once."""
    arrays = arrays_in([buffer.layers for buffer in runner._buffers.values()])
    arrays += arrays_in([state.layers for state in runner._states.values()])
    mx.eval(arrays)
    return sum({np.asarray(array).__array_interface__["data"][0]: array.nbytes for array in arrays}.values())


def test_the_books_are_what_mlx_holds_after_every_turn(model: LoadedModel) -> None:
    gc.collect()
    mx.clear_cache()
    weights = mx.get_active_memory()
    shape = measure_shape(model)
    turns: list[int] = []

    def check(walk: Walk) -> None:
        ledger, runner = walk.loop.ledger, walk.loop.runner
        assert isinstance(runner, MlxRunner)
        for number in ledger.caches:
            if not ledger._books[number].sealed:
                ledger.measure(number)
        held = reachable_bytes(runner)
        ids_bytes = sum(segment.ids.nbytes for segment in walk.loop.pool.segments())
        assert walk.loop.pool.used_bytes - ids_bytes == held
        assert mx.get_active_memory() <= weights + held + LEEWAY_BYTES

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(steps("cancel", "stall", "read on", "squeeze", "widen", "forget"))
    def walks(walk_steps: list[Step]) -> None:
        budget = 4 * request_bytes(shape, 400, 0)
        walk = Walk(MlxRunner(model), budget, shape.kv_bytes_per_token, request_bytes(shape, 0, 0), check)
        for step in walk_steps:
            walk.take(step)
        walk.finish()
        check_rows(walk, lambda row: row.out, may_fail=False)
        walk.loop.ledger.settle()
        assert_idle(walk.loop)
        turns.append(walk.turns)

    walks()
    assert sum(turns) >= 340, sum(turns)


def turn_after(row: Row, own: int, seed: int, **more: Any) -> Row:
    """The next turn of a conversation: all that was read and said, and `own` tokens more."""
    before = np.concatenate([row.prompt.ids, np.asarray(row.out, np.uint32)])
    return make_row(np.concatenate([before, tokens(own, seed=seed)]), 12, (len(before),), tools=True, **more)


def test_a_side_request_costs_the_conversation_before_it_no_copy(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(model)
    opened: list[str] = []
    for name in ("open", "reopen"):
        command = getattr(loop.runner, name)
        monkeypatch.setattr(
            loop.runner, name, lambda *args, name=name, command=command, **more: opened.append(name) or command(*args, **more)
        )
    first = make_row(tokens(300, seed=1), 12, (128, 299), tools=True, system_end=128)
    run(loop, first)
    side = make_row(np.concatenate([first.prompt.ids[:128], tokens(40, seed=2)]), 8, (128, 167), system_end=128)
    run(loop, side)
    assert opened == ["open", "open"]
    assert side.cached_tokens == 128
    following = turn_after(first, 30, 3)
    run(loop, following)
    assert opened == ["open", "open", "reopen"]
    assert following.cached_tokens == 312


def test_conversations_on_one_long_beginning_stay_warm_in_a_fifth_more_than_they_need(model: LoadedModel) -> None:
    shape = measure_shape(model)
    shared, own, count = 1536, 384, 8
    needed = shape.kv_bytes_per_token * (shared + count * own) + count * request_bytes(shape, 0, 0)
    loop = make_loop(model, budget=int(1.2 * needed), token_bytes=shape.kv_bytes_per_token, spacing=512)
    beginning = tokens(shared, seed=90)
    rows = [
        make_row(np.concatenate([beginning, tokens(own - 100, seed=number)]), 12, (shared,), tools=True, system_end=shared)
        for number in range(count)
    ]
    for row in rows:
        run(loop, row)
    for turn in (1, 2):
        for number, row in enumerate(rows):
            rows[number] = turn_after(row, 20, 100 * turn + number)
            run(loop, rows[number])
            before = len(row.prompt.ids) + len(row.out)
            assert rows[number].cached_tokens == before, f"turn {turn} of conversation {number}"
            assert loop.pool.used_bytes <= 1.2 * needed
    assert_idle(loop)
