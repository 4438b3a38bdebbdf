"""What a scripted answer may do to the engine besides its text: be slow, and fail on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["nan", "raise", "stall"]


class ScriptedFault(RuntimeError):
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
