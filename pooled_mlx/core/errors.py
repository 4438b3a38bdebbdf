"""Errors that a client sees, free of any wire format: each API renders them in its own shape."""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """What went wrong, by the situation table of the API; `status` is the HTTP status of the OpenAI APIs."""

    BAD_REQUEST = 400
    UNAUTHORIZED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    METHOD_NOT_ALLOWED = 405
    TOO_LARGE = 413
    UNSUPPORTED_MEDIA = 415
    QUEUE_FULL = 429
    ENGINE_FAILED = 500
    NOT_READY = 503
    NO_PROGRESS = 504

    @property
    def status(self) -> int:
        """The HTTP status of this kind on the OpenAI APIs."""
        return self.value

    @property
    def permanent(self) -> bool:
        """True when sending the same request again cannot help."""
        return self.value < 500 and self is not ErrorKind.QUEUE_FULL


class OwnFault(RuntimeError):
    """What goes wrong with one request's answer and says nothing about the engine."""


class ApiError(Exception):
    """A refusal or failure with everything a client needs to act on it.

    `param` names the field (`messages[0].role`), `code` is a machine-readable code such as `context_length_exceeded`,
    `retry_after_seconds` is set on temporary errors, `allow` lists the methods for METHOD_NOT_ALLOWED.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.allow = allow

    def __repr__(self) -> str:
        return f"ApiError({self.kind.name}, {self.message!r}, param={self.param!r}, code={self.code!r})"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A permanent refusal of what the client sent."""
    return ApiError(ErrorKind.BAD_REQUEST, message, param=param, code=code)


def prompt_too_long(prompt_tokens: int, context_tokens: int) -> ApiError:
    """The overflow refusal, in the one wording that every known client recognises and compacts on."""
    return bad_request(
        f"prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum. "
        f"This model's maximum context length is {context_tokens} tokens.",
        code="context_length_exceeded",
    )


def queue_full(limit: int) -> ApiError:
    """The bounded queue is full."""
    return ApiError(
        ErrorKind.QUEUE_FULL,
        f"{limit} requests are waiting already (limit {limit}). Try again in 5 seconds.",
        code="rate_limit_exceeded",
        retry_after_seconds=5,
    )


def not_ready(reason: str) -> ApiError:
    """The model is loading, or the server is going down."""
    return ApiError(ErrorKind.NOT_READY, reason, retry_after_seconds=5)


def engine_failed(message: str) -> ApiError:
    """The engine failed this request."""
    return ApiError(ErrorKind.ENGINE_FAILED, message)
