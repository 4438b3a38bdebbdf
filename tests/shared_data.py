"""Finds the shared test data (specs, traces, templates) beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(os.environ.get("POOLED_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def shared_path(name: str) -> Path:
    """The path of a shared file; skips the test where it is absent, fails under REQUIRE_SHARED=1."""
    path = _ROOT / name
    if path.exists():
        return path
    reason = f"shared test data {name} is not beside this checkout"
    if os.environ.get("REQUIRE_SHARED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
