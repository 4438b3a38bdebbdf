"""All of MLX: model, caches, batches, sampling."""
