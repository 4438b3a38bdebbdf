"""Anthropic Messages: bodies in, content blocks and events out."""

from pooled_mlx.api.messages.edge import MessagesEdge, anthropic_error

__all__ = ["MessagesEdge", "anthropic_error"]
