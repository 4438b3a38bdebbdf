"""The endpoints beside generation: models, health, pool, metrics, the page, and signposts for wrong paths."""

from __future__ import annotations

from collections.abc import Sequence

from quart import Quart, Response, request

from pooled_mlx.api.health import health_answer
from pooled_mlx.api.models import models_list, one_model
from pooled_mlx.api.routes import CountRoute, ExtraRoute
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.server.context import ServerContext, current_state, error_response, json_response
from pooled_mlx.server.generate import CountHandler, GenerateHandler

_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
}
_NOT_SERVED = {
    "/v1/completions": "The legacy completions API is not served here. Use POST /v1/chat/completions.",
    "/v1/embeddings": "This server has no embeddings. It serves POST /v1/chat/completions.",
    "/v1/responses/compact": "Compaction is not served here. Send an ordinary POST /v1/responses that asks for a summary.",
}


def add_routes(
    app: Quart, context: ServerContext, counts: Sequence[CountRoute] = (), extras: Sequence[ExtraRoute] = ()
) -> None:
    """Register everything on `app`. OPTIONS is answered before routing, for allowed origins only."""
    for path, edge in context.edges.items():
        _add(app, "POST", path, GenerateHandler(context, path.removeprefix("/v1/").replace("/", "_"), edge))
    for count in counts:
        _add(app, "POST", count.path, CountHandler(context, count))
    for extra in extras:
        _add(app, extra.method, extra.path, _ExtraHandler(extra))
    for path, advice in _NOT_SERVED.items():
        _add_not_served(app, path, advice)

    async def models() -> Response:
        return json_response(models_list(context.engine.model))

    async def model(model_id: str) -> Response:
        return json_response(one_model(context.engine.model, model_id))

    async def health() -> Response:
        facts = {**context.hooks.health(), **context.engine.health()}
        if context.stopping:
            facts |= {"ok": False, "ready": False, "reason": "the server is shutting down"}
        status, body = health_answer(facts, authorized=current_state().authorized)
        return json_response(body, status)

    async def pool() -> Response:
        return json_response(context.engine.pool())

    async def page() -> Response:
        html = context.hooks.page
        if html is None:
            return Response("pooled-mlx is running. The API is under /v1.\n", content_type="text/plain; charset=utf-8")
        response = Response(html, content_type="text/html; charset=utf-8")
        response.headers.update(_PAGE_HEADERS)
        return response

    async def metrics() -> Response:
        assert context.hooks.metrics is not None
        return Response(context.hooks.metrics(), content_type=context.hooks.metrics_content_type)

    _add(app, "GET", "/v1/models", models)
    _add(app, "GET", "/v1/models/<path:model_id>", model)
    _add(app, "GET", "/health", health)
    _add(app, "GET", "/pool", pool)
    _add(app, "GET", "/", page)
    if context.hooks.metrics is not None:
        _add(app, "GET", "/metrics", metrics)


class _ExtraHandler:
    def __init__(self, route: ExtraRoute) -> None:
        self._route = route

    async def __call__(self, **fields: str) -> Response:
        try:
            return json_response(self._route.handler(fields, request.args.to_dict()))
        except ApiError as error:
            return error_response(self._route.edge, error)


def _add_not_served(app: Quart, path: str, advice: str) -> None:
    async def refuse() -> Response:
        raise ApiError(ErrorKind.NOT_FOUND, advice)

    app.add_url_rule(
        path, endpoint=f"not served {path}", view_func=refuse, methods=["GET", "POST"], provide_automatic_options=False
    )


def _add(app: Quart, method: str, path: str, handler: object) -> None:
    # Quart looks for attributes of a plain function, so a handler object goes in through one.
    async def view(**fields: str) -> Response:
        return await handler(**fields)  # type: ignore[operator]

    app.add_url_rule(path, endpoint=f"{method} {path}", view_func=view, methods=[method], provide_automatic_options=False)
