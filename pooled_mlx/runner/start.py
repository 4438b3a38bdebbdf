"""From a model folder to a runner that is ready: load, plan, limits, calibration, the test of the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import LARGEST_STEP, DeviceFacts, plan_memory, step_table
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.runner import Loaded
from pooled_mlx.runner.calibrate import PieceTimes, cut_rule, measure_step, store_step, stored_step
from pooled_mlx.runner.devices import process_bytes, read_device
from pooled_mlx.runner.fingerprint import files_key, fingerprint
from pooled_mlx.runner.model import LoadedModel, finish_work, has_metal, load, memory_now, one_blas_thread, set_limits
from pooled_mlx.runner.runner import MlxRunner, measure_shape
from pooled_mlx.runner.self_test import check_long_pieces

_log = logging.getLogger("pooled.engine")


class MlxSource:
    """Satisfies `core.runner.Source`."""

    def __init__(
        self, load_model: Callable[[Path], LoadedModel] = load, device: Callable[[], DeviceFacts] = read_device
    ) -> None:
        self._load_model, self._device = load_model, device
        self._better: Callable[[], None] = lambda: None

    def load(
        self,
        card: ModelCard,
        folder: Path,
        settings: EngineSettings,
        known_tokens: int,
        on_model: Callable[[int], None],
    ) -> Loaded:
        """See `Source.load`. Raises `ModelLoadError`, `DoesNotFitError`."""
        with one_blas_thread():
            model = self._load_model(folder)
            shape = measure_shape(model)
        on_model(model.vocab_size)
        device = self._device()
        longest = model.largest_piece(settings.prefill_step or LARGEST_STEP)
        plan = plan_memory(
            device,
            model.weights_bytes,
            shape,
            context_max=card.context_max,
            context_default=card.context_default,
            context=settings.context_tokens,
            pool_bytes=settings.pool_bytes,
            limit_bytes=settings.memory_limit_bytes,
            wired=settings.wired,
            cell_bytes=model.score_cell_bytes(device.has_metal),
            step=longest,
            model=card.id,
        )
        set_limits(memory_bytes=plan.limits.memory_bytes, cache_bytes=plan.limits.cache_bytes)
        wired_bytes = model.wire_weights() if plan.limits.wires_weights else 0
        key = files_key(folder)
        step = min(longest, settings.prefill_step or _measured_step(model, plan.context_tokens, key, settings.steps_file))
        rule = cut_rule(step_table(step, plan.context_tokens, plan.cell_bytes, plan.most_scores_bytes))
        if settings.prefill_step and rule.step < settings.prefill_step:
            _log.warning(
                "a prefill step of %d tokens is more than this model or machine can take: %s", settings.prefill_step, rule
            )
        if has_metal():
            check_long_pieces(model, rule.step)
        runner = MlxRunner(model, known_tokens, PieceTimes(rule.step, longest))
        if settings.steps_file is not None and not settings.prefill_step:
            self._better = partial(_note_better_step, runner.times, key, settings.steps_file)
        return Loaded(runner, plan, rule, fingerprint(key, model.quantization, rule), model.quantization, wired_bytes)

    def memory(self) -> Mapping[str, int]:
        now = memory_now()
        return {
            "active_bytes": now.active,
            "peak_bytes": now.peak,
            "cache_bytes": now.cache,
            "process_bytes": process_bytes(),
        }

    def leave(self) -> None:
        self._better()
        finish_work()


def _note_better_step(times: PieceTimes, key: str, path: Path) -> None:
    if (step := times.better_step()) is not None:
        _log.info("pieces of prompts took another time than at the first start: from the next one on they have %d tokens", step)
        store_step(path, key, step)


def _measured_step(model: LoadedModel, context_tokens: int, key: str, path: Path | None) -> int:
    def measure() -> int:
        _log.info("measuring how many tokens a piece of a prompt may have here; this is done once")
        return measure_step(model, context_tokens)

    return measure() if path is None else stored_step(path, key, measure)
