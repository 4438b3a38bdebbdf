"""Many mixed requests, a third of them cut off: afterwards nothing is left. The long form is `make soak`."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel, memory_now, mx
from tests.engine.harness import drive, drop_slack, make_loop, make_row
from tests.tiny_models import ARCHITECTURES, tokens

MIB = 1024 * 1024
REQUESTS, BATCH = 60, 15


def draw(luck: random.Random) -> Row:
    """A prompt that shares its beginning with others, greedy or sampled."""
    shared = tokens(luck.choice((0, 40, 130)), seed=luck.randrange(3))
    own = tokens(luck.choice((5, 60, 150)), seed=100 + luck.randrange(20))
    ids = np.concatenate([shared, own])
    rule = SamplingParameters() if luck.random() < 0.5 else SamplingParameters(temperature=0.9, seed=luck.randrange(99))
    return make_row(ids, luck.choice((1, 8, 30)), (len(shared),), sampling=rule)


def run_batch(loop: Loop, luck: random.Random) -> list[Row]:
    """`BATCH` rows that arrive one after the other; every third client goes away at some turn of the loop."""
    rows = [draw(luck) for _ in range(BATCH)]
    arrivals = {2 * index: [row] for index, row in enumerate(rows)}
    leaving = {2 * index + luck.randrange(1, 25): row for index, row in enumerate(rows) if index % 3 == 2}
    turns = 0

    def cut_off() -> bool:
        nonlocal turns
        row = leaving.get(turns)
        if row is not None:
            row.channel.cancelled = True
        turns += 1
        return False

    drive(loop, arrivals, until=cut_off)
    return rows


def emptied(loop: Loop) -> int:
    """Empty the pool; bytes that MLX still holds."""
    drop_slack(loop)
    loop.pool.clear()
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return memory_now().active


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gemma3"])
def test_nothing_is_left_of_many_requests(name: str) -> None:
    model: LoadedModel = ARCHITECTURES[name]()
    loop = make_loop(model, budget=2 * MIB)
    luck = random.Random(5)
    run_batch(loop, luck)
    before = emptied(loop)
    ends = {"finished": 0, "cut off": 0}
    gone: list[weakref.ref[Any]] = []
    for _ in range(REQUESTS // BATCH):
        rows = run_batch(loop, luck)
        for row in rows:
            end = row.channel.end  # type: ignore[attr-defined]
            assert isinstance(end, Failed) == row.cancelled or isinstance(end, Finished)
            ends["cut off" if isinstance(end, Failed) else "finished"] += 1
        gone += [weakref.ref(row.channel) for row in rows]
        del rows, row, end
        assert (loop.running, list(loop.waiting), loop.batches, loop.parked) == ([], [], [], [])
        assert loop.ledger.live_bytes == 0
        assert all(segment.leases == 0 and segment.tips == 0 for segment in loop.pool.segments())
        assert loop.pool.used_bytes <= loop.pool.budget_bytes
    assert ends["cut off"] >= REQUESTS // 6
    assert ends["finished"] >= REQUESTS // 2
    assert loop.counters.failures == 0
    assert loop.pool.counters["hits"] > 0
    after = emptied(loop)
    assert (loop.pool.segment_bytes, list(loop.pool.segments())) == (0, [])
    assert abs(after - before) <= MIB
    assert [reference for reference in gone if reference() is not None] == []
