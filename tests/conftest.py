"""For all tests: how long an example takes says nothing about it on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pooled", deadline=None)
settings.load_profile("pooled")
