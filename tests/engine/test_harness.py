"""The harness itself: what the loop's tests see does not depend on how fast the machine is."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pooled_mlx.runner.model import mx
from tests.engine.harness import ModelProxy, drive, make_loop, make_row
from tests.tiny_models import llama, tokens

MODEL = llama()
SHARED = tokens(130, seed=50)


class Passes(ModelProxy):
    """Notes the shape of every pass: how many rows in it, how many tokens of each."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.shapes.append(ids.shape)
        return super().forward(ids, cache)


def passes() -> list[tuple[int, ...]]:
    """The passes of rows that arrive while others are read and written."""
    sizes = ((91, 6), (77, 25), (68, 14), (100, 9))
    rows = [make_row(np.concatenate([SHARED, tokens(size, seed=size)]), most, (130,)) for size, most in sizes]
    model: Any = Passes()
    drive(make_loop(model), {0: [rows[0]], 2: [rows[1]], 9: [rows[2], rows[3]]})
    return model.shapes


def stumbling(seed: int) -> Callable[[], float]:
    """A clock as a busy machine's: between two looks at it a microsecond has passed, or a second."""
    draw = random.Random(seed)
    readings = itertools.accumulate(draw.choice((1e-6, 1e-3, 1.0)) for _ in itertools.count())
    return lambda: next(readings)


@pytest.mark.parametrize("seed", range(5))
def test_the_schedule_is_the_same_on_a_machine_that_stumbles(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = passes()
    assert {rows for rows, _ in expected} >= {1, 2, 3}, "rows join one another"
    with monkeypatch.context() as patch:
        for name in ("perf_counter", "monotonic"):
            patch.setattr(time, name, stumbling(seed))
        seen = passes()
    assert seen == expected
