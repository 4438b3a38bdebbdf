"""Choosing the step: measured within seconds on any machine, on pieces like real ones, and changed between starts only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import GIB, DeviceFacts
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.runner.calibrate import (
    MOST_CALIBRATION_SECONDS,
    Behind,
    PieceTimes,
    longest_step,
    measure_step,
    store_step,
    stored_step,
)
from pooled_mlx.runner.layers import arrays_in, kind_of, layers_of
from pooled_mlx.runner.model import LoadedModel, _blas, mx, one_blas_thread
from pooled_mlx.runner.runner import MlxRunner
from pooled_mlx.runner.start import MlxSource
from tests.engine.harness import ModelProxy
from tests.tiny_models import ARCHITECTURES, llama, tokens

MODEL = llama()


class Machine:
    """A clock that goes on by what pieces take: `seconds(tokens, calls)` of the call with that number."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.now, self.pieces, self._seconds = 50.0, list[int](), seconds

    def clock(self) -> float:
        return self.now

    def run(self, tokens: int) -> None:
        self.pieces.append(tokens)
        self.now += self._seconds(tokens, len(self.pieces))

    def step(self, model: LoadedModel = MODEL) -> int:
        return measure_step(model, 8192, self.clock, self.run)

    @property
    def spent(self) -> float:
        return self.now - 50.0


@pytest.mark.parametrize(
    ("rate", "step"), [(100, 128), (260, 128), (520, 256), (1030, 512), (2100, 1024), (4100, 2048), (100_000, 2048)]
)
def test_the_longest_piece_that_takes_half_a_second(rate: float, step: int) -> None:
    machine = Machine(lambda tokens, calls: tokens / rate)
    assert machine.step() == step
    assert machine.spent <= MOST_CALIBRATION_SECONDS


@pytest.mark.parametrize("compile_seconds", [0.0, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("rate", [5, 20, 60, 300, 3000])
def test_a_start_never_waits_longer_than_three_seconds_and_what_it_began(rate: float, compile_seconds: float) -> None:
    """Nothing is begun that would end later; the very first piece, of 32 tokens, is the only one whose time nobody knows."""
    machine = Machine(lambda tokens, calls: tokens / rate + (compile_seconds if calls == 1 else 0.0))
    first = 32 / rate + compile_seconds
    step = machine.step()
    assert 128 <= step <= 2048
    assert machine.spent <= max(first, MOST_CALIBRATION_SECONDS) + 1e-6


def test_slow_kernels_at_first_say_nothing() -> None:
    assert Machine(lambda tokens, calls: tokens / 4100 + (1.0 if calls == 1 else 0.0)).step() == 2048


def test_a_machine_that_gets_busy_ends_it_with_a_guess() -> None:
    machine = Machine(lambda tokens, calls: tokens / 4000 + (1.4 if calls > 2 else 0.0))
    assert machine.step() == 128
    assert machine.spent <= MOST_CALIBRATION_SECONDS


def test_a_piece_that_does_not_run_ends_it_at_the_one_before() -> None:
    def seconds(tokens: int, calls: int) -> float:
        if tokens > 512:
            raise RuntimeError("no such buffer")
        return 0.001

    assert Machine(seconds).step() == 512


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_real_pieces_are_of_many_tokens_behind_a_filled_cache(name: str) -> None:
    seen: list[np.ndarray] = []

    class Watched(ModelProxy):
        def forward(self, ids: mx.array, cache: list[object]) -> mx.array:
            seen.append(np.array(ids))
            return super().forward(ids, cache)

    model = Watched(ARCHITECTURES[name]())
    behind = Behind(model, 1000)  # type: ignore[arg-type]
    layers = [layer for layer in layers_of(behind._cache) if kind_of(layer).cuttable]
    assert layers
    for _ in range(2):
        behind.read(64)
        assert {layer.offset for layer in layers} == {1000}
    assert all(np.array(arrays_in((layer.keys, layer.values))[0][..., 500:600, :]).std() > 0.1 for layer in layers)
    assert len(set(seen[-1].flatten().tolist())) > 40
    assert sum(ids.size for ids in seen) == 1 + 2 * 64, "nothing else is read"


def test_a_machine_on_which_one_token_takes_a_second_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now, read = [0.0], list[int]()

    def slow(self: Behind, tokens: int) -> None:
        read.append(tokens)
        now[0] += 1.2

    monkeypatch.setattr(Behind, "read", slow)
    assert measure_step(MODEL, 0, lambda: now[0]) == 128
    assert read == [1]


def test_the_step_of_a_load_runs_on_one_blas_thread() -> None:
    threads = [library.openblas_get_num_threads() for library in _blas]
    with one_blas_thread():
        assert all(library.openblas_get_num_threads() == 1 for library in _blas)
    assert [library.openblas_get_num_threads() for library in _blas] == threads


def test_what_real_prompts_show_counts_from_a_factor_of_two_on() -> None:
    def after(seconds: float, pieces: int = 30) -> int | None:
        times = PieceTimes(512, 2048)
        for _ in range(pieces):
            times.add(512, seconds)
            times.add(100, 99.0)  # ends of prompts say nothing
        return times.better_step()

    assert after(0.45) is None
    assert after(0.26) is None
    assert after(0.24) == 1024
    assert after(0.01) == 2048
    assert after(0.51) == 256
    assert after(3.0) == 128
    assert after(0.01, pieces=19) is None


@pytest.mark.parametrize(
    ("seconds", "most", "step"), [(1.0, 2048, 128), (0.5 / 300, 2048, 256), (1e-6, 2048, 2048), (1e-6, 96, 96)]
)
def test_the_longest_step(seconds: float, most: int, step: int) -> None:
    assert longest_step(seconds, most) == step


def test_a_better_step_waits_for_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    steps = tmp_path / "cache" / "steps.json"
    facts = DeviceFacts("test", 4 * GIB)
    settings = EngineSettings(steps_file=steps)
    card = ModelCard(id="tiny", label="Tiny", folder=str(tmp_path), context_default=4096, context_max=4096)

    def load() -> tuple[MlxSource, int, PieceTimes]:
        source = MlxSource(lambda folder: MODEL, lambda: facts)
        loaded = source.load(card, tmp_path, settings, 512, lambda width: None)
        return source, loaded.rule.step, loaded.runner.times  # type: ignore[attr-defined]

    source, first, times = load()
    assert list(json.loads(steps.read_text()).values()) == [first]
    for _ in range(25):
        times.add(first, 5.0)
    assert first > 128
    source.leave()
    _, second, _ = load()
    assert second == 128
    assert stored_step(steps, "another", lambda: 256) == 256
    assert set(json.loads(steps.read_text()).values()) == {128, 256}


def test_a_step_that_cannot_be_stored_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store_step(tmp_path / "file" / "steps.json", "key", 256)
    assert "could not be stored" in caplog.text
    assert stored_step(tmp_path / "file" / "steps.json", "key", lambda: 512) == 512


def test_pieces_are_timed_where_they_are_read() -> None:
    times = PieceTimes(32, 2048)
    runner = MlxRunner(MODEL, None, times)
    cache = runner.open([], None, 100, {})
    for _ in range(3):
        runner.read(cache, tokens(32, seed=1), last=False)
    runner.read(cache, tokens(9, seed=1), last=True)
    assert len(times._seconds) == 3
    assert all(seconds > 0 for seconds in times._seconds)
