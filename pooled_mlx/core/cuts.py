"""Canonical cuts: where a prompt is cut into segments, and the pieces in which it is prefilled.

Both are pure functions of the prompt's boundaries and of a `CutRule` that never changes while the process runs. A prompt that
extends another one is cut at the same places as far as they agree, so a warm request runs through the model in exactly the
pieces of a cold one, and its result is the same bit for bit. All positions are token counts from the start of the prompt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

LEAST_STEP = 32
"""Tokens below which a piece is not halved: every piece has its costs."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """The lengths, in tokens, that decide all cuts.

    `step` is the longest prefill piece, `spacing` the longest stretch without a checkpoint, `minimum` the shortest distance
    of a checkpoint from the one before it. `shrinks` are positions, ascending, from which on pieces begin to be shorter, each
    with its step: where attention scores take memory, a piece far behind must be short. Raises ValueError unless
    1 <= minimum <= spacing, 1 <= step, and each step divides the one before it.
    """

    step: int
    spacing: int
    minimum: int = 64
    shrinks: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step is {self.step} tokens; it must be at least 1")
        if not 1 <= self.minimum <= self.spacing:
            raise ValueError(
                f"minimum is {self.minimum} and spacing {self.spacing} tokens; they must satisfy 1 <= minimum <= spacing"
            )
        before = (0, self.step)
        for position, step in self.shrinks:
            if position <= before[0] or not 1 <= step < before[1] or before[1] % step:
                raise ValueError(f"from token {position} on the step is {step}; before, from {before[0]} on, it is {before[1]}")
            before = (position, step)

    def halved(self) -> CutRule:
        """Pieces half as long everywhere; the same rule where they are too short for that."""
        steps = [self.step, *(step for _, step in self.shrinks)]
        if any(step % 2 for step in steps) or self.step // 2 < LEAST_STEP:
            return self
        return replace(self, step=self.step // 2, shrinks=tuple((position, step // 2) for position, step in self.shrinks))

    def step_at(self, position: int) -> int:
        """The longest piece that begins at `position`."""
        index = bisect_right(self.shrinks, position, key=lambda shrink: shrink[0])
        return self.shrinks[index - 1][1] if index else self.step

    def floor(self, anchor: int, position: int) -> int:
        """The last end of whole pieces, the first of which begins at `anchor`, that is not behind `position`."""
        at = anchor
        for until, step in zip([start for start, _ in self.shrinks], [self.step, *(s for _, s in self.shrinks)], strict=False):
            if at < until:
                whole, wanted = (position - at) // step, -((at - until) // step)
                at += min(whole, wanted) * step
                if whole < wanted:
                    return at
        step = self.step_at(at)
        return at + (position - at) // step * step


@dataclass(frozen=True, slots=True)
class Piece:
    """One forward pass over the tokens start..end; `checkpoint` says that a segment is cut at its end."""

    start: int
    end: int
    checkpoint: bool

    def __len__(self) -> int:
        return self.end - self.start


def checkpoints(boundaries: Sequence[int], length: int, rule: CutRule) -> tuple[int, ...]:
    """The positions 0 < p <= `length` at which a segment is cut, ascending.

    From the left: a boundary is kept unless it lies closer than `rule.minimum` to the last kept position, and where
    `rule.spacing` tokens hold no kept boundary, their end is kept instead. Nothing to the right of a position decides about
    it, so the checkpoints of a prefix are those of the whole that lie inside it. `boundaries` need not be sorted; those
    outside of 1..length are ignored.
    """
    kept: list[int] = []
    last = 0
    for boundary in sorted({b for b in boundaries if 0 < b <= length}):
        while last + rule.spacing < boundary:
            last += rule.spacing
            kept.append(last)
        if boundary - last >= rule.minimum:
            last = boundary
            kept.append(last)
    while last + rule.spacing <= length:
        last += rule.spacing
        kept.append(last)
    return tuple(kept)


def pieces(start: int, checkpoints: Sequence[int], length: int, rule: CutRule) -> tuple[Piece, ...]:
    """The forward passes that take a prompt of `length` tokens from the resume point `start` to its end.

    `checkpoints` are those of the whole prompt, ascending. The grid of whole steps restarts at `start` and at each
    checkpoint. A start that no prefill stops at (the end of an adopted answer) takes the place of a checkpoint less than
    `rule.minimum` behind it: that one is neither cut nor stopped at. Raises ValueError unless 0 <= start < length, because
    at least one token must be computed to have logits.
    """
    if not 0 <= start < length:
        raise ValueError(f"prefill cannot start at {start} of {length} tokens; at least one token must be left to compute")
    stops = list(checkpoints[bisect_right(checkpoints, start) :])
    if stops and stops[0] - start < rule.minimum and not _on_grid(start, checkpoints, rule):
        del stops[0]
    result: list[Piece] = []
    at = start
    cut_at_end = length in stops
    for stop in [*(s for s in stops if s < length), length]:
        while at < stop:
            end = min(at + rule.step_at(at), stop)
            result.append(Piece(at, end, end == stop and (stop < length or cut_at_end)))
            at = end
    return tuple(result)


def resume_positions(segment_start: int, segment_end: int, rule: CutRule) -> list[int]:
    """Where a model whose cache can be cut anywhere may resume inside a segment: its grid positions before its end."""
    at, positions = segment_start, list[int]()
    while (at := at + rule.step_at(at)) < segment_end:
        positions.append(at)
    return positions


def _on_grid(position: int, checkpoints: Sequence[int], rule: CutRule) -> bool:
    index = bisect_right(checkpoints, position)
    anchor = checkpoints[index - 1] if index else 0
    return rule.floor(anchor, position) == position
