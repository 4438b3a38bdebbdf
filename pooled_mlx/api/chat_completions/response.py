"""Chat Completions answers: the chunks of a stream, and the whole answer."""

from __future__ import annotations

from typing import Any

from pooled_mlx.api.chat_completions.request import ChatOptions
from pooled_mlx.api.common import openai_error
from pooled_mlx.api.edge import Header, Parsed
from pooled_mlx.api.frames import comment_frame, data_frame, json_text
from pooled_mlx.core.answer import Answer
from pooled_mlx.core.events import (
    CallArguments,
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

EMPTY_DELTA_EVERY = 3
"""Every so many keep-alives in a row an empty chunk follows the comment: one agent counts only chunks as a sign of life."""


class ChatStream:
    """Renders one streamed answer. Each chunk is one frame; `[DONE]` stands at the end of a finished answer only."""

    def __init__(self, parsed: Parsed, header: Header) -> None:
        assert isinstance(parsed.options, ChatOptions)
        self._include_usage = parsed.options.include_usage
        self._shared = {
            "id": f"chatcmpl-{parsed.request.id}",
            "object": "chat.completion.chunk",
            "created": header.created,
            "model": header.model,
        }
        # Most frames of a stream differ only in the delta: everything around it is serialised once.
        self._head = f'data: {json_text(self._shared)[:-1]},"choices":[{{"index":0,"delta":'
        self._tail = ',"usage":null}\n\n' if self._include_usage else "}\n\n"
        self._open = False
        self._silent = 0

    def start(self) -> str:
        """The role chunk."""
        self._open = True
        return self._chunk('{"role":"assistant","content":""}')

    def event(self, event: Event) -> str:
        """The frames for one event; "" where it has none."""
        if isinstance(event, Queued | Prefill):
            return ""
        self._silent = 0
        if isinstance(event, Text):
            return self._chunk(f'{{"content":{json_text(event.text)}}}')
        if isinstance(event, Reasoning):
            return self._chunk(f'{{"reasoning_content":{json_text(event.text)}}}')
        if isinstance(event, CallArguments):
            arguments = json_text(event.text)
            return self._chunk(f'{{"tool_calls":[{{"index":{event.index},"function":{{"arguments":{arguments}}}}}]}}')
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return self._chunk(json_text({"tool_calls": [call]}))
        if isinstance(event, Finished):
            return self._end(event)
        if isinstance(event, Failed):
            self._open = False
            return data_frame(openai_error(event.error))
        return ""

    def keep_alive(self, waiting: Queued | Prefill | None) -> str:
        """A comment that says what the answer waits for, and every third time an empty chunk."""
        if not self._open:
            return ""
        self._silent += 1
        if isinstance(waiting, Queued):
            frames = comment_frame(f"queued, {waiting.ahead} ahead")
        elif isinstance(waiting, Prefill):
            frames = comment_frame(f"prefill {100 * waiting.done // max(waiting.total, 1)}%")
        else:
            frames = comment_frame("keep-alive")
        return frames + self._chunk("{}") if self._silent % EMPTY_DELTA_EVERY == 0 else frames

    def comment(self, text: str) -> str:
        """A comment frame."""
        return comment_frame(text)

    def _chunk(self, delta: str, finish_reason: str = "null") -> str:
        return f'{self._head}{delta},"finish_reason":{finish_reason}}}]{self._tail}'

    def _end(self, event: Finished) -> str:
        self._open = False
        frames = [self._chunk("{}", f'"{_reason(event.reason)}"')]
        if self._include_usage:
            frames.append(data_frame({**self._shared, "choices": [], "usage": _usage(event.usage)}))
        if event.cache_note:
            frames.insert(len(frames) - 1, comment_frame(f"cache {event.cache_note}"))
        return "".join(frames) + "data: [DONE]\n\n"


def whole_answer(parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
    """The body of a non-streaming answer. A call that the token limit cut off is left out."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if answer.calls and not answer.text else answer.text,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return {
        "id": f"chatcmpl-{parsed.request.id}",
        "object": "chat.completion",
        "created": header.created,
        "model": header.model,
        "choices": [{"index": 0, "message": message, "finish_reason": _reason(answer.finish_reason)}],
        "usage": _usage(answer.usage),
    }


def _reason(reason: FinishReason) -> str:
    return "length" if reason == "context_full" else reason


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **(_predictions(usage) if usage.drafted_tokens else {}),
        },
    }


def _predictions(usage: Usage) -> dict[str, int]:
    rejected = usage.drafted_tokens - usage.accepted_tokens
    return {"accepted_prediction_tokens": usage.accepted_tokens, "rejected_prediction_tokens": rejected}
