"""Who gets the machine next: a piece of a prompt, or the next tokens of the running streams. Pure but for the two memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pooled_mlx.engine.row import Stage

_LEAST_PREFILL = 0.5
"""What several batches leave to prompts, where one alone would not have taken more."""
_MOST_SKIPPED = 4
"""Pieces of shorter prompts that may go before one of the longest-waiting prompt."""


class View(NamedTuple):
    """What the schedule sees of one row, in the order of admission.

    READING: `remaining` tokens, of a prompt that was `begun` or not; it `waits` while another prompt that is being read will
    soon have stored more of it than the pool holds. PARKED: `backlog` events that its reader has not taken, `idle_seconds`
    since it was parked; a `stalled` one stays there.
    """

    stage: Stage
    remaining: int = 0
    begun: bool = False
    waits: bool = False
    backlog: int = 0
    idle_seconds: float = 0.0
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows by their places in the views: those that `resume`, those that are given up (`late`), the prompt to `read`.

    `skipped`: the pieces for which the oldest prompt has waited then.
    """

    resume: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    read: int | None = None
    skipped: int = 0


def schedule(views: Sequence[View], *, piece_is_due: bool, skipped: int, below: int, limit_seconds: float) -> Plan:
    """What this turn does. The shortest prompt is read first, but the oldest not later than every few pieces.

    `skipped` is the number of pieces for which the oldest one waited; a parked row resumes when its backlog is at most
    `below`, and is given up after `limit_seconds`.
    """
    resume: list[int] = []
    late: list[int] = []
    ready: list[int] = []
    for place, view in enumerate(views):
        if view.stage is Stage.PARKED and not view.stalled:
            if view.backlog <= below:
                resume.append(place)
            elif view.idle_seconds > limit_seconds:
                late.append(place)
        elif view.stage is Stage.READING and (view.begun or not view.waits):
            ready.append(place)
    if not ready or not piece_is_due:
        return Plan(resume, late, None, skipped)
    shortest = min(ready, key=lambda place: views[place].remaining)
    if skipped >= _MOST_SKIPPED or shortest == ready[0]:
        return Plan(resume, late, ready[0])
    return Plan(resume, late, shortest, skipped + 1)


class Share:
    """Divides the time between prefill and decode.

    A running stream keeps `prefill_share` of its own speed while prompts are read. Batches take turns, so that several of them
    need a larger part of the time; but each has its step before the next piece is read.
    """

    def __init__(self, prefill_share: float) -> None:
        self._share = prefill_share
        self._piece_seconds = 0.0
        self._step_seconds = 0.0
        self._steps = 0

    def piece_is_due(self, batches: int) -> bool:
        """True when a piece may be read now; `batches` is the number of those that run."""
        if not batches:
            return True
        part = min(self._share * batches, max(self._share, 1.0 - _LEAST_PREFILL))
        return self._steps >= batches and self._step_seconds >= self._piece_seconds * part / (1.0 - part)

    def piece_read(self, seconds: float) -> None:
        """A piece took `seconds`."""
        self._piece_seconds, self._step_seconds, self._steps = seconds, 0.0, 0

    def step_taken(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        self._step_seconds += seconds
        self._steps += 1


def padding(sizes: Sequence[int], token_bytes: int, row_bytes: int, limit: float) -> tuple[int, int] | None:
    """Bytes of a batch of rows of these `sizes` in tokens, and how many of them only pad; None where the useful bytes x `limit`
    would be exceeded. `row_bytes` is what a row takes whatever its length.
    """
    useful = sum(size * token_bytes + row_bytes for size in sizes)
    padded = len(sizes) * (max(sizes) * token_bytes + row_bytes)
    return (padded, padded - useful) if padded <= limit * useful else None
