"""Which prompt is read next when several are under way."""

from __future__ import annotations

from collections.abc import Sequence

from pooled_mlx.engine.prefill import Prefill
from pooled_mlx.engine.tree import agreement

_MOST_SKIPPED = 4
"""Pieces of shorter prompts that may go before one of the longest-waiting prompt."""


class PrefillOrder:
    """The shortest prompt first, but the oldest not later than every few pieces; twins of a prompt being read wait."""

    def __init__(self) -> None:
        self._skipped = 0

    def next(self, prefills: Sequence[Prefill]) -> Prefill | None:
        """The prompt to read a piece of; `prefills` in the order of their admission. None when there is none."""
        ready = [prefill for prefill in prefills if prefill.started or not _waits_for_twin(prefill, prefills)]
        if not ready:
            return None
        oldest = ready[0]
        if self._skipped >= _MOST_SKIPPED:
            self._skipped = 0
            return oldest
        shortest = min(ready, key=lambda prefill: prefill.remaining)
        self._skipped = 0 if shortest is oldest else self._skipped + 1
        return shortest


def _waits_for_twin(prefill: Prefill, prefills: Sequence[Prefill]) -> bool:
    """True while another prompt that is being read will soon have stored more of this one than the pool holds."""
    for other in prefills:
        if other is prefill or not other.started:
            continue
        shared = min(agreement(prefill.ids, other.ids), len(prefill.ids) - 1)
        if any(mark <= shared for mark in other.checkpoints_ahead):
            return True
    return False
