"""What a pool segment holds in MLX arrays, per cache class, and how a working cache is cut into and built from it.

Attention layers hold the K/V delta of the segment `[1, kv_heads, tokens, head_dim]`; all others hold the state at the segment's
end. Recurrent states are kept by reference (their arrays are replaced, never written in place), every other class is copied
whole, which copies no memory before the next write.

While the working cache that computed a segment is still in memory, the segment's delta is a window on its buffers
(`Backing`): nothing is stored twice. When that cache goes away, the windows become arrays of their own, since a slice of an MLX
array keeps the whole parent alive.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from pooled_mlx.core.memory import CacheShape
from pooled_mlx.runner.model import (
    ArraysCache,
    CacheList,
    KVCache,
    LoadedModel,
    QuantizedKVCache,
    RotatingKVCache,
    mx,
)

_STEP = 256
"""Buffers of attention caches grow in multiples of this many tokens, as mlx-lm's own do."""
_EVALUATED_BYTES = 16 << 20
_PROBE_TOKENS = 512
"""How far a cache of an unknown class is filled to see what a token takes in it."""


def layers_of(caches: Iterable[Any]) -> list[Any]:
    """The layers of a working cache; those of a `CacheList` one by one."""
    layers: list[Any] = []
    for cache in caches:
        if type(cache) is CacheList:
            layers.extend(layers_of(cache.caches))
        else:
            layers.append(cache)
    return layers


def arrays_in(value: Any) -> list[mx.array]:
    """All arrays in caches and in the containers around them, whatever their classes."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        value = vars(value).values() if hasattr(value, "__dict__") else ()
    return [array for item in value for array in arrays_in(item)]


def bytes_of(value: Any) -> int:
    """Bytes of all arrays in caches, unused ends of buffers included."""
    return sum(array.nbytes for array in arrays_in(value))


class Evaluation:
    """Evaluates arrays that are made one after the other, so many at a time that little is in memory twice.

    One evaluation for each of many small arrays would take longer than their copying.
    """

    def __init__(self) -> None:
        self._waiting: list[mx.array] = []
        self._bytes = 0

    def add(self, tree: Any) -> None:
        """These arrays too, now or soon."""
        arrays = arrays_in(tree)
        self._waiting += arrays
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes >= _EVALUATED_BYTES:
            self.finish()

    def finish(self) -> None:
        """All that still wait."""
        mx.eval(self._waiting)
        self._waiting, self._bytes = [], 0


def is_attention(layer: Any) -> bool:
    """True for a cache layer whose tokens can be cut out of its buffers."""
    return type(layer) in (KVCache, QuantizedKVCache)


def is_divisible(caches: Sequence[Any]) -> bool:
    """True when every layer is plain attention, so that a prefix may end at any token."""
    return all(is_attention(layer) for layer in layers_of(caches))


def _buffers(layer: Any) -> tuple[Any, Any]:
    return layer.keys, layer.values


def _map(function: Any, tree: Any) -> Any:
    """`function` of every array in `tree`; an attention layer that no token went through has None for buffers."""
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, item) for item in tree)
    return None if tree is None else function(tree)


def _token_bytes(layer: Any) -> int:
    """Bytes of one token in an attention layer, or in a window."""
    return sum(array.nbytes // array.shape[-2] for array in arrays_in(_buffers(layer)))


def _freeze(layer: Any) -> Any:
    """The state of a layer that is not attention; never changes afterwards."""
    if type(layer) is RotatingKVCache:
        _trim(layer)
    if type(layer) is not ArraysCache:
        return _own(copy.deepcopy(vars(layer)))
    layer.cache = _own(layer.cache)  # the working cache gives up the parents of its slices as well
    return list(layer.cache)


def _trim(layer: RotatingKVCache) -> None:
    """Give up what a long piece left in a window beyond its size: mlx-lm drops it at the next token anyway."""
    if layer.keys is None or layer.keys.shape[2] <= layer.max_size:
        return
    for name in ("keys", "values"):
        array = getattr(layer, name)
        end = array[..., array.shape[2] - layer.max_size + layer.keep :, :]
        setattr(layer, name, mx.concatenate([array[..., : layer.keep, :], end], axis=2))
    layer._idx = layer.max_size


def _own(value: Any) -> Any:
    """Copies of those arrays that are slices of larger ones: some models keep the end of a whole piece as their state."""
    if isinstance(value, mx.array):
        return mx.contiguous(value)
    if isinstance(value, dict):
        return {name: _own(item) for name, item in value.items()}
    return type(value)(_own(item) for item in value) if isinstance(value, tuple | list) else value


def _thaw(layer: Any, state: Any) -> None:
    if type(layer) is ArraysCache:
        layer.cache = list(state)
    else:
        vars(layer).update(copy.deepcopy(state))


class Backing:
    """A working cache whose buffers hold the deltas of the segments that it backs. Owned by the engine thread."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches
        self.layers = layers_of(caches)
        self._held: list[SegmentData] = []

    def hold(self, data: SegmentData) -> None:
        """Make `data`'s delta a window on these caches."""
        self._held.append(data)

    def forget(self, data: SegmentData) -> None:
        """`data` needs these caches no longer."""
        self._held = [held for held in self._held if held is not data]

    def flush(self) -> None:
        """Give every held segment arrays of its own; the caches stay usable. An error leaves what was held readable."""
        self._copy_out(empty=False)

    def dissolve(self) -> None:
        """As `flush`, and empty the caches layer by layer, so that little is in memory twice. They must not be used again."""
        self._copy_out(empty=True)

    def _copy_out(self, *, empty: bool) -> None:
        evaluation = Evaluation()
        for index, layer in enumerate(self.layers):
            for data in self._held:
                data.own(index, evaluation)
            if empty:
                vars(layer).clear()
        evaluation.finish()
        for data in self._held:
            data.detach()
        self._held = []

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
        self._attention = [is_attention(layer) for layer in backing.layers]
        self._divisible = all(self._attention)
        # One entry for each layer; None: the delta is a window on the backing cache.
        self._deltas: list[Any] = [None] * len(self._attention)
        self._backing: Backing | None = backing
        self._released = False
        layers = list(zip(backing.layers, self._attention, strict=True))
        self._states: list[Any] | None = [None if attention else _freeze(layer) for layer, attention in layers]
        mx.eval(arrays_in(self._states))
        self.delta_bytes = sum(_token_bytes(layer) for layer, attention in layers if attention) * (hi - lo)
        self._state_bytes = bytes_of(self._states)
        backing.hold(self)

    @property
    def state_bytes(self) -> int:
        """Bytes of the boundary states, 0 once dropped."""
        return self._state_bytes if self._states is not None else 0

    @property
    def has_state(self) -> bool:
        """True when a request may resume at `hi`."""
        return not self._released and (self._divisible or self._states is not None)

    def reads(self, backing: Backing) -> bool:
        """True when the delta is a window on `backing`."""
        return self._backing is backing

    @property
    def owned(self) -> bool:
        """True when the delta is in arrays of its own."""
        return self._backing is None

    def drop_state(self) -> None:
        """Keep the delta for descendants, free the states. On a divisible model there is nothing to free."""
        if not self._divisible:
            self._states = None

    def release(self) -> None:
        """Free everything."""
        self.detach()
        self._deltas, self._states, self._released = [None] * len(self._attention), None, True

    def own(self, layer: int, evaluation: Evaluation) -> None:
        """Copy the delta of one layer out of the backing cache."""
        if self._backing is not None and self._attention[layer] and self._deltas[layer] is None:
            delta = _map(mx.contiguous, self.delta(layer))
            evaluation.add(delta)
            self._deltas[layer] = delta

    def detach(self) -> None:
        """Forget the backing cache; every delta must be its own by then."""
        if self._backing is not None:
            self._backing.forget(self)
        self._backing = None

    def move(self, layer: int, cache: Any) -> None:
        """Read the delta of one layer from the attention cache `cache`, which holds a bit-equal copy, and free the own arrays.

        The slices hold that cache's buffers in memory: `lend` must follow before it is written to.
        """
        if self._deltas[layer] is not None:
            self._deltas[layer] = _map(lambda array: array[..., self.lo : self.hi, :], _buffers(cache))

    def unmove(self, layers: int) -> None:
        """Give the first `layers` layers arrays of their own again, after `move`."""
        for layer in range(layers):
            if self._deltas[layer] is not None:
                self._deltas[layer] = _map(mx.contiguous, self._deltas[layer])
                mx.eval(arrays_in(self._deltas[layer]))

    def lend(self, backing: Backing) -> None:
        """Read the delta from `backing`, which holds bit-equal copies of it, and free the own arrays.

        Does nothing once the segment was released.
        """
        if self._released or self._backing is backing:
            return
        self.detach()
        self._backing, self._deltas = backing, [None] * len(self._attention)
        backing.hold(self)

    def delta(self, layer: int, tokens: int | None = None) -> Any:
        """K/V of attention layer `layer`, the first `tokens` of the segment (all when None). Lazy slices."""
        hi = self.hi if tokens is None else self.lo + tokens
        own = self._deltas[layer]
        if own is not None:
            return own if hi == self.hi else _map(lambda array: array[..., : hi - self.lo, :], own)
        assert self._backing is not None, "a segment was read that has no arrays"
        return _map(lambda array: array[..., self.lo : hi, :], _buffers(self._backing.layers[layer]))

    def states(self) -> list[Any]:
        """The boundary states, None for attention layers."""
        assert self._states is not None, "a segment without states was resumed"
        return self._states

    def finite(self, *, delta: bool) -> bool:
        """False if a state, or the delta where asked for, contains NaN or infinity."""
        arrays = arrays_in(self._states)
        if delta:
            for layer, attention in enumerate(self._attention):
                if attention:
                    arrays += arrays_in(self.delta(layer))
        checks = [mx.all(mx.isfinite(array)) for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
        return not checks or bool(mx.all(mx.stack(checks)).item())


def materialise(
    caches: list[Any], path: Sequence[SegmentData], partial: tuple[SegmentData, int] | None = None, reserve_tokens: int = 0
) -> int:
    """Fill the empty working `caches` from a path of segments and return the number of tokens they then hold.

    `partial` adds the first tokens of one more segment (divisible models only). Attention buffers get room for
    `reserve_tokens` more. Each layer is evaluated by itself, so that no single copy is long, and the path's own arrays are
    freed as it goes: `SegmentData.lend` must follow for each of them before the caches are used.
    """
    tokens = path[-1].hi if path else 0
    if partial is not None:
        tokens += partial[1]
    if tokens == 0:
        return 0
    spare = (-(tokens + reserve_tokens)) % _STEP + reserve_tokens
    states = path[-1].states() if path and partial is None and not is_divisible(caches) else None
    layers, evaluation = layers_of(caches), Evaluation()
    done = 0
    try:
        for index, layer in enumerate(layers):
            if not is_attention(layer):
                assert states is not None
                _thaw(layer, states[index])
                continue
            deltas = [data.delta(index) for data in path]
            if partial is not None:
                deltas.append(partial[0].delta(index, partial[1]))
            if arrays_in(deltas):
                layer.keys, layer.values = _concatenate(deltas, spare)
                layer.offset = tokens
                del deltas
                evaluation.add(_buffers(layer))
                for data in path:
                    data.move(index, layer)
            done = index + 1
        evaluation.finish()
    except Exception:
        for data in path:  # back to arrays of their own: slices would keep the whole unfinished cache alive
            data.unmove(done)
        raise
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


def reserve(caches: Iterable[Any], tokens: int, spare_tokens: int = 0) -> None:
    """Give plain attention buffers room for `tokens` in all, at once instead of in steps that copy everything each time.

    One that must grow for that gets room for `spare_tokens` more.
    """
    capacity = -(-(tokens + spare_tokens) // _STEP) * _STEP
    for layer in layers_of(caches):
        if type(layer) is KVCache and layer.keys is not None and layer.keys.shape[2] < tokens:
            layer.keys, layer.values = _concatenate([(layer.keys, layer.values)], capacity - layer.keys.shape[2])


def measure_shape(model: LoadedModel) -> CacheShape:
    """What the model's caches take, measured on a short prompt. A rotating window counts at its full size."""
    caches = model.make_cache()
    _read(model, caches, 2)
    token_bytes = state_bytes = window_bytes = 0
    unknown: list[Any] = []
    for layer in layers_of(caches):
        if is_attention(layer):
            token_bytes += _token_bytes(layer)
        elif type(layer) is RotatingKVCache:
            window_bytes += _token_bytes(layer) * layer.max_size
        else:
            state_bytes += bytes_of(layer)
            unknown += [layer] if type(layer) is not ArraysCache else []
    if unknown:
        before = bytes_of(unknown)
        _read(model, caches, _PROBE_TOKENS)
        token_bytes += max(0, bytes_of(unknown) - before) // _PROBE_TOKENS
    return CacheShape(token_bytes, state_bytes, window_bytes)


def _read(model: LoadedModel, caches: list[Any], tokens: int) -> None:
    mx.eval(model.forward(mx.array([[0] * tokens]), caches)[:, -1], arrays_in(caches))
