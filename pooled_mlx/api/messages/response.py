"""Core events and answers to Messages events and bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pooled_mlx.api.blobs import encode_blob
from pooled_mlx.api.common import id_suffix, sse
from pooled_mlx.api.edge import Header, Parsed
from pooled_mlx.api.frames import comment_frame
from pooled_mlx.api.messages.request import MessagesOptions
from pooled_mlx.core.answer import Answer, Fold
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefill,
    Queued,
    Reasoning,
    Text,
    Usage,
)

_STATUS = {429: 529, 503: 529}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "context_full": "model_context_window_exceeded",
}


def error_status(error: ApiError) -> int:
    """The HTTP status on this API: full queue and not ready are both 529."""
    return _STATUS.get(error.kind.status, error.kind.status)


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error in Anthropic's shape. A thread's error code stands where its SDKs look for it."""
    detail: dict[str, Any] = {
        "type": _ERROR_TYPES.get(error_status(error), "invalid_request_error"),
        "message": error.message,
    }
    if error.code and error.code.startswith("thread_"):
        detail["details"] = {"error_code": error.code}
    return {"type": "error", "error": detail}


def message_id(parsed: Parsed) -> str:
    """The id of the answer to this request."""
    return f"msg_{id_suffix(parsed.request.id)}"


def stop_reason(finish: FinishReason, stop: str | None, called: bool) -> str:
    """Anthropic's word for the end of an answer. Calls make it `tool_use` also where a named tool ended it by "stop"."""
    if stop is not None:
        return "stop_sequence"
    return "tool_use" if called and finish == "stop" else _STOP_REASONS[finish]


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts; `input_tokens` leaves out what came from the cache."""
    body: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def _message(parsed: Parsed, header: Header, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {
        "id": message_id(parsed),
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def call_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as the object this API wants; text that is not one is kept under `raw_arguments`."""
    try:
        value = json.loads(arguments) if arguments else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": arguments}


def content_blocks(answer: Answer, omit_thinking: bool) -> list[dict[str, Any]]:
    """The blocks of an answer in the order they were generated. A call that was cut off is left out."""
    blocks: list[dict[str, Any]] = []
    for kind, index in answer.parts:
        if kind == "text":
            blocks.append({"type": "text", "text": answer.texts[index]})
        elif kind == "reasoning":
            thought = answer.texts[index]
            shown = "" if omit_thinking else thought
            blocks.append({"type": "thinking", "thinking": shown, "signature": encode_blob(thought)})
        else:
            call = answer.calls[index]
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call_input(call.arguments)})
    return blocks


def whole_message(parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
    """The body of a non-streaming answer."""
    options: MessagesOptions = parsed.options
    body = _message(parsed, header, content_blocks(answer, options.omit_thinking), answer.usage)
    body["stop_reason"] = stop_reason(answer.finish_reason, answer.stop, bool(answer.calls))
    body["stop_sequence"] = answer.stop
    return body


class MessagesRenderer:
    """The events of one streamed message. `finished` is called once with the answer when the stream ends well."""

    def __init__(self, parsed: Parsed, header: Header, finished: Callable[[Answer], None] | None = None) -> None:
        options: MessagesOptions = parsed.options
        self._parsed = parsed
        self._header = header
        self._omit_thinking = options.omit_thinking
        self._finished = finished
        self._fold = Fold() if finished else None
        self._index = -1
        self._open: str | None = None
        self._thought: list[str] = []
        self._called = False

    def start(self) -> str:
        """`message_start`, with the exact prompt count; the cache split follows in `message_delta`."""
        usage = Usage(prompt_tokens=self._header.prompt_tokens)
        return _frame("message_start", {"message": _message(self._parsed, self._header, [], usage)})

    def event(self, event: Event) -> str:
        """The frames of one event."""
        if self._fold is not None and not isinstance(event, Failed):
            self._fold.add(event)
        if isinstance(event, Text):
            return self._enter("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, Reasoning):
            opening = self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought.append(event.text)
            if self._omit_thinking:
                return opening
            return opening + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, CallStart):
            closing = self._close()
            return closing + self._enter("call", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if isinstance(event, CallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        if isinstance(event, CallEnd):
            self._called = True
            return self._close()
        if isinstance(event, Finished):
            return self._end(event)
        if isinstance(event, Failed):
            return sse(anthropic_error(event.error), "error")
        return ""

    def keep_alive(self, waiting: Queued | Prefill | None) -> str:
        """A `ping`, whatever the request waits for."""
        return _frame("ping", {})

    def comment(self, text: str) -> str:
        """A comment frame."""
        return comment_frame(text)

    def _enter(self, kind: str, block: Mapping[str, Any]) -> str:
        """Open a block of this kind unless it is open; a change of kind closes the one before."""
        if self._open == kind:
            return ""
        closing = self._close()
        self._open = kind
        self._index += 1
        return closing + _frame("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return _frame("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> str:
        if self._open is None:
            return ""
        signature = ""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": encode_blob("".join(self._thought))})
            self._thought = []
        self._open = None
        return signature + _frame("content_block_stop", {"index": self._index})

    def _end(self, event: Finished) -> str:
        if self._finished is not None and self._fold is not None:
            self._finished(self._fold.answer)
        note = comment_frame(f"cache {event.cache_note}") if event.cache_note else ""
        delta = {"stop_reason": stop_reason(event.reason, event.stop, self._called), "stop_sequence": event.stop}
        ending = _frame("message_delta", {"delta": delta, "usage": usage_body(event.usage)})
        return self._close() + note + ending + _frame("message_stop", {})


def _frame(kind: str, data: Mapping[str, Any]) -> str:
    return sse({"type": kind, **data}, kind)
