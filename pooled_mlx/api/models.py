"""The one model, as `GET /v1/models` and `GET /v1/models/{id}` show it: OpenAI's and Anthropic's fields together."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.ports import ModelInfo

ALIAS = "pooled"


def models_list(info: ModelInfo) -> dict[str, Any]:
    """The list, with its one entry. It has the fields of both shapes: some clients ask for one with the other's headers."""
    entry = _entry(info)
    return {"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}


def one_model(info: ModelInfo, model_id: str) -> dict[str, Any]:
    """The entry of `model_id`: the public id, or `pooled`. Raises `ApiError` 404 for any other."""
    if model_id not in (info.public_id, ALIAS):
        raise ApiError(
            ErrorKind.NOT_FOUND,
            f"There is no model {model_id[:200]!r} here. This server has one model: {info.public_id}.",
            param="model",
            code="model_not_found",
        )
    return _entry(info)


def _entry(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.public_id,
        "object": "model",
        "created": info.created,
        "owned_by": "pooled",
        "type": "model",
        "display_name": info.label,
        "created_at": datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_model_len": info.context_tokens,
        "context_length": info.context_tokens,
        "max_context_length": info.context_tokens,
        "thinking": info.thinks,
    }
