"""The Responses edge: what the server calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooled_mlx.api.common import Fields, error_headers, openai_error
from pooled_mlx.api.edge import Header, Parsed, StreamRenderer
from pooled_mlx.api.responses.request import ResponsesOptions, parse_responses
from pooled_mlx.api.responses.response import Kept, ResponsesRenderer, whole_response
from pooled_mlx.api.responses.stored import ResponseStore, StoredResponse, item_piece
from pooled_mlx.api.routes import CountRoute, ExtraRoute
from pooled_mlx.core.answer import Answer
from pooled_mlx.core.errors import ApiError, bad_request


class ResponsesEdge:
    """`POST /v1/responses` and `/v1/responses/input_tokens`, and through `store` the routes of stored responses."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self.store = ResponseStore() if store is None else store

    def parse(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """Check a body of `POST /v1/responses`. Raises `ApiError`."""
        try:
            return parse_responses(Fields(body), self.store, request_id=request_id, client=client)
        except RecursionError:
            raise bad_request("The body is nested too deeply.") from None

    def parse_count(self, body: Any, *, request_id: str, client: str) -> Parsed:
        """Check a body of `POST /v1/responses/input_tokens`. Raises `ApiError`."""
        return self.parse(body, request_id=request_id, client=client)

    def count_routes(self) -> list[CountRoute]:
        """The counting endpoint, for the server's route table."""
        return [CountRoute("/v1/responses/input_tokens", self, self.parse_count, self.count)]

    def extra_routes(self) -> list[ExtraRoute]:
        """The endpoints of stored responses, for the server's route table."""
        one = "/v1/responses/<response_id>"
        return [
            ExtraRoute("GET", one, self, lambda path, query: self.store.retrieve(path["response_id"], query)),
            ExtraRoute("DELETE", one, self, lambda path, query: self.store.delete(path["response_id"])),
            ExtraRoute(
                "GET", f"{one}/input_items", self, lambda path, query: self.store.input_items(path["response_id"], query)
            ),
        ]

    def count(self, prompt_tokens: int) -> dict[str, Any]:
        """The answer of `input_tokens`."""
        return {"object": "response.input_tokens", "input_tokens": prompt_tokens}

    def renderer(self, parsed: Parsed, header: Header) -> StreamRenderer:
        """The renderer of one streamed answer."""
        return ResponsesRenderer(parsed, header, self._keeper(parsed))

    def whole(self, parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
        """The body of a non-streaming answer."""
        body = whole_response(parsed, header, answer)
        if keep := self._keeper(parsed):
            keep(body)
        return body

    def error(self, error: ApiError) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, body and headers in OpenAI's shape."""
        return error.kind.status, openai_error(error), error_headers(error)

    def _keeper(self, parsed: Parsed) -> Kept | None:
        options: ResponsesOptions = parsed.options
        if not options.store:
            return None

        def keep(body: dict[str, Any]) -> None:
            outputs = tuple(item_piece(item) for item in body["output"])
            self.store.keep(StoredResponse(body, options.inputs, outputs))

        return keep
