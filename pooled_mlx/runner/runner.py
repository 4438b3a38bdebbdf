"""The runner: the engine's commands, carried out with MLX. Owned by the engine thread."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pooled_mlx.core.memory import CacheShape
from pooled_mlx.core.runner import Mark, Ranges, Run, RunnerFacts, SamplingParameters, Shape, Span
from pooled_mlx.runner import batch
from pooled_mlx.runner.buffers import Buffer, Evaluation, State
from pooled_mlx.runner.calibrate import PieceTimes
from pooled_mlx.runner.devices import DEVICE_ERRORS
from pooled_mlx.runner.layers import STEP, arrays_in, bytes_of, kind_of, layers_of
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.sampler import BatchSampler

_PROBE_TOKENS = 512
"""How far a cache of an unknown class is filled to see what a token takes in it."""


@dataclass(slots=True, eq=False)
class _Open:
    """What an open cache has beside its buffer: rows, the newest logits `[rows, vocab]`, the tokens chosen last `[rows]`, and
    the choices not taken yet. `read` tokens were read since `point`, where a draft that was wrong leads back to."""

    rows: int = 1
    logits: mx.array | None = None
    last: mx.array | None = None
    chosen: deque[batch.Chosen] = field(default_factory=deque)
    point: list[Any] = field(default_factory=list)
    read: int = 0


class MlxRunner:
    """Satisfies `core.runner.Runner`. `known_tokens` is the number of ids that the tokenizer knows, None for all; `times` is
    told how long pieces of prompts take.
    """

    def __init__(self, model: LoadedModel, known_tokens: int | None = None, times: PieceTimes | None = None) -> None:
        self.model, self._known_tokens = model, known_tokens
        self.times = times or PieceTimes(0, 0)
        self._buffers: dict[int, Buffer] = {}
        self._open: dict[int, _Open] = {}
        self._states: dict[int, State] = {}
        self._numbers = itertools.count(1)
        self._samplers: dict[tuple[SamplingParameters, ...], BatchSampler] = {}
        divisible = all(kind_of(layer).cuttable for layer in layers_of(model.make_cache()))
        self.facts = RunnerFacts(divisible, model.vocab_size, short_tail=model.parts is None)

    # --- one row's cache

    def open(self, spans: Sequence[Span], state: int | None, room: int, trims: Mapping[int, Ranges]) -> int:
        buffer = Buffer(self.model.make_cache())
        tokens = spans[-1].hi if spans else 0
        done: list[int] = []
        evaluation = Evaluation()
        try:
            for index in buffer.attention_layers if spans else ():
                parts = [
                    part
                    for span in spans
                    for part in self._buffers[span.buffer].cut(index, span.lo, span.hi)
                    if arrays_in(part)
                ]
                evaluation.add(buffer.fill(index, parts, tokens, _rounded(room)))
                del parts
                done.append(index)
                for number, ranges in trims.items():
                    evaluation.add(self._buffers[number].keep(index, ranges))
            evaluation.finish()
        except Exception:
            self._give_back(buffer, spans, trims, done)
            raise
        buffer.restore(None if state is None else self._states[state])
        return self._opened(buffer)

    def _give_back(self, donor: Buffer, spans: Sequence[Span], trims: Mapping[int, Ranges], layers: Sequence[int]) -> None:
        """Buffers that gave up their spans in some layers get them again, from the cache that they were copied to."""
        for number, kept in trims.items():
            held = tuple(sorted({*kept, *((span.lo, span.hi) for span in spans if span.buffer == number)}))
            for index in layers:
                if self._buffers[number].was_cut(index):
                    mx.eval(arrays_in(self._buffers[number].take_back(index, held, donor)))

    def reopen(self, buffer: int, state: int | None) -> None:
        self._buffers[buffer].reopen(None if state is None else self._states[state])
        self._open[buffer] = _Open()

    def room_of(self, cache: int) -> int:
        """See `Runner.room_of`."""
        return self._buffers[cache].room

    def grow(self, cache: int, tokens: int) -> None:
        self._buffers[cache].grow(_rounded(tokens))

    def read(self, cache: int, ids: np.ndarray[Any, Any], *, last: bool) -> None:
        buffer, open_ = self._buffers[cache], self._open[cache]
        buffer.advances()
        began = time.monotonic()
        chunk = mx.array(ids)[None]
        if last:
            open_.logits = self.model.last_logits(chunk, buffer.caches)
            mx.eval(open_.logits, arrays_in(buffer.caches))
        else:
            self.model.forward(chunk, buffer.caches)
            mx.eval(arrays_in(buffer.caches))
            self.times.add(len(ids), time.monotonic() - began)

    def mark(self, cache: int, lo: int, hi: int) -> Mark:
        buffer = self._buffers[cache]
        delta_bytes = buffer.token_bytes * (hi - lo)
        if self.facts.divisible:
            return Mark(delta_bytes, None, 0, self.finite([Span(cache, lo, hi)], None))
        number, state = next(self._numbers), buffer.freeze()
        self._states[number] = state
        try:
            return Mark(delta_bytes, number, state.bytes, self.finite([Span(cache, lo, hi)], number))
        except Exception:
            self.drop(number)
            raise

    # --- passes

    def step(self, cache: int, runs: Sequence[Run], shapes: Sequence[Shape] | None = None, *, places: int = 1) -> None:
        """See `Runner.step`. In one pass all runs are unread tokens or all are told, and of one length."""
        buffer, open_ = self._buffers[cache], self._open[cache]
        buffer.advances()
        open_.point = []
        if runs[0] is None:
            assert open_.last is not None, "no token was chosen"
            open_.logits = self.model.forward(open_.last[:, None], buffer.caches)[:, -1]
        else:
            ids = mx.array([list(run or ()) for run in runs])
            if open_.rows == 1 and ids.shape[1] > 1:
                open_.point, open_.read = buffer.point(), ids.shape[1]
            open_.logits = self.model.last_logits(ids, buffer.caches, places)
        if shapes is None:
            mx.async_eval(open_.logits)
        else:
            self.choose(cache, shapes)

    def choose(self, cache: int, shapes: Sequence[Shape]) -> None:
        open_ = self._open[cache]
        assert open_.logits is not None, "there is nothing to choose from"
        unread = open_.last if open_.chosen else None
        chosen = batch.choose(open_.logits, shapes, self._sampler(shapes), unread, self._known_tokens)
        mx.async_eval(*chosen)
        open_.chosen.append(chosen)
        open_.last, open_.logits = chosen[0], None

    def logits(self, cache: int) -> np.ndarray[Any, Any]:
        """See `Runner.logits`."""
        logits = self._open[cache].logits
        assert logits is not None, "there is nothing to choose from"
        return np.array(logits[0].astype(mx.float32))

    def take(self, cache: int) -> list[int | None]:
        chosen, finite = self._open[cache].chosen[0]
        tokens: Any = chosen.tolist()
        flags: Any = finite.tolist()
        self._open[cache].chosen.popleft()
        return [int(token) if flag else None for token, flag in zip(tokens, flags, strict=True)]

    def keep(self, cache: int, tokens: int) -> int:
        buffer, open_ = self._buffers[cache], self._open[cache]
        point, open_.point = open_.point, []
        if tokens < open_.read:
            return buffer.back_to(point, tokens)
        return tokens

    def _sampler(self, shapes: Sequence[Shape]) -> BatchSampler:
        """The sampler of these rows; rebuilt when the rows change."""
        rows = tuple(shape.sampling for shape in shapes)
        sampler = self._samplers.get(rows)
        if sampler is None:
            if len(self._samplers) >= _MOST_SAMPLERS:
                self._samplers.clear()
            sampler = self._samplers[rows] = BatchSampler(rows)
        return sampler

    # --- batches

    def can_join(self, cache: int, other: int) -> bool:
        """See `Runner.can_join`."""
        return all(
            self._open[number].rows > 1
            or all(kind.joins(layer) for kind, layer in zip(buffer.kinds, buffer.layers, strict=True))
            for number, buffer in ((cache, self._buffers[cache]), (other, self._buffers[other]))
        )

    def join(self, cache: int, other: int, trims: Mapping[int, Ranges]) -> int:
        numbers = (cache, other)
        open_ = [self._open[number] for number in numbers]
        sources = [(self._buffers[number], self._open[number].rows > 1) for number in numbers]
        joined = batch.join(sources, [trims.get(number) for number in numbers])
        pending = [each.chosen[-1] for each in open_]
        chosen: batch.Chosen = (
            mx.concatenate([tokens for tokens, _ in pending]),
            mx.concatenate([finite for _, finite in pending]),
        )
        mx.eval(*chosen)
        for number in numbers:
            was = self._open.pop(number)
            if was.rows > 1:
                del self._buffers[number]
        return self._opened(joined, _Open(sum(each.rows for each in open_), None, chosen[0], deque([chosen])))

    def leave(self, cache: int, gone: Sequence[int]) -> tuple[list[int], int | None]:
        open_ = self._open[cache]
        if open_.rows == 1:
            return [cache], None
        source = self._buffers[cache]
        stay = [place for place in range(open_.rows) if place not in gone]
        alone = [*gone, *(stay if len(stay) == 1 else ())]
        plain = [batch.extract(source, place) for place in alone]
        if len(stay) > 1:
            batch.keep_rows(source, stay)
        numbers = [self._opened(buffer, _chosen_of(open_, [place])) for buffer, place in zip(plain, alone, strict=True)]
        if len(stay) > 1:
            self._open[cache] = _chosen_of(open_, stay)
            return numbers, cache
        self.free(cache)
        return numbers[: len(gone)], numbers[-1] if stay else None

    # --- buffers and states

    def seal(self, cache: int) -> None:
        self._open.pop(cache, None)
        self._buffers[cache].seal()

    def trim(self, buffer: int, ranges: Ranges) -> None:
        evaluation, owner = Evaluation(), self._buffers[buffer]
        for index in owner.attention_layers:
            evaluation.add(owner.keep(index, ranges))
        evaluation.finish()

    def free(self, cache: int) -> None:
        self._open.pop(cache, None)
        self._buffers.pop(cache, None)

    def drop(self, state: int) -> None:
        if (dropped := self._states.pop(state, None)) is not None:
            dropped.held = False

    def finite(self, spans: Sequence[Span], state: int | None) -> bool:
        arrays = arrays_in(self._states[state].layers) if state is not None else []
        for span in spans:
            buffer = self._buffers[span.buffer]
            arrays += arrays_in([buffer.cut(index, span.lo, span.hi) for index in buffer.attention_layers])
        checks = [mx.all(mx.isfinite(array)) for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
        return not checks or bool(mx.all(mx.stack(checks)).item())

    def bytes_of(self, cache: int) -> int:
        """See `Runner.bytes_of`."""
        return self._buffers[cache].bytes

    def device_failed(self, error: Exception) -> bool:
        """See `Runner.device_failed`."""
        return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in DEVICE_ERRORS)

    def clear_unused(self) -> None:
        """See `Runner.clear_unused`."""
        mx.clear_cache()

    def reset(self, keep: Collection[int]) -> None:
        for number in [number for number in self._buffers if number not in keep]:
            self.free(number)
        mx.clear_cache()
        mx.eval(self.model.forward(mx.array([[0]]), self.model.make_cache()))

    def _opened(self, buffer: Buffer, open_: _Open | None = None) -> int:
        number = next(self._numbers)
        self._buffers[number], self._open[number] = buffer, open_ or _Open()
        return number


_MOST_SAMPLERS = 64


def _chosen_of(open_: _Open, places: Sequence[int]) -> _Open:
    """The choices of some rows of a batch."""
    which = mx.array(list(places))
    logits, last = (None if array is None else array[which] for array in (open_.logits, open_.last))
    return _Open(len(places), logits, last, deque((tokens[which], finite[which]) for tokens, finite in open_.chosen))


def _rounded(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def measure_shape(model: LoadedModel) -> CacheShape:
    """What the model's caches take, measured on a short prompt. A rotating window counts at its full size."""
    caches = model.make_cache()
    _read(model, caches, 2)
    layers = [(kind_of(layer), layer) for layer in layers_of(caches)]
    token_bytes = sum(kind.token_bytes(layer) for kind, layer in layers)
    windows = sum(kind.row_bytes(layer) for kind, layer in layers if hasattr(layer, "max_size"))
    states = sum(kind.row_bytes(layer) for kind, layer in layers) - windows
    unknown = [layer for kind, layer in layers if kind.size_mark(layer) < 0]
    if unknown:
        before = bytes_of(unknown)
        _read(model, caches, _PROBE_TOKENS)
        token_bytes += max(0, bytes_of(unknown) - before) // _PROBE_TOKENS
    return CacheShape(token_bytes, states, windows)


def _read(model: LoadedModel, caches: list[Any], tokens: int) -> None:
    mx.eval(model.forward(mx.array([[0] * tokens]), caches)[:, -1], arrays_in(caches))
