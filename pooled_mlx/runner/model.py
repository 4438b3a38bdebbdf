"""The one place that knows mlx-lm's names: load a model, make caches, set limits, guard versions.

Everything else in the engine calls a `LoadedModel`, so that a new mlx-lm minor touches this file only.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from pooled_mlx.core.memory import score_cell_bytes

_log = logging.getLogger("pooled.engine")


_blas: list[ctypes.CDLL] = []


def preload_blas() -> str | None:
    """Load OpenBLAS before mlx.core on Linux and return its name, None where it is absent or not wanted.

    mlx's Linux wheel carries a reference BLAS; with OpenBLAS's symbols already in the process float32 matrix products are
    about 30 times faster. The thread count is fixed here: rounding may depend on it, and warm must equal cold.
    """
    if sys.platform != "linux":
        return None
    name = ctypes.util.find_library("openblas")
    if name is None:
        return None
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        _log.warning("OpenBLAS (%s) is present but cannot be loaded: %s", name, error)
        return None
    with contextlib.suppress(AttributeError):
        library.openblas_set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count() or 1))
        _blas.append(library)
    return name


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """For work of many small products: where others keep the cores busy, threads that wait for one another make it take ten
    times as long."""
    before = [library.openblas_get_num_threads() for library in _blas]
    for library in _blas:
        library.openblas_set_num_threads(1)
    try:
        yield
    finally:
        for library, threads in zip(_blas, before, strict=True):
            library.openblas_set_num_threads(threads)


BLAS = preload_blas()

import mlx.core as mx  # noqa: E402  (must follow the BLAS preload)
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import cache as mlx_cache  # noqa: E402
from mlx_lm.utils import dequantize_model, load_model  # noqa: E402

KVCache = mlx_cache.KVCache
BatchKVCache = mlx_cache.BatchKVCache
QuantizedKVCache = mlx_cache.QuantizedKVCache
RotatingKVCache = mlx_cache.RotatingKVCache
BatchRotatingKVCache = mlx_cache.BatchRotatingKVCache
ArraysCache = mlx_cache.ArraysCache
CacheList = mlx_cache.CacheList

SUPPORTED_MLX_LM = ("0.32.2", "0.33")
_PAGE_BYTES = 16_384  # of memory on Apple silicon: what a small Metal buffer takes
_HEAP_BYTES = 1 << 20  # MLX's own for buffers of up to 256 bytes, there before any other
_SPARE_PAGES = 64  # for buffers of a model that are no parameters, such as frequencies of rotary embeddings
MAX_EXPERT_ROWS = 32_768
"""Tokens x active experts of one prefill piece: above it MLX's sorted expert kernel may leave rows unwritten."""


class ModelLoadError(Exception):
    """The model folder cannot be served; the message says why and what to do."""


def check_versions() -> None:
    """Raise `ModelLoadError` when mlx-lm is outside the range this code was written for."""
    found = version("mlx-lm")
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    low, high = (tuple(int(part) for part in bound.split(".")) for bound in SUPPORTED_MLX_LM)
    if not low <= numbers < high:
        raise ModelLoadError(
            f"mlx-lm {found} is installed; this version of pooled-mlx needs >={SUPPORTED_MLX_LM[0]},<{SUPPORTED_MLX_LM[1]}. "
            "Install it again with its own constraints: pip install --force-reinstall pooled-mlx"
        )


def has_metal() -> bool:
    """True on a Mac with a usable GPU."""
    return sys.platform == "darwin" and mx.metal.is_available()


def device_info() -> dict[str, Any]:
    """MLX's own facts about the GPU; empty on the CPU backend."""
    return dict(mx.device_info()) if has_metal() else {}


@dataclass(frozen=True, slots=True)
class MemoryNow:
    """MLX's counters in bytes."""

    active: int
    peak: int
    cache: int


def memory_now() -> MemoryNow:
    """Bytes that MLX holds now, held at most, and keeps for reuse."""
    return MemoryNow(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def forget_peak() -> None:
    """The most that MLX held counts from now on."""
    mx.reset_peak_memory()


def finish_work() -> None:
    """Wait for what this thread still computes and end its streams. A thread that used MLX calls this last: a stream of an
    ended thread makes the process abort at its exit.
    """
    mx.synchronize()
    if threading.current_thread() is not threading.main_thread():  # that one's streams end with the process
        mx.clear_streams()


def set_limits(*, memory_bytes: int, cache_bytes: int) -> None:
    """Set MLX's limits once at start. The wired limit is none of them: see `LoadedModel.wire_weights`."""
    mx.set_memory_limit(memory_bytes)
    mx.set_cache_limit(cache_bytes)


def can_wire() -> bool:
    """True where MLX can keep memory resident: with Metal, from macOS 15 on."""
    return has_metal() and int(platform.mac_ver()[0].partition(".")[0] or 0) >= 15


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run on the thread that loaded it.

    `vocab_size` is the width of the logits, which may exceed the tokenizer's. `active_experts` is 0 for dense models. `parts`
    are the layers and the output layer apart, None where the module's logits are more than the one after the other.
    """

    module: Any
    config: dict[str, Any]
    vocab_size: int
    active_experts: int
    weights_bytes: int
    quantization: str
    parts: tuple[Callable[..., mx.array], Callable[[mx.array], mx.array]] | None = None
    _filling: list[mx.array] = field(default_factory=list)

    def wire_weights(self) -> int:
        """Keep what is in memory now resident, and nothing that comes later; bytes that are wired, 0 where nothing can be.

        To be called once, after the load, while nothing but weights is in memory. What MLX does was read in mlx 0.32.4's
        `backend/metal/resident.h` and `allocator.h` (in its wheel) and in `resident.cpp` of 0.32.2: the limit is 0 at first;
        raising it puts every existing buffer, those kept for reuse too, into a residency set while the sum stays within the
        limit, in no certain order; later buffers enter wherever there is room and leave when they are freed. That coming and
        going is what panicked kernels. So the limit is what the weights take, in pages, with a small margin, because a weight
        without room would leave a gap of its own size; and the margin is filled with pages that stay.
        """
        if not can_wire():
            return 0
        mx.synchronize()
        mx.clear_cache()
        small = sum(array.nbytes <= _PAGE_BYTES for array in arrays_of(self.module.parameters()))
        margin = _HEAP_BYTES + (small + _SPARE_PAGES) * _PAGE_BYTES
        wired = mx.get_active_memory() + margin
        mx.set_wired_limit(wired)
        self._filling = [mx.zeros(_PAGE_BYTES, mx.uint8) for _ in range(margin // _PAGE_BYTES)]
        mx.eval(self._filling)
        return wired

    def make_cache(self) -> list[Any]:
        """A new empty cache, one entry per layer."""
        return mlx_cache.make_prompt_cache(self.module)

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """Logits `[batch, tokens, vocab]` of ids `[batch, tokens]`; advances `cache`. Lazy."""
        return self.module(ids, cache=cache)

    def last_logits(self, ids: mx.array, cache: list[Any], places: int = 1) -> mx.array:
        """Logits `[batch, vocab]` after the last of ids `[batch, tokens]`; advances `cache`. Lazy.

        With `places` those after the last `places` tokens of a single row, `[places, vocab]`. With `parts` the output layer,
        as large as several others, is computed for those tokens alone.
        """
        if self.parts is None:
            logits = self.forward(ids, cache)[:, -places:]
        else:
            layers, output = self.parts
            logits = output(layers(ids, cache=cache)[:, -places:])
        return logits[:, 0] if places == 1 else logits[0]

    def score_cell_bytes(self, has_metal: bool) -> int:
        """See `core.memory.score_cell_bytes`; a model that does not say the size of its heads is taken for one without a
        kernel."""
        text = _text_config(self.config)
        heads = int(text.get("num_attention_heads") or 0)
        head_dim = int(text.get("head_dim") or (heads and (text.get("hidden_size") or 0) // heads))
        return score_cell_bytes(heads, head_dim, has_metal)

    def largest_piece(self, step: int) -> int:
        """The prefill piece that is safe for this model, at most `step` tokens."""
        if self.active_experts:
            return max(1, min(step, MAX_EXPERT_ROWS // self.active_experts))
        return step


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _vocab_size(module: Any, config: dict[str, Any]) -> int:
    logits = module(mx.array([[0]]), cache=mlx_cache.make_prompt_cache(module))
    mx.eval(logits)
    return int(logits.shape[-1])


def wrap_model(module: Any, config: dict[str, Any], quantization: str = "none") -> LoadedModel:
    """A `LoadedModel` around an mlx-lm module whose weights are in memory."""
    text = _text_config(config)
    experts = text.get("num_experts_per_tok") or text.get("top_k_experts") or 0
    weights = sum(array.nbytes for array in arrays_of(module.parameters()))
    return LoadedModel(module, config, _vocab_size(module, config), int(experts), weights, quantization, _parts(module))


def _parts(module: Any) -> tuple[Callable[..., mx.array], Callable[[mx.array], mx.array]] | None:
    """Layers and output layer by the names that mlx-lm's models give them, if they make the very logits of `module`."""
    text = getattr(module, "language_model", module)
    layers = getattr(text, "model", None)
    output = getattr(text, "lm_head", None) or getattr(getattr(layers, "embed_tokens", None), "as_linear", None)
    if not callable(layers) or not callable(output):
        return None
    ids = mx.array([[0, 1, 2]])
    try:
        apart: Any = output(layers(ids, cache=mlx_cache.make_prompt_cache(module)))
        if bool(mx.array_equal(apart, module(ids, cache=mlx_cache.make_prompt_cache(module)), equal_nan=True).item()):
            return cast(Any, layers), cast(Any, output)
    except (AttributeError, TypeError, ValueError):
        _log.debug("the output layer of %s is not computed apart", type(module).__name__, exc_info=True)
    return None


def describe_quantization(config: dict[str, Any]) -> str:
    """A short name such as `4-bit (group 64)`, or the dtype for weights that are not quantized."""
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and quantization.get("bits"):
        return f"{quantization['bits']}-bit (group {quantization.get('group_size')})"
    return str(_text_config(config).get("dtype") or config.get("torch_dtype") or "none")


def load(folder: Path) -> LoadedModel:
    """Load the mlx-lm model in `folder`. Never runs code from it.

    On the CPU backend weights become float32: quantized and bfloat16 products are 10 to 30 times slower there, and the
    expert gather exists in float32 only. Raises `ModelLoadError`.
    """
    check_versions()
    try:
        module, config = load_model(folder, lazy=True, trust_remote_code=False)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{folder} is not a complete model folder: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"mlx-lm cannot load {folder}: {error}") from error
    quantization = describe_quantization(config)
    if not has_metal():
        if config.get("quantization"):
            module = dequantize_model(module)
        module.set_dtype(mx.float32)
        quantization = f"{quantization}, run as float32" if quantization not in ("none", "float32") else "float32"
    try:
        mx.eval(module.parameters())
    except RuntimeError as error:
        raise ModelLoadError(f"the weights in {folder} cannot be read: {error}") from error
    module.eval()
    return wrap_model(module, config, quantization)


def arrays_of(tree: Any) -> Sequence[mx.array]:
    """All MLX arrays in a nested structure."""
    return [value for _, value in tree_flatten(tree) if isinstance(value, mx.array)]
