"""What a pool segment holds in MLX arrays, per cache class, and how a working cache is cut into and built from it.

Attention layers hold the K/V delta of the segment `[1, kv_heads, tokens, head_dim]`; recurrent and rotating-window layers
hold the state at the segment's end, by reference (MLX arrays are replaced there, never written in place, or are copied on
write); a cache class this file does not know is kept whole as opaque state.

While the working cache that computed a segment is still in memory, the segment's delta is a window on its buffers
(`Backing`): nothing is stored twice. When that cache goes away, `Backing.flush` copies the windows into arrays of their own,
since a slice of an MLX array keeps the whole parent alive.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from pooled_mlx.engine.memory import CacheShape
from pooled_mlx.engine.mlx_backend import (
    ArraysCache,
    CacheList,
    KVCache,
    LoadedModel,
    QuantizedKVCache,
    RotatingKVCache,
    arrays_of,
    mx,
)

_STEP = 256
"""Buffers of attention caches grow in multiples of this many tokens, as mlx-lm's own do."""


def is_attention(cache: Any) -> bool:
    """True for a cache layer whose tokens can be cut out of its buffers."""
    return type(cache) in (KVCache, QuantizedKVCache)


def is_divisible(caches: Sequence[Any]) -> bool:
    """True when every layer is plain attention, so that a prefix may end at any token."""
    return all(is_attention(cache) for cache in caches)


def _buffers(cache: Any) -> tuple[Any, Any]:
    return cache.keys, cache.values


def _map(function: Any, tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, item) for item in tree)
    return function(tree)


def _freeze_state(cache: Any) -> Any:
    """The state of a non-attention layer at this moment; never changes afterwards."""
    kind = type(cache)
    if kind is ArraysCache:
        return list(cache.cache)
    if kind is RotatingKVCache:
        if cache.keys is None:
            return None
        return (
            copy.copy(cache.keys),
            copy.copy(cache.values),
            cache.offset,
            cache.keep,
            cache.max_size,
            cache._idx,
        )
    if kind is CacheList:
        return [_freeze_member(member) for member in cache.caches]
    return copy.deepcopy(cache.state)


def _freeze_member(cache: Any) -> Any:
    if is_attention(cache):
        if cache.keys is None:
            return None
        return _map(lambda array: mx.contiguous(array[..., : cache.offset, :]), _buffers(cache))
    return _freeze_state(cache)


def _thaw_member(cache: Any, state: Any) -> None:
    if state is None:
        return
    if is_attention(cache):
        cache.keys, cache.values = _map(copy.copy, state)
        cache.offset = arrays_of(state)[0].shape[-2]
    else:
        _thaw_state(cache, state)


def _thaw_state(cache: Any, state: Any) -> None:
    kind = type(cache)
    if state is None:
        return
    if kind is ArraysCache:
        cache.cache = list(state)
    elif kind is RotatingKVCache:
        keys, values, *rest = state
        cache.state = (copy.copy(keys), copy.copy(values), *rest)
    elif kind is CacheList:
        for member, member_state in zip(cache.caches, state, strict=True):
            _thaw_member(member, member_state)
    else:
        cache.state = copy.deepcopy(state)


def _own(state: Any) -> Any:
    """Copy the arrays of a state into buffers of their own."""
    if isinstance(state, tuple | list):
        return type(state)(_own(item) for item in state)
    return mx.contiguous(state) if isinstance(state, mx.array) else state


class Backing:
    """A working cache whose buffers hold the deltas of the segments that it backs. Owned by the engine thread."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches
        self._held: list[SegmentData] = []

    def hold(self, data: SegmentData) -> None:
        """Make `data`'s delta a window on these caches."""
        self._held.append(data)

    def forget(self, data: SegmentData) -> None:
        """`data` needs these caches no longer."""
        self._held = [held for held in self._held if held is not data]

    def flush(self) -> None:
        """Give every held segment arrays of its own; afterwards these caches may be changed or dropped."""
        held, self._held = self._held, []
        for data in held:
            data.detach()

    @property
    def held_bytes(self) -> int:
        """Bytes of these caches that the pool counts already, as the segments' own."""
        return sum(data.delta_bytes for data in self._held)


class SegmentData:
    """The arrays of one segment over tokens `lo..hi` of its path. Satisfies the pool's payload protocol.

    A segment without states is only a link of its path: a model with recurrent or rotating layers cannot resume there.
    """

    def __init__(self, backing: Backing, lo: int, hi: int) -> None:
        self.lo, self.hi = lo, hi
        self._attention = [is_attention(cache) for cache in backing.caches]
        self._deltas: list[Any] | None = None
        self._backing: Backing | None = backing
        self._states: list[Any] | None = [
            None if attention else _freeze_state(cache)
            for cache, attention in zip(backing.caches, self._attention, strict=True)
        ]
        backing.hold(self)
        self._divisible = all(self._attention)
        self.delta_bytes = sum(
            array.nbytes // array.shape[-2] * (hi - lo)
            for cache, attention in zip(backing.caches, self._attention, strict=True)
            if attention
            for array in arrays_of(_buffers(cache))
        )
        self._state_bytes = sum(array.nbytes for array in arrays_of(self._states))

    @property
    def state_bytes(self) -> int:
        """Bytes of the boundary states, 0 once dropped."""
        return self._state_bytes if self._states is not None else 0

    @property
    def has_state(self) -> bool:
        """True when a request may resume at `hi`."""
        return self._divisible or self._states is not None

    def reads(self, backing: Backing) -> bool:
        """True when the delta is a window on `backing`."""
        return self._backing is backing

    @property
    def backed(self) -> bool:
        """True while the delta is a window on a working cache."""
        return self._backing is not None

    def drop_state(self) -> None:
        """Keep the delta for descendants, free the states. On a divisible model there is nothing to free."""
        if not self._divisible:
            self._states = None

    def release(self) -> None:
        """Free everything."""
        if self._backing is not None:
            self._backing.forget(self)
        self._backing, self._deltas, self._states = None, None, None
        self._divisible = False

    def detach(self) -> None:
        """Copy the delta out of the backing cache, layer by layer, so that no single copy is long."""
        backing, self._backing = self._backing, None
        if backing is None:
            return
        deltas: list[Any] = []
        for cache, attention in zip(backing.caches, self._attention, strict=True):
            delta = None
            if attention:
                delta = _map(lambda array: mx.contiguous(array[..., self.lo : self.hi, :]), _buffers(cache))
                mx.eval(arrays_of(delta))
            deltas.append(delta)
        self._deltas = deltas

    def lend(self, backing: Backing) -> None:
        """Read the delta from `backing`, which holds bit-equal copies of it, and free the own arrays."""
        if self._backing is backing:
            return
        if self._backing is not None:
            self._backing.forget(self)
        self._backing, self._deltas = backing, None
        backing.hold(self)

    def delta(self, layer: int, tokens: int | None = None) -> Any:
        """K/V of attention layer `layer`, the first `tokens` of the segment (all when None). Lazy slices."""
        hi = self.hi if tokens is None else self.lo + tokens
        if self._backing is not None:
            return _map(lambda array: array[..., self.lo : hi, :], _buffers(self._backing.caches[layer]))
        assert self._deltas is not None, "a released segment was read"
        if hi == self.hi:
            return self._deltas[layer]
        return _map(lambda array: array[..., : hi - self.lo, :], self._deltas[layer])

    def states(self) -> list[Any]:
        """The boundary states, None for attention layers."""
        assert self._states is not None, "a segment without states was resumed"
        return self._states

    def own_states(self) -> None:
        """Copy the states into buffers of their own: a row cut out of a batch is a slice that keeps the batch alive."""
        if self._states is not None:
            self._states = _own(self._states)
            mx.eval(arrays_of(self._states))

    def finite(self, *, delta: bool) -> bool:
        """False if a state, or the delta where asked for, contains NaN or infinity."""
        arrays = list(arrays_of(self._states))
        if delta:
            for layer, attention in enumerate(self._attention):
                if attention:
                    arrays += arrays_of(self.delta(layer))
        checks = [mx.all(mx.isfinite(array)) for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
        return not checks or bool(mx.all(mx.stack(checks)).item())


def materialise(
    caches: list[Any], path: Sequence[SegmentData], partial: tuple[SegmentData, int] | None = None, reserve_tokens: int = 0
) -> int:
    """Fill the empty working `caches` from a path of segments and return the number of tokens they then hold.

    `partial` adds the first tokens of one more segment (divisible models only). Attention buffers get room for
    `reserve_tokens` more. Each layer is evaluated by itself, so that no single copy is long.
    """
    tokens = path[-1].hi if path else 0
    if partial is not None:
        tokens += partial[1]
    if tokens == 0:
        return 0
    spare = (-(tokens + reserve_tokens)) % _STEP + reserve_tokens
    states = path[-1].states() if path and partial is None and not is_divisible(caches) else None
    for layer, cache in enumerate(caches):
        if not is_attention(cache):
            assert states is not None
            _thaw_state(cache, states[layer])
            continue
        deltas = [data.delta(layer) for data in path]
        if partial is not None:
            deltas.append(partial[0].delta(layer, partial[1]))
        cache.keys, cache.values = _concatenate(deltas, spare)
        cache.offset = tokens
        mx.eval(arrays_of(_buffers(cache)))
    return tokens


def _concatenate(parts: Sequence[Any], spare: int) -> Any:
    """Join K/V trees along the token axis and add `spare` zero tokens at the end."""
    first = parts[0]
    if isinstance(first, tuple | list):
        return type(first)(_concatenate([part[index] for part in parts], spare) for index in range(len(first)))
    arrays = list(parts)
    if spare:
        *head, _, width = first.shape
        arrays.append(mx.zeros((*head, spare, width), first.dtype))
    # A single part is copied as well: the working cache writes into its buffers.
    return mx.concatenate(arrays, axis=-2) if len(arrays) > 1 else mx.contiguous(first) + 0


def reserve(caches: Iterable[Any], tokens: int) -> None:
    """Give plain attention buffers room for `tokens` in all, at once instead of in steps that copy everything each time."""
    capacity = -(-tokens // _STEP) * _STEP
    for cache in caches:
        if type(cache) is KVCache and cache.keys is not None and cache.keys.shape[2] < capacity:
            cache.keys, cache.values = _concatenate([(cache.keys, cache.values)], capacity - cache.keys.shape[2])


def measure_shape(model: LoadedModel) -> CacheShape:
    """What the model's caches take, measured on a short prompt. A rotating window counts at its full size."""
    caches = model.make_cache()
    mx.eval(model.forward(mx.array([[0, 0]]), caches), [cache.state for cache in caches])
    token_bytes = state_bytes = window_bytes = 0
    for cache in caches:
        size = sum(array.nbytes for array in arrays_of(cache.state))
        if is_attention(cache):
            token_bytes += sum(array.nbytes // array.shape[-2] for array in arrays_of(_buffers(cache)))
        elif type(cache) is RotatingKVCache:
            window_bytes += sum(array.nbytes // array.shape[-2] for array in arrays_of(_buffers(cache))) * cache.max_size
        else:
            state_bytes += size
    return CacheShape(token_bytes, state_bytes, window_bytes)


def cache_bytes(caches: Iterable[Any]) -> int:
    """Bytes of all buffers of a working cache."""
    return sum(array.nbytes for cache in caches for array in arrays_of(cache.state))
