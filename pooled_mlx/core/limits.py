"""Limits and word lists that several parts share: each once."""

from __future__ import annotations

from pooled_mlx.core.request import Effort

MAX_TOP_K = 64
"""The sampler draws among so many candidates at most."""
LONGEST_DEFAULT_CONTEXT = 131_072
"""Tokens of context that a model is given by itself at most."""
EFFORTS: tuple[Effort, ...] = ("low", "medium", "high", "xhigh", "max")
"""Levels of thinking that a request may name."""
NO_EFFORT = ("none", "minimal")
"""Words for thinking off."""
