"""The Messages edge: what the server calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pooled_mlx.api.common import Fields, error_headers
from pooled_mlx.api.edge import Header, Parsed, StreamRenderer
from pooled_mlx.api.messages.request import MessagesOptions, parse_messages
from pooled_mlx.api.messages.response import (
    MessagesRenderer,
    anthropic_error,
    content_blocks,
    error_status,
    message_id,
    whole_message,
)
from pooled_mlx.api.messages.threads import MessageThread, read_thread
from pooled_mlx.api.routes import CountRoute
from pooled_mlx.api.store import BoundedStore
from pooled_mlx.core.answer import Answer
from pooled_mlx.core.errors import ApiError, bad_request

__all__ = ["MessagesEdge", "anthropic_error"]


class MessagesEdge:
    """`POST /v1/messages` and `/v1/messages/count_tokens`, without I/O.

    Message threads (`thread: {"type": "create" | "continue"}`, the form in which Anthropic's tool runners send only what is
    new) are kept in bounded memory under the id of each answer; an unknown one is refused with the code on which the SDKs
    send the whole conversation again.
    """

    def __init__(self, threads: BoundedStore[MessageThread] | None = None) -> None:
        self.threads: BoundedStore[MessageThread] = BoundedStore() if threads is None else threads

    def parse(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """Check a body of `POST /v1/messages`. Raises `ApiError`."""
        return self._parse(body, request_id, client, counting=False)

    def parse_count(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """Check a body of `POST /v1/messages/count_tokens`, which needs no `max_tokens`. Raises `ApiError`."""
        return self._parse(body, request_id, client, counting=True)

    def count_routes(self) -> list[CountRoute]:
        """The counting endpoint, for the server's route table."""
        return [CountRoute("/v1/messages/count_tokens", self, self.parse_count, self.count)]

    def count(self, prompt_tokens: int) -> dict[str, Any]:
        """The answer of `count_tokens`."""
        return {"input_tokens": prompt_tokens}

    def renderer(self, parsed: Parsed, header: Header) -> StreamRenderer:
        """The renderer of one streamed answer."""
        return MessagesRenderer(parsed, header, self._keeper(parsed))

    def whole(self, parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
        """The body of a non-streaming answer."""
        if keep := self._keeper(parsed):
            keep(answer)
        return whole_message(parsed, header, answer)

    def error(self, error: ApiError) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, body and headers in Anthropic's shape."""
        return error_status(error), anthropic_error(error), error_headers(error)

    def _parse(self, body: Any, request_id: str, client: str, counting: bool) -> Parsed:
        fields = Fields(body)
        try:
            thread = read_thread(fields, self.threads)
            if thread is not None:
                fields = Fields({**fields.values, **thread.body()})
            return parse_messages(fields, request_id=request_id, client=client, counting=counting, thread=thread)
        except RecursionError:
            raise bad_request("The body is nested too deeply.") from None

    def _keeper(self, parsed: Parsed) -> Callable[[Answer], None] | None:
        options: MessagesOptions = parsed.options
        thread = options.thread
        if thread is None:
            return None

        def keep(answer: Answer) -> None:
            reply = {"role": "assistant", "content": content_blocks(answer, omit_thinking=False)}
            grown = thread.with_message(reply)
            self.threads.put(message_id(parsed), grown, grown.pieces)

        return keep
