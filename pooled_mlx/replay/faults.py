"""What a scripted answer may do to the engine besides its text: be slow, and fail on purpose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pooled_mlx.core.errors import OwnFault
from pooled_mlx.engine.row import Row

_NAP_SECONDS = 0.02
FaultKind = Literal["nan", "raise", "stall"]


class ScriptedFault(OwnFault):
    """The failure that a scripted answer asked for."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Pace and failure of one scripted answer; `at_token` counts the answer's tokens from 0."""

    kind: FaultKind | None = None
    at_token: int = 0
    token_seconds: float = 0.0
    prefill_seconds_per_1000: float = 0.0

    def is_due(self, kind: FaultKind, position: int) -> bool:
        """True when the fault `kind` happens at answer token `position`."""
        return self.kind == kind and position >= self.at_token

    def raise_if_due(self, position: int) -> None:
        """Raise `ScriptedFault` when that is what should happen at answer token `position`."""
        if self.is_due("raise", position):
            raise ScriptedFault(f"scripted fault at token {position}")

    def pause_seconds(self, what: Literal["token", "prefill"], tokens: int) -> float:
        """How long the model is to have taken over `tokens` more than it did."""
        if what == "token":
            return self.token_seconds * tokens
        return self.prefill_seconds_per_1000 * tokens / 1000


class ScriptHook:
    """Makes one row say the tokens `ids` (None: what its model says) and fail as it was asked to. Satisfies `Hook`."""

    def __init__(self, ids: Sequence[int] | None = None, faults: Faults | None = None) -> None:
        self._ids = ids
        self.faults = faults or Faults()
        self._place = 0

    def shape(self, position: int, ahead: int) -> tuple[int | None, bool]:
        return self._wanted(ahead), self.faults.is_due("nan", position)

    def take(self, token: int, position: int) -> None:
        """See `Hook.take`. Raises `ScriptedFault` when that is not the script's token, too: nothing is said in its place."""
        self.faults.raise_if_due(position)
        wanted = self._wanted(0)
        if self._ids is not None and token != wanted:
            raise ScriptedFault(f"token {self._place} of the scripted answer is {wanted}, but the row took {token}")
        self._place += 1

    def stalled(self, position: int) -> bool:
        return self.faults.is_due("stall", position)

    def _wanted(self, ahead: int) -> int | None:
        """The script's token after those taken and `ahead` more; None past its end."""
        place = self._place + ahead
        return self._ids[place] if self._ids is not None and place < len(self._ids) else None


class Slowness:
    """Takes the time that scripted answers ask for. Satisfies `Pace`; `hurry` may be called by any thread."""

    def __init__(self) -> None:
        self.hurried = False

    def hurry(self) -> None:
        """Pauses end at once, from now on."""
        self.hurried = True

    def __call__(self, rows: Sequence[Row], what: Literal["token", "prefill"], tokens: int) -> None:
        """Wait as long as the slowest of the rows asks for, but not longer than a moment after nobody wants it any more."""
        hooks = [row.hook for row in rows]
        seconds = max((hook.faults.pause_seconds(what, tokens) for hook in hooks if isinstance(hook, ScriptHook)), default=0.0)
        end = time.monotonic() + seconds
        while not (self.hurried or any(row.cancelled for row in rows)) and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
