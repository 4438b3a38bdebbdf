"""pooled-mlx: one local model on Apple Silicon, served to coding agents, warm across turns.

Importing this package loads neither MLX nor a web framework.
"""

__version__ = "0.1.0"
