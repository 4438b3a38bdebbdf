"""OpenAI Responses: items in, items and events out, and the responses this process remembers."""

from pooled_mlx.api.responses.edge import ResponsesEdge
from pooled_mlx.api.responses.stored import ResponseStore

__all__ = ["ResponseStore", "ResponsesEdge"]
