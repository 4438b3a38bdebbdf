"""Core events and answers to Responses items, events and bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pooled_mlx.api.blobs import encode_blob
from pooled_mlx.api.common import id_suffix, openai_error, sse
from pooled_mlx.api.edge import Header, Parsed
from pooled_mlx.api.frames import comment_frame
from pooled_mlx.api.responses.request import ResponsesOptions
from pooled_mlx.api.responses.stored import Item
from pooled_mlx.api.responses.tools import CallName
from pooled_mlx.core.answer import Answer
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

Kept = Callable[[dict[str, Any]], None]


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in the form of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Items:
    """Builds the output items of one response; ids are made of the response's own and the item's place."""

    def __init__(self, parsed: Parsed) -> None:
        options: ResponsesOptions = parsed.options
        self._suffix = id_suffix(parsed.request.id)
        self._wire = options.wire
        self._encrypted = options.encrypted

    def reasoning(self, index: int, text: str | None) -> Item:
        """A reasoning item; None while its text is still to come."""
        item: Item = {"id": f"rs_{self._suffix}_{index}", "type": "reasoning", "summary": []}
        item["content"] = [] if text is None else [{"type": "reasoning_text", "text": text}]
        if self._encrypted:
            item["encrypted_content"] = None if text is None else encode_blob(text)
        return item

    def message(self, index: int, text: str | None, status: str) -> Item:
        """A message item; None while its text is still to come."""
        return {
            "id": f"msg_{self._suffix}_{index}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [text_part(text)],
        }

    def call(self, index: int, call_id: str, name: str, arguments: str, status: str) -> Item:
        """A function or custom tool call under its wire name."""
        wire = self._wire.get(name, CallName(name))
        kind, prefix, field = ("custom_tool_call", "ctc", "input") if wire.custom else ("function_call", "fc", "arguments")
        item: Item = {"id": f"{prefix}_{self._suffix}_{index}", "type": kind, "status": status}
        item |= {"call_id": call_id, "name": wire.name, field: arguments}
        if wire.namespace is not None:
            item["namespace"] = wire.namespace
        return item


def text_part(text: str) -> dict[str, Any]:
    """A part of answer text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_id(parsed: Parsed) -> str:
    """The id of the response to this request."""
    return f"resp_{id_suffix(parsed.request.id)}"


def response_body(parsed: Parsed, header: Header, status: str, output: list[Item]) -> dict[str, Any]:
    """The response object in any state."""
    options: ResponsesOptions = parsed.options
    return {
        "id": response_id(parsed),
        "object": "response",
        "created_at": header.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": header.model,
        "output": output,
        "usage": None,
        **options.echo,
    }


def finished_body(parsed: Parsed, header: Header, output: list[Item], reason: FinishReason, usage: Usage) -> dict[str, Any]:
    """The response object of an answer that ended: completed, or incomplete when a limit ended it."""
    cut = reason in ("length", "context_full")
    body = response_body(parsed, header, "incomplete" if cut else "completed", output)
    if cut:
        body["incomplete_details"] = {"reason": "max_output_tokens"}
    body["usage"] = usage_body(usage)
    return body


def whole_response(parsed: Parsed, header: Header, answer: Answer) -> dict[str, Any]:
    """The body of a non-streaming answer; a call that was cut off is an incomplete item."""
    items = _Items(parsed)
    cut = answer.finish_reason in ("length", "context_full")
    output: list[Item] = []
    for index, (kind, place) in enumerate(answer.parts):
        if kind == "reasoning":
            output.append(items.reasoning(index, answer.texts[place]))
        elif kind == "text":
            last = cut and index == len(answer.parts) - 1 and answer.cut_call is None
            output.append(items.message(index, answer.texts[place], "incomplete" if last else "completed"))
        else:
            call = answer.calls[place]
            output.append(items.call(index, call.id, call.name, call.arguments, "completed"))
    if answer.cut_call is not None:
        call = answer.cut_call
        output.append(items.call(len(output), call.id, call.name, call.arguments, "incomplete"))
    return finished_body(parsed, header, output, answer.finish_reason, answer.usage)


class ResponsesRenderer:
    """The events of one streamed response. `kept` is called with the final body when the stream ends well.

    A call that was cut off gets no `output_item.done`: clients run a call as soon as they see that event. It stands as an
    incomplete item in the final response.
    """

    def __init__(self, parsed: Parsed, header: Header, kept: Kept | None = None) -> None:
        self._parsed = parsed
        self._header = header
        self._kept = kept
        self._items = _Items(parsed)
        self._sequence = 0
        self._output: list[Item] = []
        self._open: str | None = None
        self._place: dict[str, Any] = {}
        self._chunks: list[str] = []
        self._call: CallStart | None = None

    def start(self) -> str:
        """`response.created` and the first `response.in_progress`."""
        return self._state("response.created") + self._state("response.in_progress")

    def event(self, event: Event) -> str:
        """The frames of one event."""
        if isinstance(event, Text):
            opening = self._enter("message")
            self._chunks.append(event.text)
            return opening + self._delta("response.output_text.delta", event.text, {"logprobs": []})
        if isinstance(event, Reasoning):
            opening = self._enter("reasoning")
            self._chunks.append(event.text)
            return opening + self._delta("response.reasoning_text.delta", event.text, {})
        if isinstance(event, CallStart):
            return self._start_call(event)
        if isinstance(event, CallArguments):
            self._chunks.append(event.text)
            return self._call_frame("delta", {"delta": event.text})
        if isinstance(event, CallEnd):
            return self._close("completed")
        if isinstance(event, Finished):
            return self._end(event)
        if isinstance(event, Failed):
            return self._fail(event)
        return ""

    def keep_alive(self, waiting: Queued | Prefill | None) -> str:
        """A repeated `response.in_progress`: some clients count nothing else as a sign of life."""
        return self._state("response.in_progress")

    def comment(self, text: str) -> str:
        """A comment frame."""
        return comment_frame(text)

    @property
    def _index(self) -> int:
        return len(self._output)

    def _frame(self, kind: str, data: Mapping[str, Any]) -> str:
        frame = sse({"type": kind, "sequence_number": self._sequence, **data}, kind)
        self._sequence += 1
        return frame

    def _state(self, kind: str) -> str:
        body = response_body(self._parsed, self._header, "in_progress", list(self._output))
        return self._frame(kind, {"response": body})

    def _delta(self, kind: str, text: str, more: Mapping[str, Any]) -> str:
        return self._frame(kind, {**self._place, "content_index": 0, "delta": text, **more})

    def _announce(self, item: Item) -> str:
        self._place = {"item_id": item["id"], "output_index": self._index}
        return self._frame("response.output_item.added", {"output_index": self._index, "item": item})

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if self._open == "reasoning" else text_part(text)

    def _enter(self, kind: str) -> str:
        """Open an item of this kind with its one part, unless it is open; the one before is closed."""
        if self._open == kind:
            return ""
        closing = self._close("completed")
        self._open = kind
        if kind == "reasoning":
            added = self._announce(self._items.reasoning(self._index, None))
        else:
            added = self._announce(self._items.message(self._index, None, "in_progress"))
        part = {**self._place, "content_index": 0, "part": self._part("")}
        return closing + added + self._frame("response.content_part.added", part)

    def _start_call(self, event: CallStart) -> str:
        closing = self._close("completed")
        item = self._items.call(self._index, event.id, event.name, "", "in_progress")
        self._open, self._call = item["type"], event
        return closing + self._announce(item)

    def _call_frame(self, step: str, data: Mapping[str, Any]) -> str:
        name = "custom_tool_call_input" if self._open == "custom_tool_call" else "function_call_arguments"
        return self._frame(f"response.{name}.{step}", {**self._place, **data})

    def _close(self, status: str) -> str:
        """Finish the open item: the done events of its content, then its own."""
        if self._open is None:
            return ""
        text = "".join(self._chunks)
        if self._call is not None:
            item = self._items.call(self._index, self._call.id, self._call.name, text, status)
            field = "input" if self._open == "custom_tool_call" else "arguments"
            frames = self._call_frame("done", {field: text}) if status == "completed" else ""
        else:
            place = {**self._place, "content_index": 0}
            if self._open == "reasoning":
                item = self._items.reasoning(self._index, text)
                frames = self._frame("response.reasoning_text.done", {**place, "text": text})
            else:
                item = self._items.message(self._index, text, status)
                frames = self._frame("response.output_text.done", {**place, "text": text, "logprobs": []})
            frames += self._frame("response.content_part.done", {**place, "part": self._part(text)})
        if self._call is None or status == "completed":
            frames += self._frame("response.output_item.done", {"output_index": self._index, "item": item})
        self._output.append(item)
        self._open, self._call, self._chunks = None, None, []
        return frames

    def _end(self, event: Finished) -> str:
        cut = event.reason in ("length", "context_full")
        closing = self._close("incomplete" if cut or self._call is not None else "completed")
        body = finished_body(self._parsed, self._header, self._output, event.reason, event.usage)
        if self._kept is not None:
            self._kept(body)
        if event.cache_note:
            closing += comment_frame(f"cache {event.cache_note}")
        return closing + self._frame(f"response.{body['status']}", {"response": body})

    def _fail(self, event: Failed) -> str:
        """`response.failed` with what was written so far; the open item is left open."""
        detail = openai_error(event.error)["error"]
        body = response_body(self._parsed, self._header, "failed", self._output)
        body["error"] = {"code": detail["code"] or "server_error", "message": detail["message"]}
        return self._frame("response.failed", {"response": body})
