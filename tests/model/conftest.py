"""The embedded model, downloaded and converted once into the user's own cache."""

from __future__ import annotations

import pytest

from pooled_mlx.catalog import EMBEDDED_CARD, builtin_folder, load_catalog
from pooled_mlx.store import Ready, ensure_model


@pytest.fixture(scope="session")
def embedded() -> Ready:
    """SmolLM2-135M-Instruct as `pooled-mlx serve` loads it."""
    from pooled_mlx.store.gguf import convert_gguf

    return ensure_model(load_catalog(builtin_folder()).cards[EMBEDDED_CARD], convert=convert_gguf)
