"""The memory plan: what the weights, the caches and the work may take, and the context that fits. Pure arithmetic.

The pool's budget counts everything that is cached: stored segments, states and the caches of running requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pooled_mlx.core.limits import LONGEST_DEFAULT_CONTEXT

MIB, GIB = 1024**2, 1024**3
CONTEXT_STEP = 1024
"""A planned context is a multiple of this many tokens."""

ID_BYTES = 4
"""A token's id, which the pool keeps beside its K/V."""
GROWTH_TOKENS = 256
"""Caches grow by so many tokens at once."""
KEPT_STATES = 4
"""Recurrent states that a plan has room for: those of one running request and of its last boundaries."""

_CPU_SHARE = 0.8  # of the memory, where no device says what it may use
_WORKING_SHARE, _LEAST_WORKING = 0.04, 256 * MIB  # of the weights: activations of one prefill piece, buffers between steps
_HEADROOM_SHARE, _LEAST_HEADROOM = 0.03, 128 * MIB  # of the limit: allocator rounding, Python, tokenizer
_POOL_CONTEXTS, _POOL_SHARE = 4, 0.25  # a pool is not larger by itself than four full contexts or this share of the limit
_WIRED_ABOVE, _LEAST_UNWIRED = 0.60, 0.15  # weights of Metal's working set that are wired by default; of the memory, never
_CACHE_LIMIT_SHARE, _MOST_CACHE = 0.05, 2 * GIB  # freed buffers that MLX may keep for reuse
_FLOAT32_GROWTH = 7.1  # 32 bits in place of 4.5: 4-bit weights are dequantized on the CPU backend


def format_size(size: int) -> str:
    """`size` bytes for people, in binary units: "1.5 GiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a machine offers, in bytes. `recommended_bytes` and `largest_buffer_bytes` are Metal's own, None without Metal."""

    name: str
    memory_bytes: int
    has_metal: bool = False
    recommended_bytes: int | None = None
    largest_buffer_bytes: int | None = None

    @property
    def limit_bytes(self) -> int:
        """What one process may use before the system suffers."""
        if self.recommended_bytes:
            return min(self.recommended_bytes, self.memory_bytes)
        return int(self.memory_bytes * _CPU_SHARE)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Bytes that a model's caches take: K/V per token of the full-attention layers, recurrent states and rotating windows
    per row whatever its length."""

    kv_bytes_per_token: int
    state_bytes: int = 0
    window_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """The part of one row that does not grow with its length."""
        return self.state_bytes + self.window_bytes


class DoesNotFitError(Exception):
    """The model or the wanted context needs more memory than there is; the message has the numbers and the way on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits to set in MLX at load, in bytes. `wires_weights`: the weights are kept resident, and they alone."""

    memory_bytes: int
    cache_bytes: int
    wires_weights: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether one request fits, in bytes."""

    needed_bytes: int
    allowed_bytes: int

    @property
    def ok(self) -> bool:
        """True when it does."""
        return self.needed_bytes <= self.allowed_bytes

    def refusal(self) -> str:
        """The text of a refusal."""
        return (
            f"this request needs {format_size(self.needed_bytes)} of cache memory ({self.needed_bytes} bytes), "
            f"{format_size(self.allowed_bytes)} ({self.allowed_bytes} bytes) are allowed. "
            "Shorten the prompt or lower max_tokens"
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes, in bytes: weights + pool + working + headroom = limit."""

    limit_bytes: int
    weights_bytes: int
    pool_bytes: int
    working_bytes: int
    headroom_bytes: int
    context_tokens: int
    shape: CacheShape
    limits: Limits
    limit_note: str = ""

    def fits(self, prompt_tokens: int, max_output_tokens: int) -> Fit:
        """Whether one request can run when the pool holds nothing else."""
        return Fit(request_bytes(self.shape, prompt_tokens, max_output_tokens), self.pool_bytes)

    def rows(self) -> list[tuple[str, int, str]]:
        """The plan as (what, bytes, note)."""
        context = self.shape.kv_bytes_per_token * self.context_tokens
        states = f", {format_size(self.shape.row_bytes)} a state" if self.shape.row_bytes else ""
        return [
            ("weights", self.weights_bytes, "wired" if self.limits.wires_weights else ""),
            ("cache pool", self.pool_bytes, f"one full context is {format_size(context)}{states}"),
            ("working space", self.working_bytes, "activations, estimated"),
            ("headroom", self.headroom_bytes, "kept free"),
            ("limit", self.limit_bytes, self.limit_note),
        ]

    def table(self) -> str:
        """The plan for people."""
        return "\n".join(f"{what:<14} {format_size(size):>10}  {note}".rstrip() for what, size, note in self.rows())

    def facts(self) -> dict[str, int]:
        """The plan for `/health`."""
        return {
            "limit_bytes": self.limit_bytes,
            "weights_bytes": self.weights_bytes,
            "pool_budget_bytes": self.pool_bytes,
            "working_bytes": self.working_bytes,
            "headroom_bytes": self.headroom_bytes,
            "context_tokens": self.context_tokens,
            "kv_bytes_per_token": self.shape.kv_bytes_per_token,
            "state_bytes": self.shape.row_bytes,
        }


def loaded_bytes(weights_bytes: int, has_metal: bool, *, quantized: bool = True) -> int:
    """Bytes of weights in memory: as on disk with Metal, as float32 on the CPU backend (estimated from 4-bit files)."""
    return weights_bytes if has_metal or not quantized else int(weights_bytes * _FLOAT32_GROWTH)


Wired = Literal["auto", "off", "weights"]
"""What may be wired: the weights where they are a large part of what Metal allows, nothing, the weights."""


def wires_weights(facts: DeviceFacts, weights_bytes: int, wish: Wired = "auto") -> bool:
    """Whether the weights are wired: kept in memory so that the system neither swaps nor compresses them.

    macOS is reported to panic where buffers that come and go are wired, so caches never are; weights stay from load to exit. By
    default even they are wired only where they are so large that the system would look for room among them. A part of the
    memory stays unwired whatever the wish, and weights that would not leave it are not wired in part: the rest of the limit
    would be open to caches.
    """
    if not facts.recommended_bytes or wish == "off" or weights_bytes > (1 - _LEAST_UNWIRED) * facts.memory_bytes:
        return False
    return wish == "weights" or weights_bytes > _WIRED_ABOVE * facts.recommended_bytes


def request_bytes(shape: CacheShape, prompt_tokens: int, max_output_tokens: int) -> int:
    """Bytes that one request takes at its longest, alone: K/V once (segments are windows on its cache), ids, two states."""
    tokens = prompt_tokens + max_output_tokens
    return (shape.kv_bytes_per_token + ID_BYTES) * tokens + GROWTH_TOKENS * shape.kv_bytes_per_token + 2 * shape.row_bytes


def plan_memory(
    facts: DeviceFacts,
    weights_bytes: int,
    shape: CacheShape,
    *,
    context_max: int,
    context_default: int | None = None,
    context: int | None = None,
    pool_bytes: int | None = None,
    limit_bytes: int | None = None,
    wired: Wired = "auto",
    model: str = "the model",
) -> MemoryPlan:
    """The plan for a model whose weights take `weights_bytes` in memory.

    `context` is the user's wish in tokens, None for what fits: a multiple of 1024, at most `context_default` and 131,072.
    `pool_bytes` and `limit_bytes` are the user's wishes too; a limit above what Metal recommends is cut to it. Raises
    `DoesNotFitError`.
    """
    limit = min(limit_bytes, facts.limit_bytes) if limit_bytes else facts.limit_bytes
    working = max(int(weights_bytes * _WORKING_SHARE), _LEAST_WORKING)
    headroom = max(int(limit * _HEADROOM_SHARE), _LEAST_HEADROOM)
    room = limit - weights_bytes - working - headroom
    states = KEPT_STATES * shape.row_bytes + GROWTH_TOKENS * shape.kv_bytes_per_token
    parts = f"weights {format_size(weights_bytes)}, working space {format_size(working)}, headroom {format_size(headroom)}"
    per_token = shape.kv_bytes_per_token + ID_BYTES
    least = per_token * CONTEXT_STEP + states
    if room < least:
        needed = limit - room + least
        # Before a download nothing is known of a model's caches.
        cache = f", {format_size(least)} of cache for a context of {CONTEXT_STEP} tokens" if shape != CacheShape(0) else ""
        if needed <= facts.limit_bytes:
            allows, way = "--memory-limit", f"Raise it to {format_size(needed)} or more, or choose"
        else:
            allows, way = "this machine", "Choose"
        raise DoesNotFitError(
            f"{model} does not fit: it needs {format_size(needed)} ({parts}{cache}), {allows} allows {format_size(limit)}. "
            f"{way} a smaller model: pooled-mlx models list"
        )
    if pool_bytes is not None and pool_bytes > room:
        raise DoesNotFitError(
            f"a pool of {format_size(pool_bytes)} does not fit: {format_size(limit)} are allowed, {parts} leave "
            f"{format_size(room)}"
        )
    pool = room if pool_bytes is None else pool_bytes
    fitting = max((pool - states) // per_token, 0)
    if context is None:
        wished = min(context_default or context_max, context_max, LONGEST_DEFAULT_CONTEXT)
        tokens = wished if wished <= fitting else fitting // CONTEXT_STEP * CONTEXT_STEP
    else:
        tokens = context
        if context > context_max:
            raise DoesNotFitError(f"a context of {context} tokens is more than {model} can have: {context_max}")
    if tokens > fitting or tokens < min(CONTEXT_STEP, context_max):
        needed = per_token * max(tokens, CONTEXT_STEP) + states
        raise DoesNotFitError(
            f"a context of {max(tokens, CONTEXT_STEP)} tokens does not fit: it needs {format_size(needed)} of cache, the pool "
            f"has {format_size(pool)}. At most {fitting // CONTEXT_STEP * CONTEXT_STEP} tokens fit"
        )
    if pool_bytes is None:
        pool = min(room, max(_POOL_CONTEXTS * (per_token * tokens + states), int(limit * _POOL_SHARE)))
    wires = wires_weights(facts, weights_bytes, wired)
    limits = Limits(limit, min(int(limit * _CACHE_LIMIT_SHARE), _MOST_CACHE), wires)
    note = "--memory-limit" if limit < facts.limit_bytes else "Metal's recommendation" if facts.recommended_bytes else ""
    headroom = limit - weights_bytes - pool - working
    return MemoryPlan(limit, weights_bytes, pool, working, headroom, tokens, shape, limits, note)


def refuse_weights(facts: DeviceFacts, weights_bytes: int, model: str, limit_bytes: int | None = None) -> str | None:
    """Why weights of this size on disk cannot be served here, None when they can: asked before a download."""
    try:
        plan_memory(
            facts,
            loaded_bytes(weights_bytes, facts.has_metal),
            CacheShape(0),
            context_max=CONTEXT_STEP,
            limit_bytes=limit_bytes,
            model=model,
        )
    except DoesNotFitError as error:
        return str(error)
    return None


def largest_step(step: int, context_tokens: int, attention_heads: int, largest_buffer_bytes: int | None) -> int:
    """The prefill step, halved until the attention scores of one piece over the whole context fit one Metal buffer.

    Scores are counted as [heads, step, context] in float16, the worst case of an attention that is not fused.
    """
    if largest_buffer_bytes is None:
        return step
    while step > 32 and attention_heads * step * context_tokens * 2 > largest_buffer_bytes:
        step //= 2
    return step
