"""The ASGI application: the guard, then Quart's routes."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from quart import Quart, Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from pooled_mlx.api.edge import Edge
from pooled_mlx.api.frames import json_text
from pooled_mlx.api.routes import CountRoute, ExtraRoute
from pooled_mlx.core.errors import ApiError, ErrorKind, engine_failed
from pooled_mlx.core.ports import Engine
from pooled_mlx.server.context import RequestState, ServerContext, attach_state, current_state, error_response
from pooled_mlx.server.guard import RequestHead, body_too_large, check_head, cors_headers, preflight, read_head
from pooled_mlx.server.hooks import Hooks
from pooled_mlx.server.link import ClientGone, ClientStalled, Link
from pooled_mlx.server.routes import add_routes
from pooled_mlx.server.settings import ServerSettings

logger = logging.getLogger("pooled.server")

_EXTENSION = "pooled"
_SLASHES = re.compile("/{2,}")


def create_app(
    engine: Engine,
    edges: Mapping[str, Edge],
    settings: ServerSettings | None = None,
    *,
    count_routes: Sequence[CountRoute] = (),
    extra_routes: Sequence[ExtraRoute] = (),
    hooks: Hooks | None = None,
) -> Quart:
    """The application over `engine`.

    `edges` maps the path of each generating endpoint to its wire format; `/v1/chat/completions` must be there, for its
    errors are the default shape. Nothing is served before `serve`.
    """
    settings = settings or ServerSettings()
    context = ServerContext(engine, settings, edges, hooks or Hooks())
    app = Quart("pooled_mlx.server", static_folder=None, template_folder=None)
    app.extensions[_EXTENSION] = context
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False  # it would answer a client's doubled slash with a redirect that loses the body
    app.config["MAX_CONTENT_LENGTH"] = settings.body_limit_bytes
    app.config["RESPONSE_TIMEOUT"] = None  # Quart ends every body after 60 s otherwise; Link has the limit for stalled readers

    async def on_api_error(error: ApiError) -> Response:
        return error_response(context.edge_for(current_state().head), error)

    async def on_http_error(error: HTTPException) -> Response:
        return await on_api_error(_from_http(error, current_state().head, app))

    async def on_exception(error: Exception) -> Response:
        logger.error("request %s failed", current_state().id, exc_info=error)
        return await on_api_error(engine_failed("The server failed to handle this request. Its log has the details."))

    app.register_error_handler(ApiError, on_api_error)
    app.register_error_handler(HTTPException, on_http_error)
    app.register_error_handler(Exception, on_exception)
    add_routes(app, context, count_routes, extra_routes)
    app.asgi_app = _Front(app.asgi_app, context)  # type: ignore[method-assign, assignment]
    return app


def context_of(app: Quart) -> ServerContext:
    """The context behind an application of `create_app`."""
    return app.extensions[_EXTENSION]


class _Front:
    """The ASGI layer before Quart: checks every request and cleans up after every exchange."""

    def __init__(self, app: Any, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        # A base URL with a slash at its end gives clients a path with two: both mean the same.
        scope["path"] = _SLASHES.sub("/", scope["path"])
        port = (scope.get("server") or ("", 0))[1] or 0
        head = read_head(scope.get("method", "GET"), scope["path"], port, scope["headers"])
        state = RequestState(uuid.uuid4().hex, head)
        allowed = None
        try:
            allowed = preflight(head, self._context.settings)
            state.authorized = allowed is not None or check_head(head, self._context.settings)
            if scope["type"] != "http":
                raise ApiError(ErrorKind.NOT_FOUND, "WebSockets are not served here. Use plain HTTP requests.")
            refusal = None
        except ApiError as error:
            logger.info("refused %s %.100r: %s", head.method, head.path, error.code or error.kind.name.lower())
            refusal = error
        if scope["type"] == "http":
            await self._http(scope, receive, send, state, refusal, allowed)
        elif refusal is not None:
            await self._websocket(scope, send, state, refusal)

    async def _http(
        self,
        scope: Any,
        receive: Any,
        send: Any,
        state: RequestState,
        refusal: ApiError | None,
        allowed: Mapping[str, str] | None,
    ) -> None:
        request_id = f"req_{state.id}"
        headers = {"x-request-id": request_id, "request-id": request_id, "x-content-type-options": "nosniff"}
        headers |= cors_headers(state.head, self._context.settings)
        link = Link(receive, send, self._context.settings, has_body=state.head.has_body, extra_headers=headers)
        self._context.links.add(link)
        attach_state(scope, state)
        try:
            if allowed is not None:
                await link.refuse(204, allowed, b"")
            elif refusal is None:
                await self._app(scope, link.receive, link.send)
            else:
                await link.refuse(*self._render(state.head, refusal))
        except ClientStalled as stalled:
            logger.warning("request %s: %s", state.id, stalled)
        except ClientGone:
            logger.debug("request %s: the client has gone", state.id)
        finally:
            self._context.links.discard(link)
            for cleanup in reversed(state.cleanups):
                try:
                    cleanup()
                except Exception:
                    logger.exception("request %s: its end could not be noted", state.id)

    async def _websocket(self, scope: Any, send: Any, state: RequestState, refusal: ApiError) -> None:
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1000})
            return
        status, headers, body = self._render(state.head, refusal)
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "websocket.http.response.start", "status": status, "headers": raw})
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})

    def _render(self, head: RequestHead, error: ApiError) -> tuple[int, Mapping[str, str], bytes]:
        status, body, headers = self._context.edge_for(head).error(error)
        return status, {**headers, "content-type": "application/json"}, json_text(body).encode("utf-8", "replace")


def _from_http(error: HTTPException, head: RequestHead, app: Quart) -> ApiError:
    """What Quart itself refuses, in our terms."""
    if isinstance(error, MethodNotAllowed):
        allowed = tuple(sorted(error.valid_methods or ()))
        return ApiError(
            ErrorKind.METHOD_NOT_ALLOWED,
            f"{head.method} is not allowed on {head.path[:100]!r}. Allowed: {', '.join(allowed)}.",
            code="method_not_allowed",
            allow=allowed,
        )
    if error.code == 404:
        return ApiError(ErrorKind.NOT_FOUND, _not_found(head, app), code="not_found")
    if error.code == 413:
        return body_too_large(app.config["MAX_CONTENT_LENGTH"] or 0)
    if error.code is not None and 400 <= error.code < 500:
        return ApiError(ErrorKind.BAD_REQUEST, f"The request was not understood: {error.name}.")
    return engine_failed("The server failed to handle this request.")


def _not_found(head: RequestHead, app: Quart) -> str:
    message = f"There is no {head.path[:100]!r} here."
    known = {rule.rule for rule in app.url_map.iter_rules()}
    if f"/v1{head.path}" in known:
        return f"{message} Did you mean /v1{head.path}? The base URL for OpenAI clients ends with /v1."
    if head.path.startswith("/v1/v1/"):
        return f"{message} The path has /v1 twice: leave it out of the base URL."
    return f"{message} The API is under /v1: POST /v1/chat/completions, GET /v1/models."
