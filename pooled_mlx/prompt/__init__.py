"""From a request to token ids: conversation, template, layout. CPU work; no MLX."""
