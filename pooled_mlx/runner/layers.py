"""What can be done with one layer of a prompt cache: one class for each kind. Nothing else looks into mlx-lm's cache objects.

Attention layers hold K/V `[1, kv_heads, tokens, head_dim]`, which can be cut at any token. All others hold a state, which is
frozen at checkpoints: recurrent arrays are kept by reference, since they are replaced and never written in place; windows and
unknown classes are copied, which copies no memory before the next write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pooled_mlx.core.runner import Ranges
from pooled_mlx.runner.model import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache, mx

STEP = 256
"""Buffers of attention layers grow in multiples of this many tokens, as mlx-lm's own do."""


def arrays_in(value: Any) -> list[mx.array]:
    """All arrays in caches, states and the containers around them, whatever their classes."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        value = vars(value).values() if hasattr(value, "__dict__") else ()
    return [array for item in value for array in arrays_in(item)]


def bytes_of(value: Any) -> int:
    """Bytes of all arrays in caches and states, unused ends of buffers included."""
    return sum(array.nbytes for array in arrays_in(value))


def layers_of(caches: Iterable[Any]) -> list[Any]:
    """The layers of a working cache; those of a `CacheList` one by one."""
    layers: list[Any] = []
    for cache in caches:
        layers.extend(layers_of(cache.caches) if type(cache) is CacheList else [cache])
    return layers


def _map(function: Callable[[mx.array], Any], tree: Any) -> Any:
    """`function` of every array in `tree`; a layer that no token went through has None for buffers."""
    if isinstance(tree, dict):
        return {name: _map(function, item) for name, item in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, item) for item in tree)
    return function(tree) if isinstance(tree, mx.array) else tree


def _joined(trees: Sequence[Any], spare: int = 0) -> Any:
    """K/V trees along the token axis, and `spare` zero tokens behind them, in arrays of their own."""
    first = trees[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined([tree[index] for tree in trees], spare) for index in range(len(first)))
    arrays = list(trees)
    if spare:
        *head, _, width = first.shape
        arrays.append(mx.zeros((*head, spare, width), first.dtype))
    # A single part is copied as well: whoever gets it writes into it.
    return mx.concatenate(arrays, axis=-2) if len(arrays) > 1 else mx.contiguous(first) + 0


class StateKind:
    """A layer of an unknown class: everything in it is its state."""

    cuttable = False

    def token_bytes(self, layer: Any) -> int:
        """Bytes that one token more takes, 0 where the layer does not grow with its tokens."""
        return 0

    def row_bytes(self, layer: Any) -> int:
        """Bytes that a row takes in it whatever its length, once it is full."""
        return bytes_of(layer)

    def size_mark(self, layer: Any) -> int:
        """A number that changes when the layer's bytes do; -1 where only counting tells."""
        return -1

    def state(self, layer: Any) -> Any:
        """The layer as it is now; never changes afterwards."""
        return _owned(copy.deepcopy(vars(layer)))

    def restore(self, layer: Any, state: Any) -> None:
        """Make an empty layer what `state` says."""
        vars(layer).update(copy.deepcopy(state))

    def point(self, layer: Any) -> Any:
        """Where the layer is before a run of several tokens, for `back_to` right after it."""
        return self.state(layer)

    def back_to(self, layer: Any, point: Any, tokens: int) -> None:
        """Forget what was read since `point`; a layer that can be cut keeps the first `tokens` of it."""
        self.restore(layer, point)

    def clear(self, layer: Any) -> None:
        """Give up the live state."""
        vars(layer).clear()

    def joins(self, layer: Any) -> bool:
        """True when the layer has a batch form that holds the same."""
        return hasattr(layer, "merge") and getattr(layer, "keys", layer) is not None

    def left(self, layer: Any) -> None:
        """The layer was cut out of a batch: it must not keep the batch's arrays alive."""


def _owned(value: Any) -> Any:
    """Copies of arrays that may be slices of larger ones: some models keep the end of a whole piece as their state."""
    return _map(mx.contiguous, value)


class RecurrentKind(StateKind):
    """`ArraysCache`: Gated DeltaNet, Mamba, convolutions."""

    def size_mark(self, layer: Any) -> int:
        return 0 if layer.cache[0] is None else 1

    def state(self, layer: Any) -> Any:
        layer.cache = _owned(layer.cache)  # the working cache gives up the parents of its slices as well
        return list(layer.cache)

    def restore(self, layer: Any, state: Any) -> None:
        layer.cache = list(state)

    def point(self, layer: Any) -> Any:
        return list(layer.cache)  # its arrays are replaced, never written to

    def clear(self, layer: Any) -> None:
        layer.cache = [None] * len(layer.cache)

    def joins(self, layer: Any) -> bool:
        return all(array is not None for array in layer.cache)

    def left(self, layer: Any) -> None:
        layer.cache = _owned(layer.cache)


class WindowKind(StateKind):
    """`RotatingKVCache`: sliding windows."""

    def row_bytes(self, layer: Any) -> int:
        return _per_token(layer) * layer.max_size

    def size_mark(self, layer: Any) -> int:
        return 0 if layer.keys is None else layer.keys.shape[2]

    def state(self, layer: Any) -> Any:
        self._cut_to_size(layer)
        return _owned(copy.deepcopy(vars(layer)))

    def point(self, layer: Any) -> Any:
        return dict(vars(layer))  # one token alone is written in place, several make new arrays

    def back_to(self, layer: Any, point: Any, tokens: int) -> None:
        vars(layer).update(point)

    def joins(self, layer: Any) -> bool:
        # mlx-lm's batch of windows keeps no first tokens, and none can be made of a layer without arrays.
        return layer.keys is not None and not layer.keep

    @staticmethod
    def _cut_to_size(layer: Any) -> None:
        """Give up what a long piece left in a window beyond its size: mlx-lm drops it at the next token anyway."""
        if layer.keys is None or layer.keys.shape[2] <= layer.max_size:
            return
        for name in ("keys", "values"):
            array = getattr(layer, name)
            end = array[..., array.shape[2] - layer.max_size + layer.keep :, :]
            setattr(layer, name, mx.concatenate([array[..., : layer.keep, :], end], axis=2))
        layer._idx = layer.max_size


class AttentionKind(StateKind):
    """`KVCache`: full attention."""

    cuttable = True

    def token_bytes(self, layer: Any) -> int:
        return _per_token(layer)

    def row_bytes(self, layer: Any) -> int:
        return 0

    def size_mark(self, layer: Any) -> int:
        return self.room(layer)

    def room(self, layer: Any) -> int:
        """Tokens that the buffers hold, used or not; 0 for a layer that the model never used."""
        arrays = arrays_in((layer.keys, layer.values))
        return arrays[0].shape[-2] if arrays else 0

    def point(self, layer: Any) -> Any:
        return layer.offset

    def back_to(self, layer: Any, point: Any, tokens: int) -> None:
        layer.offset = point + tokens  # what lies behind it is written over

    def cut(self, layer: Any, lo: int, hi: int) -> Any:
        """K/V of the places `lo..hi` of the buffers. Lazy slices."""
        return _map(lambda array: array[..., lo:hi, :], (layer.keys, layer.values))

    def fill(self, layer: Any, parts: Sequence[Any], tokens: int, room: int) -> None:
        """Make an empty layer hold these `parts`, `tokens` in all, and room for `room`."""
        if arrays_in(list(parts)):
            layer.keys, layer.values = _joined(parts, max(0, room - tokens))
            layer.offset = tokens

    def grow(self, layer: Any, room: int) -> None:
        """Room for `room` tokens, at once instead of in steps that copy everything each time."""
        has = self.room(layer)
        if has and has < room:
            layer.keys, layer.values = _joined([(layer.keys, layer.values)], room - has)

    def keep(self, layer: Any, parts: Sequence[Any]) -> None:
        """Hold these `parts` of a sealed buffer and nothing else."""
        layer.keys, layer.values = _joined(parts) if parts and arrays_in(list(parts)) else (None, None)

    def clear(self, layer: Any) -> None:
        layer.keys = layer.values = None


class QuantizedKind(AttentionKind):
    """`QuantizedKVCache`: as full attention, in tuples of words, scales and biases. mlx-lm has no batch form of it."""

    def joins(self, layer: Any) -> bool:
        return False


def _per_token(layer: Any) -> int:
    return sum(array.nbytes // array.shape[-2] for array in arrays_in((layer.keys, layer.values)))


_KINDS: dict[type, StateKind] = {
    KVCache: AttentionKind(),
    QuantizedKVCache: QuantizedKind(),
    RotatingKVCache: WindowKind(),
    ArraysCache: RecurrentKind(),
}
_OPAQUE = StateKind()


def kind_of(layer: Any) -> StateKind:
    """The kind of a plain cache layer."""
    return _KINDS.get(type(layer), _OPAQUE)


def pieces_of(ranges: Ranges, lo: int, hi: int) -> list[tuple[int, int]]:
    """Where the path's tokens `lo..hi` lie in arrays that hold only `ranges`, one after the other.

    Raises ValueError when they do not hold them all.
    """
    places: list[tuple[int, int]] = []
    base = 0
    for start, end in ranges:
        if start <= lo < end:
            last = min(end, hi)
            places.append((base + lo - start, base + last - start))
            lo = last
        base += end - start
    if lo < hi:
        raise ValueError(f"tokens {lo}..{hi} were given up")
    return places
