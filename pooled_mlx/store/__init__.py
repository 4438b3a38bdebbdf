"""Where model folders come from and lie: resolve a name, download, check, convert, list and remove.

Nothing here imports MLX: the conversion of a GGUF file is handed in by the caller.
"""

from pooled_mlx.store.ensure import Ready, ensure_model, resolve_model
from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.progress import Progress

__all__ = ["Progress", "Ready", "StoreError", "ensure_model", "resolve_model"]
