"""The Chat Completions API: OpenAI's first chat format, and what most agents speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooled_mlx.api.chat_completions.request import parse_body
from pooled_mlx.api.chat_completions.response import ChatStream, whole_answer
from pooled_mlx.api.common import error_headers, openai_error
from pooled_mlx.api.edge import Header, Parsed
from pooled_mlx.core.answer import Answer
from pooled_mlx.core.errors import ApiError

__all__ = ["EDGE", "ChatCompletions"]


class ChatCompletions:
    """The `Edge` of `POST /v1/chat/completions`. It keeps no state."""

    def parse(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """Check the decoded JSON body. Raises `ApiError` for whatever this API refuses."""
        return parse_body(body, request_id=request_id, client=client)

    def renderer(self, parsed: Parsed, header: Header) -> ChatStream:
        """The renderer of one streamed answer."""
        return ChatStream(parsed, header)

    def whole(self, parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
        """The body of a non-streaming answer."""
        return whole_answer(parsed, header, answer)

    def error(self, error: ApiError) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, body and headers of an error."""
        return error.kind.status, openai_error(error), error_headers(error)


EDGE = ChatCompletions()
