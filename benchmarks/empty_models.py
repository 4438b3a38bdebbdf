"""Models that compute nothing: what is measured is everything around them."""

from __future__ import annotations

from typing import Any

from pooled_mlx.runner.model import ArraysCache, KVCache, LoadedModel, mx, wrap_model

KV_LAYERS, STATE_LAYERS = 10, 30
KV_HEADS, HEAD_DIM = 2, 32
STATE_HEADS, STATE_DIM = 4, 128
CONV_WIDTH = 1024


class _Nothing:
    """One fixed row of logits, and one attention cache `[batch, 1, tokens, 1]` that counts tokens."""

    def __init__(self, vocab: int) -> None:
        row = mx.zeros(vocab)
        row[5000] = 10.0
        self._row = row[None, None]
        mx.eval(self._row)
        self.layers = [None]

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def parameters(self) -> dict[str, Any]:
        return {"row": self._row}

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        batch, tokens = ids.shape
        new = mx.zeros((batch, 1, tokens, 1))
        keys, _ = cache[0].update_and_fetch(new, new)
        return mx.broadcast_to(self._row + keys[:, :1, :1, :1].reshape(batch, 1, 1), (batch, tokens, self._row.shape[-1]))


class _Shape(_Nothing):
    """The caches of Qwen3.6-35B-A3B, an eighth of their size: K/V of 2,560 bytes a token in 10 layers, states of 7.7 MiB in
    30 layers (there 20,480 bytes and 61.4 MiB). A state costs as much as 3,144 tokens, as it does there.
    """

    def make_cache(self) -> list[Any]:
        states: list[Any] = [ArraysCache(2) for _ in range(STATE_LAYERS)]
        for place in range(KV_LAYERS):
            states.insert(4 * place + 3, KVCache())
        return states

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        batch, tokens = ids.shape
        new = mx.ones((batch, KV_HEADS, tokens, HEAD_DIM), mx.float16)
        counted: Any = 0.0
        for layer in cache:
            if isinstance(layer, KVCache):
                keys, _ = layer.update_and_fetch(new, new)
                counted = counted + 0.0 * keys[:, :1, :1, :1].reshape(batch, 1, 1).astype(mx.float32)
            else:
                # Like a real layer, every step makes new states and reads the old ones.
                conv, state = layer.cache
                conv = mx.zeros((batch, 3, CONV_WIDTH), mx.float16) if conv is None else conv
                state = mx.zeros((batch, STATE_HEADS, STATE_DIM, STATE_DIM)) if state is None else state
                layer.cache = [conv + 0, state + 0]
        return mx.broadcast_to(self._row + counted, (batch, tokens, self._row.shape[-1]))


def kv_bytes_per_token() -> int:
    """Bytes of one token in the attention caches of `qwen36_shape`."""
    return KV_LAYERS * 2 * KV_HEADS * HEAD_DIM * 2


def state_bytes() -> int:
    """Bytes of the states of one row of `qwen36_shape`."""
    return STATE_LAYERS * (STATE_HEADS * STATE_DIM * STATE_DIM * 4 + 3 * CONV_WIDTH * 2)


def null_model(vocab: int) -> LoadedModel:
    """A model without any computation."""
    return wrap_model(_Nothing(vocab), {"model_type": "nothing"})


def qwen36_shape(vocab: int) -> LoadedModel:
    """A model without any computation, with the caches of a large hybrid in small."""
    return wrap_model(_Shape(vocab), {"model_type": "shape"})
