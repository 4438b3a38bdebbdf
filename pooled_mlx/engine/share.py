"""Who gets the machine next: a piece of a prompt, or the next tokens of the running streams."""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_PREFILL = 0.5
"""What several decode groups leave to prompts, where one group alone would not have taken more."""
_NAP_SECONDS = 0.02


class Share:
    """Divides the time between prefill and decode.

    A running stream keeps `prefill_share` of its own speed while prompts are read. Groups of streams take turns, so that
    several of them need a larger part of the time; but every group has its step before the next piece is read.
    """

    def __init__(self, prefill_share: float) -> None:
        self._share = prefill_share
        self._piece_seconds = 0.0
        self._step_seconds = 0.0
        self._steps = 0

    def piece_is_due(self, groups: int) -> bool:
        """True when a piece may be read now; `groups` is the number of decode groups that run."""
        if not groups:
            return True
        part = min(self._share * groups, max(self._share, 1.0 - _LEAST_PREFILL))
        return self._steps >= groups and self._step_seconds >= self._piece_seconds * part / (1.0 - part)

    def piece_read(self, seconds: float) -> None:
        """A piece took `seconds`."""
        self._piece_seconds, self._step_seconds, self._steps = seconds, 0.0, 0

    def step_taken(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        self._step_seconds += seconds
        self._steps += 1


def pause(seconds: float, over: Callable[[], bool]) -> None:
    """Sleep for a scripted slowness, but not longer than a moment after `over()` became true."""
    end = time.monotonic() + seconds
    while not over() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _NAP_SECONDS))
