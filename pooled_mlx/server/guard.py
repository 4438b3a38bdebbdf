"""Who may ask, and with what: checked before routing, so that no route, method or framework default slips by."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pooled_mlx.core.errors import ApiError, ErrorKind, bad_request
from pooled_mlx.server.settings import ServerSettings

_OPEN_PATHS = frozenset({"/", "/health"})
"""Answer without the token: the status page holds no data, and `/health` then says only yes or no."""

_EXPOSED = "x-request-id, request-id, retry-after, x-should-retry, x-pooled-cache, x-pooled-unenforced, x-pooled-ignored"
_LONGEST_ASKED = 2000


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request. Header names are lower case; a header that was sent twice has its values joined by ", "."""

    method: str
    path: str
    port: int
    headers: Mapping[str, str]

    @property
    def has_body(self) -> bool:
        """True when a body follows."""
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0").strip() not in ("", "0")

    @property
    def anthropic(self) -> bool:
        """True when the headers are those of an Anthropic client."""
        return "anthropic-version" in self.headers or ("x-api-key" in self.headers and "authorization" not in self.headers)


def read_head(method: str, path: str, port: int, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead:
    """The head out of the raw headers of an ASGI scope."""
    values: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        values[name] = f"{values[name]}, {value}" if name in values else value
    return RequestHead(method, path, port, values)


def check_head(head: RequestHead, settings: ServerSettings) -> bool:
    """True when the request is authorized, False when its path may be answered without the token it lacks.

    Raises `ApiError` 403 (host, origin), 401 (token), 415 (body not declared JSON), 413 (size), 404 (no path), 400 (encoding).
    """
    _check_host(head, settings)
    _check_origin(head, settings)
    authorized = _has_token(head, settings)
    if not authorized and head.path not in _OPEN_PATHS:
        raise ApiError(
            ErrorKind.UNAUTHORIZED,
            "This server has a token, and the request has none or a wrong one. Send it as Authorization: Bearer or x-api-key.",
            code="invalid_api_key",
        )
    if not head.path.startswith("/"):
        raise ApiError(ErrorKind.NOT_FOUND, "The request has no path.")
    if head.has_body:
        _check_body(head, settings)
    return authorized


def cors_headers(head: RequestHead, settings: ServerSettings) -> dict[str, str]:
    """What an answer to a page of an allowed origin carries, so that its browser hands it over; {} for all other requests."""
    origin = head.headers.get("origin", "").strip()
    if not origin or origin not in settings.allow_origins:
        return {}
    return {"access-control-allow-origin": origin, "access-control-expose-headers": _EXPOSED, "vary": "Origin"}


def preflight(head: RequestHead, settings: ServerSettings) -> dict[str, str] | None:
    """The headers of the 204 for a browser that asks whether it may send a request, None where this is no such question.

    It stands before the token: browsers send none with it. Raises `ApiError` 403 (host, origin).
    """
    if head.method != "OPTIONS" or "access-control-request-method" not in head.headers or not cors_headers(head, settings):
        return None
    _check_host(head, settings)
    _check_origin(head, settings)
    allowed = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
    if asked := head.headers.get("access-control-request-headers", "").strip():
        allowed["access-control-allow-headers"] = asked[:_LONGEST_ASKED]
    if head.headers.get("access-control-request-private-network", "").strip().lower() == "true":
        allowed["access-control-allow-private-network"] = "true"
    return allowed


def _check_host(head: RequestHead, settings: ServerSettings) -> None:
    host = head.headers.get("host", "").strip().lower()
    names = {"127.0.0.1", "localhost", "[::1]", _bracketed(settings.host)}
    allowed = {f"{name}:{head.port}" for name in names} | {entry.lower() for entry in settings.allow_hosts}
    if head.port == 80:
        allowed |= names
    if host in allowed or (_without_port(host) in allowed and host):
        return
    raise ApiError(
        ErrorKind.FORBIDDEN,
        f"The Host {host[:100]!r} is not one of this server's names ({', '.join(sorted(allowed))}). "
        f"If it should be, start the server with --allow-host {host[:100] or 'NAME'}.",
        code="host_not_allowed",
    )


def _check_origin(head: RequestHead, settings: ServerSettings) -> None:
    origin = head.headers.get("origin")
    if origin is not None:
        host = head.headers.get("host", "").strip().lower()
        own = {f"http://{host}", f"https://{host}"}
        if origin.strip().lower() not in own and origin.strip() not in settings.allow_origins:
            raise ApiError(
                ErrorKind.FORBIDDEN,
                f"Requests from the web origin {origin[:100]!r} are refused. "
                f"If it should be allowed, start the server with --allow-origin {origin[:100]}.",
                code="origin_not_allowed",
            )
    elif head.headers.get("sec-fetch-site", "").strip().lower() == "cross-site":
        raise ApiError(ErrorKind.FORBIDDEN, "Requests that another web site makes are refused.", code="cross_site")


def _check_body(head: RequestHead, settings: ServerSettings) -> None:
    length = head.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > settings.body_limit_bytes:
        raise body_too_large(settings.body_limit_bytes, f"The body has {length} bytes")
    media_type = head.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            ErrorKind.UNSUPPORTED_MEDIA,
            f"The body must be declared as JSON (Content-Type: application/json), not {media_type[:100] or 'undeclared'!r}.",
            code="content_type_not_json",
        )
    encoding = head.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise bad_request(f"Content-Encoding {encoding[:40]!r} is not supported: send the body uncompressed.")


def body_too_large(limit_bytes: int, what: str = "The body is too large") -> ApiError:
    """The 413 of an oversized body."""
    return ApiError(ErrorKind.TOO_LARGE, f"{what}; at most {limit_bytes} bytes are accepted.", code="request_too_large")


def _has_token(head: RequestHead, settings: ServerSettings) -> bool:
    if not settings.token:
        return True
    scheme, _, bearer = head.headers.get("authorization", "").partition(" ")
    given = [head.headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        given.append(bearer.strip())
    # Hashes have one length, so that the comparison takes the same time whatever was sent.
    wanted = _digest(settings.token.encode())
    matches = [hmac.compare_digest(_digest(value.encode("latin-1")), wanted) for value in given if value]
    return any(matches)


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _bracketed(host: str) -> str:
    host = host.lower()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
