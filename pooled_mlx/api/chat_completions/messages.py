"""The `messages` of a Chat Completions body as turns. Lenient where clients differ, exact where meaning would be lost."""

from __future__ import annotations

from typing import Any

from pooled_mlx.api.common import MAX_MESSAGES, Fields, clean, compact_json, omitted, show
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Role, ToolCall, Turn

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_NOTES = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "file": "file",
    "input_file": "file",
    "video_url": "video",
    "video": "video",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_AUDIO_PARTS = ("input_audio", "audio", "audio_url", "output_audio")


def read_messages(body: Fields) -> list[Turn]:
    """The turns in the order of the messages, system and developer messages not yet arranged."""
    raw = body.list("messages")
    if not raw:
        raise bad_request("messages is missing or empty: an array of at least one message is required.", "messages")
    if len(raw) > MAX_MESSAGES:
        raise bad_request(f"messages has {len(raw)} entries; at most {MAX_MESSAGES} are allowed.", "messages")
    turns: list[Turn] = []
    open_calls: list[ToolCall] = []
    for index, value in enumerate(raw):
        message = Fields(value, f"messages[{index}]")
        role = _read_role(message)
        if role == "assistant":
            turn = _assistant(message, index)
            open_calls = list(turn.tool_calls)
        elif role == "tool":
            turn = _tool_result(message, open_calls)
        else:
            turn = Turn(role, _read_content(message)[0])
        turns.append(turn)
    return turns


def _read_role(message: Fields) -> Role:
    value = message.get("role")
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is not None:
        return role
    if value == "function":
        raise bad_request(
            f"{message.param('role')}: the deprecated role 'function' is not supported. Send role 'tool' with tool_call_id.",
            message.param("role"),
            "unsupported_value",
        )
    raise bad_request(
        f"{message.param('role')} must be one of {', '.join(_ROLES)}, not {show(value)}.",
        message.param("role"),
        "invalid_value",
    )


def _assistant(message: Fields, index: int) -> Turn:
    if message.get("function_call") is not None:
        raise bad_request(
            f"{message.param('function_call')}: the deprecated function_call is not supported. Send tool_calls.",
            message.param("function_call"),
            "unsupported_parameter",
        )
    text, thought = _read_content(message)
    if not text:
        text = message.text("refusal") or ""
    reasoning = message.text("reasoning_content")
    if reasoning is None and isinstance(message.get("reasoning"), str):
        reasoning = message.text("reasoning")
    if reasoning is None:
        reasoning = thought
    calls = tuple(_read_call(call, f"call_{index}_{position}") for position, call in enumerate(message.objects("tool_calls")))
    return Turn("assistant", text, reasoning, calls)


def _read_call(call: Fields, spare_id: str) -> ToolCall:
    if call.get("type") == "custom":
        raise bad_request(
            f"{call.param('type')}: calls of custom tools are not supported on this API.",
            call.param("type"),
            "unsupported_value",
        )
    function = call.object("function")
    if function is None:
        raise bad_request(f"{call.param('function')} is missing: name and arguments are required.", call.param("function"))
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    text = clean(arguments) if isinstance(arguments, str) else compact_json(arguments)
    return ToolCall(id=call.text("id") or spare_id, name=function.required_text("name"), arguments=text)


def _tool_result(message: Fields, open_calls: list[ToolCall]) -> Turn:
    """A tool result with the call it answers: by id, without an id the first call that has no result yet."""
    call_id = message.text("tool_call_id") or None
    name = message.text("name") or None
    match = next((call for call in open_calls if call_id is None or call.id == call_id), None)
    if match is not None:
        open_calls.remove(match)
        call_id, name = match.id, match.name
    return Turn("tool", _read_content(message)[0], tool_call_id=call_id, name=name)


def _read_content(message: Fields) -> tuple[str, str | None]:
    """The text of a message, its parts joined by nothing, and the thinking some clients send as parts of it."""
    content = message.get("content")
    if content is None:
        return "", None
    if isinstance(content, str):
        return clean(content), None
    if not isinstance(content, list):
        raise bad_request(
            f"{message.param('content')} must be a string or an array of parts, not {show(content)}.", message.param("content")
        )
    texts: list[str] = []
    thoughts: list[str] = []
    for index, value in enumerate(content):
        if isinstance(value, str):
            texts.append(clean(value))
            continue
        part = Fields(value, f"{message.param('content')}[{index}]")
        kind = part.get("type")
        if kind == "thinking":
            thoughts.append(_thinking_text(part))
        else:
            texts.append(_read_part(part, kind))
    return "".join(texts), "".join(thoughts) if thoughts else None


def _read_part(part: Fields, kind: Any) -> str:
    if kind in _TEXT_PARTS:
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{part.param('text')} must be a string, not {show(part.get('text'))}.", part.param("text"))
        return part.text("text") or ""
    if kind == "refusal":
        return part.text("refusal") or ""
    if isinstance(kind, str) and kind in _NOTES:
        return omitted(_NOTES[kind])
    if kind in _AUDIO_PARTS:
        raise bad_request(
            f"{part.param('type')} is {show(kind)}: this model reads text only, audio is not supported.",
            part.param("type"),
            "unsupported_value",
        )
    raise bad_request(
        f"{part.param('type')} must be text, image_url, file or refusal, not {show(kind)}.", part.param("type"), "invalid_value"
    )


def _thinking_text(part: Fields) -> str:
    return part.text("thinking") or ""
