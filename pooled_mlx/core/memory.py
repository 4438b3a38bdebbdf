"""The memory plan: what the weights, the caches and the work may take, and the context that fits. Pure arithmetic.

The pool's budget counts everything that is cached: stored segments, states and the caches of running requests.
"""

from __future__ import annotations

from bisect import bisect_left
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
_SCORES_SHARE, _SPARE_SHARE = (
    1 / 16,
    1 / 4,
)  # of the limit, of what is left: what attention scores may take; pieces are cut for it
_FUSED_HEAD_DIMS = (64, 80, 128)  # where Metal's kernel keeps the scores of a piece to itself
_SCORE_BYTES = {True: 2, False: 4}  # of one score: 16 bits with Metal, float32 on the CPU backend
LARGEST_STEP, SMALLEST_STEP = 2048, 128
"""Tokens of the longest prefill piece anywhere, and of the shortest that is chosen."""
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
    """The model or the wanted context needs more memory than there is; `reason` has the numbers, the message the way on too."""

    def __init__(self, reason: str, way_on: str = "") -> None:
        super().__init__(f"{reason}. {way_on}" if way_on else reason)
        self.reason = reason


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
    cell_bytes: int = 0
    """Of attention scores, for each token of a piece and each token that it sees; 0 where none are kept."""
    most_scores_bytes: int = 0
    scores_bytes: int = 0
    """What they take at most, part of `working_bytes`."""

    def fits(self, prompt_tokens: int, max_output_tokens: int) -> Fit:
        """Whether one request can run when the pool holds nothing else."""
        return Fit(request_bytes(self.shape, prompt_tokens, max_output_tokens), self.pool_bytes)

    def rows(self) -> list[tuple[str, int, str]]:
        """The plan as (what, bytes, note)."""
        context = self.shape.kv_bytes_per_token * self.context_tokens
        states = f", {format_size(self.shape.row_bytes)} a state" if self.shape.row_bytes else ""
        scores = f", attention scores {format_size(self.scores_bytes)} of it" if self.scores_bytes else ""
        return [
            ("weights", self.weights_bytes, "wired" if self.limits.wires_weights else ""),
            ("cache pool", self.pool_bytes, f"one full context is {format_size(context)}{states}"),
            ("working space", self.working_bytes, f"activations, estimated{scores}"),
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
            "scores_bytes": self.scores_bytes,
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


def score_cell_bytes(heads: int, head_dim: int, has_metal: bool) -> int:
    """Bytes of attention scores for each token of a piece and each token that it sees, in the layer that is computed.

    0 where the kernel keeps none: mlx 0.32's for Metal does for pieces with heads of 64, 80 and 128 values, that for other
    sizes and the CPU backend do not.
    """
    return 0 if has_metal and head_dim in _FUSED_HEAD_DIMS else heads * _SCORE_BYTES[has_metal]


Steps = tuple[tuple[int, int], ...]
"""(position, step) from position 0 on, ascending: the longest piece of a prompt that begins there, in tokens."""


def step_table(step: int, context_tokens: int, cell_bytes: int, most_bytes: int) -> Steps:
    """Steps of at most `step`, halved wherever the scores of one piece would take more than `most_bytes`, down to 128."""
    table: list[tuple[int, int]] = []
    position = 0
    while cell_bytes and step % 2 == 0 and step // 2 >= SMALLEST_STEP and position < context_tokens:
        until = (most_bytes // (cell_bytes * step) - step) // CONTEXT_STEP * CONTEXT_STEP
        if until > position:
            table.append((position, step))
            position = until
        step //= 2
    return (*table, (position, step)) if position < context_tokens or not table else tuple(table)


def scores_of(table: Steps, context_tokens: int, cell_bytes: int) -> int:
    """The most bytes of scores that a piece of a prompt of at most `context_tokens` holds."""
    ends = [*(position for position, _ in table[1:]), context_tokens]
    return max(
        cell_bytes * step * min(end + step - 1, context_tokens) for (_, step), end in zip(table, ends, strict=True) if end
    )


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
    cell_bytes: int = 0,
    step: int = LARGEST_STEP,
    model: str = "the model",
) -> MemoryPlan:
    """The plan for a model whose weights take `weights_bytes` in memory.

    `context` is the user's wish in tokens, None for what fits: a multiple of 1024, at most `context_default` and 131,072.
    `pool_bytes` and `limit_bytes` are the user's wishes too; a limit above what Metal recommends is cut to it. `cell_bytes`
    is `score_cell_bytes`, `step` the longest piece that may be chosen. Raises `DoesNotFitError`.
    """
    limit = min(limit_bytes, facts.limit_bytes) if limit_bytes else facts.limit_bytes
    largest_scores = min(int(limit * _SCORES_SHARE), facts.largest_buffer_bytes or limit)

    def scores(tokens: int, most_bytes: int = 0) -> int:
        return scores_of(step_table(step, tokens, cell_bytes, most_bytes), tokens, cell_bytes)

    activations = max(int(weights_bytes * _WORKING_SHARE), _LEAST_WORKING)
    working = activations + scores(CONTEXT_STEP)
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
            f"{model} does not fit: it needs {format_size(needed)} ({parts}{cache}), {allows} allows {format_size(limit)}",
            f"{way} a smaller model: pooled-mlx models list",
        )
    if pool_bytes is not None and pool_bytes > room:
        raise DoesNotFitError(
            f"a pool of {format_size(pool_bytes)} does not fit: {format_size(limit)} are allowed, {parts} leave "
            f"{format_size(room)}"
        )

    def left(tokens: int) -> int:
        """What a context of so many tokens leaves for the pool."""
        return room + scores(CONTEXT_STEP) - scores(tokens)

    def fits(tokens: int) -> bool:
        pool = left(tokens) if pool_bytes is None else pool_bytes
        return per_token * tokens + states <= pool <= left(tokens)

    steps = range(CONTEXT_STEP, context_max + CONTEXT_STEP, CONTEXT_STEP)
    fitting = CONTEXT_STEP * bisect_left(steps, True, key=lambda tokens: not fits(tokens))
    if context is None:
        wished = min(context_default or context_max, context_max, LONGEST_DEFAULT_CONTEXT)
        tokens = wished if fits(wished) else fitting
    else:
        tokens = context
        if context > context_max:
            raise DoesNotFitError(f"a context of {context} tokens is more than {model} can have: {context_max}")
    if not fits(tokens) or tokens < min(CONTEXT_STEP, context_max):
        wanted = max(tokens, CONTEXT_STEP)
        has = max(left(wanted), 0) if pool_bytes is None else pool_bytes
        raise DoesNotFitError(
            f"a context of {wanted} tokens does not fit: it needs {format_size(per_token * wanted + states)} of cache, "
            f"the pool has {format_size(has)}. At most {fitting} tokens fit"
        )
    # Longer pieces far behind than need be cost a part of what is left, so that they are read faster.
    spare = left(tokens) - (per_token * tokens + states if pool_bytes is None else pool_bytes)
    most_scores = min(largest_scores, scores(tokens) + int(spare * _SPARE_SHARE))
    working = activations + scores(tokens, most_scores)
    if pool_bytes is not None:
        pool = pool_bytes
    else:
        pool = limit - weights_bytes - working - headroom
        pool = min(pool, max(_POOL_CONTEXTS * (per_token * tokens + states), int(limit * _POOL_SHARE)))
    wires = wires_weights(facts, weights_bytes, wired)
    limits = Limits(limit, min(int(limit * _CACHE_LIMIT_SHARE), _MOST_CACHE), wires)
    note = "--memory-limit" if limit < facts.limit_bytes else "Metal's recommendation" if facts.recommended_bytes else ""
    headroom = limit - weights_bytes - pool - working
    return MemoryPlan(
        limit_bytes=limit,
        weights_bytes=weights_bytes,
        pool_bytes=pool,
        working_bytes=working,
        headroom_bytes=headroom,
        context_tokens=tokens,
        shape=shape,
        limits=limits,
        limit_note=note,
        cell_bytes=cell_bytes,
        most_scores_bytes=most_scores,
        scores_bytes=scores(tokens, most_scores),
    )


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
