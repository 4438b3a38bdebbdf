"""What makes stored caches interchangeable: one text that every key in the pool depends on."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

from pooled_mlx.core.cuts import CutRule

_LAYOUT = 1
"""Changes whenever the meaning of stored caches does."""


def files_key(folder: Path) -> str:
    """A digest of the model's configuration and of its weight files' names and sizes."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(model_key: str, quantization: str, rule: CutRule) -> bytes:
    """`model_key` is the `files_key` of the folder, `quantization` how its weights are in memory."""
    return f"{model_key} {quantization} mlx {_minor('mlx')} mlx-lm {_minor('mlx-lm')} {rule} layout {_LAYOUT}".encode()


def _minor(package: str) -> str:
    return ".".join(version(package).split(".")[:2])
