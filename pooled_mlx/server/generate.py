"""The one handler behind every generating endpoint, and the one that only counts tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from quart import Response, request
from werkzeug.exceptions import RequestEntityTooLarge

from pooled_mlx.api.body import decode_json
from pooled_mlx.api.edge import Edge, Header, Parsed
from pooled_mlx.api.routes import CountRoute, ParseBody
from pooled_mlx.core.errors import ApiError, bad_request, engine_failed
from pooled_mlx.core.notices import Notice, header_text, ignored_fields, log_lines, not_enforced, skipped
from pooled_mlx.core.notices import headers as notice_headers
from pooled_mlx.core.ports import Prepared
from pooled_mlx.server.context import RequestState, ServerContext, current_state, error_response, json_response, shutting_down
from pooled_mlx.server.exchange import EventStream, Exchange, collect
from pooled_mlx.server.guard import body_too_large
from pooled_mlx.server.request_log import RequestRecord, client_label

logger = logging.getLogger("pooled.server")

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class GenerateHandler:
    """POST of one edge: read, parse and prepare (every 4xx), queue, then stream or wait for the whole answer."""

    def __init__(self, context: ServerContext, api: str, edge: Edge) -> None:
        self._context = context
        self._api = api
        self._edge = edge

    async def __call__(self) -> Response:
        """Answer the current request."""
        state = current_state()
        record = RequestRecord(state.id, self._api, client_label(state.head.headers.get("user-agent")))
        state.cleanups.append(lambda: self._write(record))
        try:
            response = await self._answer(state, record)
        except ApiError as error:
            record.refuse(error)
            response = error_response(self._edge, error)
        except Exception:
            logger.exception("request %s failed", state.id)
            error = engine_failed("The server failed to handle this request. Its log has the details.")
            record.refuse(error)
            response = error_response(self._edge, error)
        record.status = response.status_code
        return response

    async def _answer(self, state: RequestState, record: RequestRecord) -> Response:
        context = self._context
        try:
            pieces = await read_body(context)
            parsed, prepared, notices = await context.work(self._prepare, pieces, state.id, record.client)
            for line in log_lines(notices):
                context.warn_once(record.client, line)
            if context.stopping:
                raise shutting_down()
            generation = context.engine.submit(prepared)
        except ApiError as error:
            if context.hooks.refused is not None:
                context.hooks.refused(error.kind)
            raise
        if prepared.unenforced and context.hooks.unenforced is not None:
            context.hooks.unenforced(len(prepared.unenforced))
        record.stream = parsed.stream
        exchange = Exchange(generation, context.settings, record, context.exchanges.discard)
        context.exchanges.add(exchange)
        state.cleanups.append(exchange.close)
        if context.hooks.watch is not None:
            exchange.watch = context.hooks.watch(self._api)
        header = Header(context.engine.model.public_id, int(time.time()), prepared.prompt_tokens)
        if parsed.stream:
            return self._stream(exchange, parsed, notices, header)
        return await self._whole(exchange, parsed, notices, header)

    def _prepare(self, pieces: list[bytes], request_id: str, client: str) -> tuple[Parsed, Prepared, list[Notice]]:
        body = decode_json(b"".join(pieces))
        parsed = self._edge.parse(body, request_id=request_id, client=client)
        prepared = self._context.engine.prepare(replace(parsed.request, api=self._api))
        notices = [*ignored_fields(body), *skipped(parsed.warnings), *not_enforced(prepared.unenforced, prepared.tool_notes)]
        return parsed, prepared, notices

    def _stream(self, exchange: Exchange, parsed: Parsed, notices: Sequence[Notice], header: Header) -> Response:
        renderer = self._edge.renderer(parsed, header)
        body = EventStream(exchange, renderer, self._context.settings.keep_alive_seconds)
        response = Response(body, content_type="text/event-stream; charset=utf-8")
        response.timeout = None
        response.headers.update({**_STREAM_HEADERS, **notice_headers(notices)})
        return response

    async def _whole(self, exchange: Exchange, parsed: Parsed, notices: Sequence[Notice], header: Header) -> Response:
        answer = await collect(exchange)
        headers = notice_headers(notices)
        if answer.cache_note:
            headers["x-pooled-cache"] = header_text(answer.cache_note)
        return json_response(self._edge.whole(parsed, header, answer), headers=headers)

    def _write(self, record: RequestRecord) -> None:
        fields = record.write()
        if self._context.hooks.finished is not None:
            self._context.hooks.finished(fields)


class CountHandler:
    """POST of an endpoint that answers the prompt length of a request and does nothing else."""

    def __init__(self, context: ServerContext, route: CountRoute) -> None:
        self._context = context
        self._route = route

    async def __call__(self) -> Response:
        """Answer the current request."""
        state = current_state()
        client = client_label(state.head.headers.get("user-agent"))
        try:
            pieces = await read_body(self._context)
            count = await self._context.work(self._count, self._route.parse, pieces, state.id, client)
        except ApiError as error:
            return error_response(self._route.edge, error)
        return json_response(self._route.answer(count))

    def _count(self, parse: ParseBody, pieces: list[bytes], request_id: str, client: str) -> int:
        parsed = parse(decode_json(b"".join(pieces)), request_id=request_id, client=client)
        return self._context.engine.count_tokens(parsed.request)


async def read_body(context: ServerContext) -> list[bytes]:
    """The body in the pieces it came in. Raises `ApiError` 413 over the limit and 400 when it does not arrive in time.

    The pieces are joined where they are decoded, in a worker: a copy of a large body would hold the event loop up.
    """
    limit, seconds = context.settings.body_limit_bytes, context.settings.body_timeout_seconds
    pieces: list[bytes] = []
    size = 0
    try:
        # Not Quart's `get_data`: its `asyncio.wait_for` swallows, on Python 3.11, the cancellation of a client that goes away
        # at the moment its body is complete, and nobody would ever notice that it is gone.
        async with asyncio.timeout(seconds):
            async for piece in request.body:
                size += len(piece)
                if size > limit:
                    raise body_too_large(limit)
                pieces.append(piece)
    except RequestEntityTooLarge:
        raise body_too_large(limit) from None
    except TimeoutError:
        raise bad_request(f"The body did not arrive within {seconds:g} seconds.") from None
    return pieces
