"""From a model folder to a runner that is ready: load, plan, limits, calibration, the test of the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import DeviceFacts, plan_memory
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.runner import Loaded
from pooled_mlx.runner.calibrate import cut_rule, measure_step, safe_step, stored_step
from pooled_mlx.runner.devices import process_bytes, read_device
from pooled_mlx.runner.fingerprint import files_key, fingerprint
from pooled_mlx.runner.model import LoadedModel, finish_work, has_metal, load, memory_now, set_limits
from pooled_mlx.runner.runner import MlxRunner, measure_shape
from pooled_mlx.runner.self_test import check_long_pieces

_log = logging.getLogger("pooled.engine")


class MlxSource:
    """Satisfies `core.runner.Source`."""

    def __init__(
        self, load_model: Callable[[Path], LoadedModel] = load, device: Callable[[], DeviceFacts] = read_device
    ) -> None:
        self._load_model, self._device = load_model, device

    def load(
        self,
        card: ModelCard,
        folder: Path,
        settings: EngineSettings,
        known_tokens: int,
        on_model: Callable[[int], None],
    ) -> Loaded:
        """See `Source.load`. Raises `ModelLoadError`, `DoesNotFitError`."""
        model = self._load_model(folder)
        on_model(model.vocab_size)
        device = self._device()
        plan = plan_memory(
            device,
            model.weights_bytes,
            measure_shape(model),
            context_max=card.context_max,
            context_default=card.context_default,
            context=settings.context_tokens,
            pool_bytes=settings.pool_bytes,
            limit_bytes=settings.memory_limit_bytes,
            wired=settings.wired,
            model=card.id,
        )
        set_limits(memory_bytes=plan.limits.memory_bytes, cache_bytes=plan.limits.cache_bytes)
        wired_bytes = model.wire_weights() if plan.limits.wires_weights else 0
        key = files_key(folder)
        step = settings.prefill_step or _measured_step(model, key, settings.steps_file)
        rule = cut_rule(safe_step(model, step, plan.context_tokens, device.largest_buffer_bytes))
        if has_metal():
            check_long_pieces(model, rule.step)
        runner = MlxRunner(model, known_tokens)
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
        finish_work()


def _measured_step(model: LoadedModel, key: str, path: Path | None) -> int:
    def measure() -> int:
        _log.info("measuring how many tokens a piece of a prompt may have here; this is done once")
        return measure_step(model)

    return measure() if path is None else stored_step(path, key, measure)
