"""What an answer to any request must be: a refusal in the API's shape, or an answer or stream that its client can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import pydantic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.fuzz.cases import CHAT, COUNTS, MESSAGES, RESPONSES
from tests.wire import frames

_OPENAI_ERROR = {"message", "type", "param", "code"}
_RESPONSE_STATES = ("created", "in_progress", "completed", "incomplete")
_ECHO: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "reasoning": {},
    "temperature": None,
    "text": {},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "max_tool_calls": None,
    "prompt_cache_key": None,
    "previous_response_id": None,
    "user": None,
}
"""What a response repeats of its request, and stand-ins for it: a client that sent nonsense gets its own nonsense back."""


Frames = list[tuple[str | None, dict[str, Any]]]


class Wrong(AssertionError):
    """The server's answer is not one that it may give; the message says why."""


def need(holds: Any, why: str) -> None:
    """Raise `Wrong` unless `holds`."""
    if not holds:
        raise Wrong(why)


def _by_type(union: Any) -> dict[str, type[pydantic.BaseModel]]:
    """The event classes of an SDK by their type: validating against their union takes a hundred times longer."""
    return {name: kind for kind in _members(union) for name in get_args(kind.model_fields["type"].annotation)}


def _members(union: Any) -> Iterator[type[pydantic.BaseModel]]:
    for part in get_args(union):
        if isinstance(part, type) and issubclass(part, pydantic.BaseModel):
            yield part
        elif get_args(part):
            yield from _members(part)


_RESPONSES_EVENTS = _by_type(ResponseStreamEvent)
_MESSAGES_EVENTS = _by_type(RawMessageStreamEvent)


def check(api: str, endpoint: str, status: int, headers: Mapping[str, str], text: str) -> Any:
    """Check a finished answer; the decoded body of a whole answer, None for a refusal or a stream. Raises `Wrong`."""
    try:
        return _check(api, endpoint, status, headers, text)
    except (pydantic.ValidationError, KeyError, TypeError, ValueError, IndexError) as error:
        raise Wrong(f"{type(error).__name__}: {str(error)[:500]}") from error
    except AssertionError as error:
        raise Wrong(str(error) or "a frame is malformed") from error


def _check(api: str, endpoint: str, status: int, headers: Mapping[str, str], text: str) -> Any:
    kind = headers.get("content-type", "")
    if status != 200:
        _check_refusal(api, status, headers, kind, text)
        return None
    need(headers.get("x-request-id"), "no x-request-id")
    if kind.startswith("text/event-stream"):
        need(endpoint == api, "a count was streamed")
        _STREAMS[api](frames(text))
        return None
    need(kind == "application/json", f"content-type {kind!r}")
    body = json.loads(text)
    if endpoint in COUNTS.values():
        count = MessageTokensCount.model_validate(body).input_tokens
        need(count > 0, f"{count} input tokens")
        need(api == MESSAGES or body["object"] == "response.input_tokens", "not a count")
    else:
        _WHOLE[api](body)
    return body


def _check_refusal(api: str, status: int, headers: Mapping[str, str], kind: str, text: str) -> None:
    need(status == 400, f"status {status}: {text[:300]}")
    need(kind == "application/json", f"content-type {kind!r}")
    need(headers.get("x-should-retry") == "false", "x-should-retry is not false")
    body = json.loads(text)
    error = body["error"]
    need(isinstance(error["message"], str) and error["message"], "no message")
    need(len(error["message"]) < 2000, f"a message of {len(error['message'])} characters")
    need("Traceback" not in text and "/site-packages/" not in text, "the message shows the server's inside")
    if api == MESSAGES:
        need(set(body) == {"type", "error"} and body["type"] == "error", f"not Anthropic's shape: {text[:200]}")
        need(error["type"] == "invalid_request_error" and set(error) <= {"type", "message", "details"}, f"error {error}")
        return
    need(set(body) == {"error"} and set(error) == _OPENAI_ERROR, f"not OpenAI's shape: {text[:200]}")
    need(error["type"] == "invalid_request_error", f"type {error['type']!r}")
    need(error["param"] is None or isinstance(error["param"], str), f"param {error['param']!r}")
    need(error["code"] is None or isinstance(error["code"], str), f"code {error['code']!r}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _check_chat(body: dict[str, Any]) -> None:
    answer = ChatCompletion.model_validate(body)
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    need(choice.finish_reason in ("stop", "tool_calls", "length"), f"finish_reason {choice.finish_reason!r}")
    need(choice.finish_reason != "tool_calls" or calls, "tool_calls without calls")
    need(calls or choice.message.content is not None, "neither content nor calls")
    for call in calls:
        need(call.type == "function" and call.id and call.function.name, f"call {call}")
        need(call.type != "function" or _is_object(call.function.arguments), f"arguments of {call}")
    usage = answer.usage
    need(usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"usage {usage}")


def _check_chat_stream(events: Frames) -> None:
    need(events[-1] == (None, {"done": True}), f"the end is {str(events[-1])[:300]}")
    chunks = [ChatCompletionChunk.model_validate(data) for name, data in events[:-1]]
    need(len({chunk.id for chunk in chunks}) == 1, "ids differ")
    choices = [choice for chunk in chunks for choice in chunk.choices]
    need(choices[0].delta.role == "assistant", "no role chunk first")
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    need(len(reasons) == 1 and choices[-1].finish_reason == reasons[0], f"finish reasons {reasons}")
    arguments: dict[int, str] = {}
    for choice in choices:
        for part in choice.delta.tool_calls or ():
            need(part.function is not None, "a call without a function")
            assert part.function is not None
            need((part.index in arguments) == (part.function.name is None), "name not in the first piece alone")
            arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    need(list(arguments) == list(range(len(arguments))), f"indexes {list(arguments)}")
    if reasons[0] != "length":
        for index, text in arguments.items():
            need(_is_object(text), f"arguments of call {index}: {text[:200]!r}")
    need(reasons[0] != "tool_calls" or arguments, "tool_calls without calls")


def _without_echo(body: dict[str, Any]) -> dict[str, Any]:
    need(body.keys() >= _ECHO.keys(), f"missing are {_ECHO.keys() - body.keys()}")
    return {**body, **_ECHO}


def _check_response(body: dict[str, Any]) -> None:
    response = Response.model_validate(_without_echo(body))
    need(response.status in ("completed", "incomplete"), f"status {response.status!r}")
    need((response.status == "incomplete") == (response.incomplete_details is not None), "incomplete_details")
    usage = response.usage
    need(usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens, f"usage {usage}")
    for item in response.output:
        if item.type == "function_call" and item.status == "completed":
            need(_is_object(item.arguments), f"arguments {item.arguments[:200]!r}")


def _check_response_stream(events: Frames) -> None:
    for name, data in events:
        need(name == data["type"], f"event {name!r} holds {data['type']!r}")
        if name is not None and name.removeprefix("response.") in _RESPONSE_STATES:
            data = {**data, "response": _without_echo(data["response"])}
        _RESPONSES_EVENTS[data["type"]].model_validate(data)
    need([data["sequence_number"] for _, data in events] == list(range(len(events))), "sequence numbers")
    kinds = [data["type"] for _, data in events]
    need(kinds[:2] == ["response.created", "response.in_progress"], f"the start is {kinds[:2]}")
    need(kinds[-1] in ("response.completed", "response.incomplete"), f"the end is {kinds[-1]}")
    final = events[-1][1]["response"]
    _check_response(final)
    done = [data["item"] for _, data in events if data["type"] == "response.output_item.done"]
    kept = [item for item in final["output"] if item["type"] not in _CALLS or item["status"] == "completed"]
    need(done == kept, "the items that were done are not those of the response")
    for place, item in enumerate(final["output"]):
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        pieces = "".join(data["delta"] for _, data in events if data.get("output_index") == place and "delta" in data)
        whole = item[field] if item["type"] in _CALLS else item["content"][0]["text"]
        need(pieces == whole, f"the pieces of item {place} are {pieces[:100]!r}, the item says {whole[:100]!r}")


_CALLS = ("function_call", "custom_tool_call")


def _check_message(body: dict[str, Any]) -> None:
    message = Message.model_validate(body)
    need(message.stop_reason is not None, "no stop_reason")
    calls = [block for block in message.content if block.type == "tool_use"]
    need(message.stop_reason != "tool_use" or calls, "tool_use without calls")
    need((message.stop_reason == "stop_sequence") == (message.stop_sequence is not None), "stop_sequence")
    need(all(isinstance(call.input, dict) for call in calls), "an input that is no object")


def _check_message_stream(events: Frames) -> None:
    for name, data in events:
        need(name == data["type"], f"event {name!r} holds {data['type']!r}")
        if name != "ping":
            _MESSAGES_EVENTS[data["type"]].model_validate(data)
    kinds = [data["type"] for _, data in events if data["type"] != "ping"]
    need(kinds[0] == "message_start", f"the start is {kinds[0]}")
    need(kinds[-2:] == ["message_delta", "message_stop"], f"the end is {events[-2:]}")
    reason = events[-2][1]["delta"]["stop_reason"]
    need(reason, "no stop_reason")
    inputs: dict[int, str] = {}
    open_block, blocks = None, 0
    for _, data in events:
        if data["type"] == "content_block_start":
            need(open_block is None and data["index"] == blocks, f"block {data['index']} starts out of order")
            open_block, blocks = data["index"], blocks + 1
            if data["content_block"]["type"] == "tool_use":
                inputs[open_block] = ""
        elif data["type"] == "content_block_delta":
            need(data["index"] == open_block, f"a piece of block {data['index']} while {open_block} is open")
            if data["delta"]["type"] == "input_json_delta":
                inputs[data["index"]] += data["delta"]["partial_json"]
        elif data["type"] == "content_block_stop":
            need(data["index"] == open_block, f"block {data['index']} stops while {open_block} is open")
            open_block = None
    need(open_block is None, "a block is left open")
    if reason in ("end_turn", "tool_use", "stop_sequence"):
        for place, text in inputs.items():
            need(_is_object(text or "{}"), f"input of block {place}: {text[:200]!r}")


_WHOLE: dict[str, Callable[[dict[str, Any]], None]] = {
    CHAT: _check_chat,
    RESPONSES: _check_response,
    MESSAGES: _check_message,
}
_STREAMS: dict[str, Callable[[Frames], None]] = {
    CHAT: _check_chat_stream,
    RESPONSES: _check_response_stream,
    MESSAGES: _check_message_stream,
}
