"""The only owners of cached arrays: buffers with the layers of one cache each, and frozen states.

A buffer is open (its rows write at its end) or sealed (read only, its live state given up). Spans are positions of the path
that it was made for; a sealed buffer may have given up all but some ranges of it, each layer for itself, so that an error in
the middle leaves every layer readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pooled_mlx.core.runner import Ranges
from pooled_mlx.runner.layers import AttentionKind, arrays_in, bytes_of, kind_of, layers_of, pieces_of
from pooled_mlx.runner.model import mx

_EVALUATED_BYTES = 16 << 20


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


class State:
    """The frozen state of every layer but attention at one token. `held` until it is given up."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.bytes = bytes_of(layers)
        self.held = True


class Buffer:
    """The layers of one cache: of one row, or of a batch (which has no spans). `live`: something was read into them."""

    def __init__(self, caches: list[Any], *, live: bool = False) -> None:
        self.caches = caches
        self.layers = layers_of(caches)
        self.kinds = [kind_of(layer) for layer in self.layers]
        self._live = live
        self._frozen: State | None = None
        """What was frozen or restored last, if nothing was read since: the live state is the same arrays."""
        self._ranges: list[Ranges | None] = [None] * len(self.layers)
        self._measured: tuple[Any, int] = (None, 0)

    # --- as the cache of one row

    def freeze(self) -> State:
        """The state at the end."""
        state = State([None if kind.cuttable else kind.state(layer) for kind, layer in self._pairs()])
        mx.eval(arrays_in(state.layers))
        self._live, self._frozen = True, state
        return state

    def advances(self) -> None:
        """Something is read: the live state is the cache's own from here on."""
        self._live, self._frozen = True, None

    def restore(self, state: State | None) -> None:
        """Take over a frozen state."""
        if state is not None:
            for (kind, layer), frozen in zip(self._pairs(), state.layers, strict=True):
                if not kind.cuttable:
                    kind.restore(layer, frozen)
        self._live, self._frozen = state is not None, state

    def reopen(self, state: State | None) -> None:
        """Go on at the end of a sealed buffer that has let go of nothing but its room."""
        self._ranges = [None] * len(self.layers)
        self.restore(state)

    def point(self) -> list[Any]:
        """Where every layer is now, for `back_to`; valid until the next run but one."""
        return [kind.point(layer) for kind, layer in self._pairs()]

    def back_to(self, point: list[Any], tokens: int) -> int:
        """Forget what was read since `point` but its first `tokens`; how many of those are left: all, or none where a layer
        cannot be cut."""
        left = tokens if all(kind.cuttable for kind in self.kinds) else 0
        for (kind, layer), there in zip(self._pairs(), point, strict=True):
            kind.back_to(layer, there, left)
        return left

    def fill(self, index: int, parts: Sequence[Any], tokens: int, room: int) -> Any:
        """Copies of K/V `parts` become attention layer `index`; returns its arrays, not evaluated yet."""
        kind, layer = self.attention(index)
        kind.fill(layer, parts, tokens, room)
        return (layer.keys, layer.values)

    def grow(self, room: int) -> None:
        """Room for `room` tokens in every attention layer."""
        for index in self.attention_layers:
            kind, layer = self.attention(index)
            kind.grow(layer, room)

    @property
    def room(self) -> int:
        """Tokens that the attention layers can hold."""
        return max((self.attention(index)[0].room(self.layers[index]) for index in self.attention_layers), default=0)

    # --- as a sealed buffer

    @property
    def attention_layers(self) -> list[int]:
        """The places of the layers whose tokens can be cut."""
        return [index for index, kind in enumerate(self.kinds) if kind.cuttable]

    def attention(self, index: int) -> tuple[AttentionKind, Any]:
        """Kind and layer of an attention layer."""
        kind = self.kinds[index]
        assert isinstance(kind, AttentionKind)
        return kind, self.layers[index]

    def seal(self) -> None:
        """Give up the live state. What is in the attention layers stays."""
        for kind, layer in self._pairs():
            if not kind.cuttable:
                kind.clear(layer)
        self._live, self._frozen = False, None

    def was_cut(self, index: int) -> bool:
        """True when the layer has let go of something."""
        return self._ranges[index] is not None

    @property
    def token_bytes(self) -> int:
        """K/V bytes of one token."""
        return sum(self.kinds[index].token_bytes(self.layers[index]) for index in self.attention_layers)

    def cut(self, index: int, lo: int, hi: int) -> list[Any]:
        """K/V of the path's tokens `lo..hi` in attention layer `index`, in parts. Lazy slices."""
        kind, layer = self.attention(index)
        ranges = self._ranges[index]
        places = [(lo, hi)] if ranges is None else pieces_of(ranges, lo, hi)
        return [kind.cut(layer, *place) for place in places]

    def keep(self, index: int, ranges: Ranges) -> Any:
        """Let go of all but `ranges` of attention layer `index`; returns the new arrays, not evaluated yet."""
        kind, layer = self.attention(index)
        kind.keep(layer, [part for lo, hi in ranges for part in self.cut(index, lo, hi)])
        self._ranges[index] = ranges
        return (layer.keys, layer.values)

    def take_back(self, index: int, ranges: Ranges, donor: Buffer) -> Any:
        """Hold `ranges` again: what was let go of is copied from `donor`, which has all of it."""
        kind, layer = self.attention(index)
        held = self._ranges[index] or ()
        parts = [
            part
            for lo, hi in ranges
            for part in (self.cut(index, lo, hi) if any(a <= lo and hi <= b for a, b in held) else donor.cut(index, lo, hi))
        ]
        kind.keep(layer, parts)
        self._ranges[index] = ranges
        return (layer.keys, layer.values)

    # --- what it takes

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, without a live state that a frozen one shares."""
        owns_state = self._live and not (self._frozen is not None and self._frozen.held)
        counted = [(kind, layer) for kind, layer in self._pairs() if kind.cuttable or owns_state]
        marks = [kind.size_mark(layer) for kind, layer in counted]
        if self._measured[0] != marks or -1 in marks:
            self._measured = (marks, bytes_of([layer for _, layer in counted]))
        return self._measured[1]

    def _pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.kinds, self.layers, strict=True))
