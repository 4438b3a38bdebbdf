"""`GET /health`: alive and ready, or why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def health_answer(facts: Mapping[str, Any], *, authorized: bool) -> tuple[int, dict[str, Any]]:
    """Status and body. 200 while the engine lives and the model is ready, 503 otherwise.

    `facts` are the engine's (`Engine.health`). Without the token of a server that has one, the body says only yes or no.
    """
    up = bool(facts.get("ok")) and bool(facts.get("ready"))
    return (200 if up else 503), (dict(facts) if authorized else {"ok": up})
