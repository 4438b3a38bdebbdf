"""The engine: prompt building, cache policy and the MLX loop. The only package that imports mlx and mlx_lm."""
