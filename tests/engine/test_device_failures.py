"""When the device itself fails: a second try, shorter pieces after the second failure within a minute, an exact pool."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pooled_mlx.core.cuts import LEAST_STEP, CutRule
from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel
from pooled_mlx.runner.runner import MlxRunner
from tests.counting_runner import CountingRunner, answer
from tests.engine.harness import assert_idle, first_logits, loop_on, make_row, run, solo_greedy
from tests.pool_fakes import Clock
from tests.tiny_models import ARCHITECTURES, tokens

RULE = CutRule(256, 1024, 64, ((512, 128),))
METAL = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pooled.engine"), "disabled", True)


class Device:
    """Fails in the next `due` commands of these names."""

    def __init__(self, *names: str, message: str = "the device failed") -> None:
        self.names, self.message, self.due = names, message, 0

    def __call__(self, command: str) -> None:
        if command in self.names and self.due:
            self.due -= 1
            raise RuntimeError(self.message)


def counting(device: Device, clock: Clock, divisible: bool = False) -> Loop:
    return loop_on(CountingRunner(divisible=divisible, fail=device), RULE, clock=clock, token_bytes=64)


def says(row: Row) -> bool:
    return row.out == answer(row.prompt.ids.tolist(), row.max_tokens)


@pytest.mark.parametrize(
    ("message", "is_device"),
    [
        (METAL, True),
        (
            "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUError)",
            True,
        ),
        ("[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed buffer size", True),
        ("[malloc_or_wait] Unable to allocate 99 bytes.", True),
        ("[reshape] Cannot reshape array of size 3 into shape (2)", False),
    ],
)
def test_which_errors_are_the_device_s(message: str, is_device: bool) -> None:
    runner = MlxRunner(ARCHITECTURES["llama"]())
    assert runner.device_failed(RuntimeError(message)) is is_device
    assert not runner.device_failed(ValueError(message))


def test_the_rule_is_halved_down_to_a_sensible_piece() -> None:
    assert RULE.halved() == CutRule(128, 1024, 64, ((512, 64),))
    rule, steps = CutRule(2048, 8192), list[int]()
    while (halved := rule.halved()) != rule:
        rule = halved
        steps.append(rule.step)
    assert steps == [1024, 512, 256, 128, 64, LEAST_STEP]
    assert CutRule(100, 400, 64, ((200, 25),)).halved().step == 100


@pytest.mark.parametrize("command", ["read", "step"])
def test_one_failure_changes_nothing(command: str) -> None:
    device = Device(command)
    loop = counting(device, Clock())
    device.due = 1
    row = make_row(tokens(300, seed=1), 6, (200,))
    run(loop, row)
    assert says(row)
    assert loop.pool.rule == RULE
    assert (loop.counters.device_failures, loop.counters.halved) == (1, 0)


def test_two_within_a_minute_halve_the_pieces_and_empty_the_pool() -> None:
    device, clock = Device("read"), Clock()
    loop = counting(device, clock)
    before = make_row(tokens(300, seed=2), 4, (200,))
    run(loop, before)
    stored = loop.pool.lookup(np.append(before.ids, 1)).tokens
    key = loop.pool.root.key
    device.due = 2
    row = make_row(tokens(300, seed=1), 6, (200,))
    run(loop, row)
    assert isinstance(row.channel.end, Failed)  # type: ignore[attr-defined]
    assert "failed at this step: the device failed" in row.channel.end.error.message  # type: ignore[attr-defined]
    assert loop.pool.rule == RULE.halved()
    assert loop.pool.root.key != key
    assert stored > 200
    assert loop.pool.lookup(np.append(before.ids, 1)).tokens == 0
    again = make_row(before.prompt.ids, 4, (200,))
    run(loop, again)
    assert says(again)
    assert again.cached_tokens == 0
    assert_idle(loop)


def test_failures_that_are_far_apart_do_not_add_up() -> None:
    device, clock = Device("read"), Clock()
    loop = counting(device, clock)
    for seed in range(4):
        device.due = 1
        row = make_row(tokens(300, seed=seed), 6, (200,))
        run(loop, row)
        assert says(row)
        clock.advance(61)
    assert loop.pool.rule == RULE
    assert loop.counters.device_failures == 4


def test_other_errors_do_not_count() -> None:
    device = Device("read", message="something else")
    loop = counting(device, Clock())
    for seed in range(3):
        device.due = 1
        run(loop, make_row(tokens(100, seed=seed), 6))
    assert loop.pool.rule == RULE
    assert loop.counters.device_failures == 0


@pytest.mark.parametrize("divisible", [True, False])
def test_rows_that_run_are_read_again_by_the_new_rule_and_say_the_same(divisible: bool) -> None:
    device, clock = Device("read"), Clock()
    loop = counting(device, clock, divisible)
    shared = tokens(300, seed=9)
    writing = [make_row(np.concatenate([shared, tokens(30 + 7 * seed, seed=seed)]), 60, (300,)) for seed in range(2)]
    parked = make_row(tokens(80, seed=5), 40)
    parked.channel.backlog = 10_000  # type: ignore[misc]
    reading = make_row(np.concatenate([shared, tokens(900, seed=7)]), 8, (300,))
    for row in (*writing, parked):
        loop.submit(row)
    while not all(len(row.out) > 3 for row in writing) or not loop.parked:
        loop.turn()
    loop.submit(reading)
    while reading.position < 600:
        loop.turn()
    device.due = 2
    hopeless = make_row(tokens(50, seed=11), 3)
    loop.submit(hopeless)
    for _ in range(3_000):
        if loop.counters.halved:
            parked.channel.backlog = 0  # type: ignore[misc]
        if not loop.busy:
            break
        loop.turn()
    assert loop.counters.halved == 1
    rows = [*writing, parked, reading, hopeless]
    failed = [row for row in rows if isinstance(row.channel.end, Failed)]  # type: ignore[attr-defined]
    assert len(failed) <= 1
    assert all(says(row) for row in rows if row not in failed)
    assert_idle(loop)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_after_it_warm_is_cold_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: LoadedModel = ARCHITECTURES[name]()
    rule = CutRule(64, 256, 16)

    def logits_of(loop: Loop, ids: np.ndarray, marks: tuple[int, ...]) -> tuple[Row, np.ndarray]:
        row = make_row(ids, 5, marks)
        kept = first_logits(loop, row)
        run(loop, row)
        assert isinstance(row.channel.end, Finished)  # type: ignore[attr-defined]
        return row, kept[0]

    loop = loop_on(MlxRunner(model), rule, clock=Clock())
    ids = tokens(330, seed=3)
    logits_of(loop, ids[:300], (70, 280))
    read: Any = loop.runner.read
    due = [2]

    def fails(*args: Any, **fields: Any) -> None:
        if due[0]:
            due[0] -= 1
            raise RuntimeError(METAL)
        read(*args, **fields)

    monkeypatch.setattr(loop.runner, "read", fails)
    run(loop, make_row(tokens(90, seed=8), 4))
    assert loop.pool.rule.step == 32
    first, _ = logits_of(loop, ids[:300], (70, 280))
    warm, of_warm = logits_of(loop, ids, (70, 280))
    _, of_cold = logits_of(loop_on(MlxRunner(model), rule.halved(), clock=Clock()), ids, (70, 280))
    assert first.cached_tokens == 0
    assert warm.cached_tokens >= 280
    assert np.array_equal(of_warm, of_cold)
    assert first.out == solo_greedy(model, ids[:300], 5)
