"""Messages content (strings and blocks) to turns of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pooled_mlx.api.blobs import UNREADABLE, decode_blob
from pooled_mlx.api.common import Fields, clean, compact_json, omitted, read_function_tool, show
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Tool, ToolCall, Turn

_HOSTED_SUFFIXES = ("_tool_result", "_tool_use")
_HOSTED = frozenset({"container_upload", "mcp_tool_listing", "fallback"})


@dataclass(slots=True)
class History:
    """What a list of messages amounts to: turns, tools that arrived or were found in them, and things worth one warning."""

    turns: list[Turn] = field(default_factory=list[Turn])
    tools: list[Tool] = field(default_factory=list[Tool])
    warnings: list[str] = field(default_factory=list[str])
    found: list[str] = field(default_factory=list[str])
    """The tools that the client's search has found, in order."""

    def warn(self, text: str) -> None:
        """Note a warning once."""
        if text not in self.warnings:
            self.warnings.append(text)


def read_system(body: Fields) -> list[Turn]:
    """The top-level `system`: one turn for each text, empty ones left out."""
    value = body.get("system")
    if value is None or isinstance(value, str):
        return [Turn("system", clean(value))] if value else []
    turns: list[Turn] = []
    for block in body.objects("system"):
        if block.get("type") != "text":
            raise bad_request(f"{block.param('type')} must be 'text', not {show(block.get('type'))}.", block.param("type"))
        if text := block.text("text"):
            turns.append(Turn("system", text))
    return turns


def read_messages(body: Fields) -> History:
    """All of `messages`, in order."""
    history = History()
    messages = body.objects("messages")
    if not messages:
        raise bad_request("messages is missing: a non-empty array of messages is required.", "messages")
    readers: dict[Any, Callable[[Fields, History], None]] = {
        "user": _read_user,
        "assistant": _read_assistant,
        "system": _read_system_message,
    }
    for message in messages:
        role = message.get("role")
        reader = readers.get(role) if isinstance(role, str) else None
        if reader is None:
            raise bad_request(
                f"{message.param('role')} must be 'user', 'assistant' or 'system', not {show(role)}.", message.param("role")
            )
        reader(message, history)
    return history


def _blocks(owner: Fields) -> Iterator[tuple[str, Fields]]:
    """The blocks of `content` with their types; a string is one text block."""
    content = owner.get("content")
    if content is None:
        return
    if isinstance(content, str):
        yield "text", Fields({"type": "text", "text": content}, owner.param("content"))
        return
    for block in owner.objects("content"):
        yield block.required_text("type"), block


def _read_user(message: Fields, history: History) -> None:
    """Tool results become turns of their own, directly behind their calls; everything else is one user turn."""
    results: list[Turn] = []
    texts: list[str] = []
    for kind, block in _blocks(message):
        if kind == "tool_result":
            results.append(_tool_result(block, history))
        else:
            texts.append(_user_text(kind, block, history))
    history.turns.extend(results)
    if texts or not results:
        history.turns.append(Turn("user", "".join(texts)))


def _user_text(kind: str, block: Fields, history: History) -> str:
    if kind == "text":
        return block.text("text") or ""
    if kind in ("image", "document"):
        return omitted(kind)
    if kind == "tool_reference":
        history.found.append(block.required_text("tool_name"))
        return f"[tool {history.found[-1]} is loaded]"
    return _skip(kind, block, history)


def _skip(kind: str, block: Fields, history: History) -> str:
    """Blocks of tools that run on Anthropic's servers mean nothing here; any other unknown block is refused."""
    if kind in _HOSTED or kind.endswith(_HOSTED_SUFFIXES):
        history.warn(f"content blocks of type {show(kind)} are skipped: that tool does not run on this server")
        return ""
    raise bad_request(f"{block.param('type')} {show(kind)} is not supported here.", block.param("type"))


def _tool_result(block: Fields, history: History) -> Turn:
    return Turn(
        "tool",
        "".join(_user_text(kind, inner, history) for kind, inner in _blocks(block)),
        tool_call_id=block.required_text("tool_use_id"),
        is_error=block.flag("is_error") or False,
    )


def _read_assistant(message: Fields, history: History) -> None:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for kind, block in _blocks(message):
        if kind == "text":
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thought = _thinking(block, history)
            if thought is not None:
                reasoning.append(thought)
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind != "redacted_thinking":
            texts.append(_skip(kind, block, history))
    history.turns.append(Turn("assistant", "".join(texts), "".join(reasoning) if reasoning else None, tuple(calls)))


def _thinking(block: Fields, history: History) -> str | None:
    """The exact reasoning from our signature, else the visible text; None when neither says anything."""
    signature = block.text("signature")
    if signature:
        exact = decode_blob(signature)
        if exact is not None:
            return exact
        history.warn(UNREADABLE)
    return block.text("thinking") or None


def _tool_use(block: Fields) -> ToolCall:
    value = block.get("input")
    arguments = clean(value) if isinstance(value, str) else compact_json({} if value is None else value)
    return ToolCall(block.required_text("id"), block.required_text("name"), arguments)


def _read_system_message(message: Fields, history: History) -> None:
    """A system message among the others; `tool_addition` and `tool_removal` blocks become short notes."""
    texts: list[str] = []
    for kind, block in _blocks(message):
        if kind == "tool_addition":
            texts.append(_tool_addition(block, history))
        elif kind == "tool_removal":
            texts.append(f"[tool {_referenced_name(block)} is no longer available]")
        else:
            texts.append(_user_text(kind, block, history))
    if any(texts):
        history.turns.append(Turn("system", "".join(texts)))


def _tool_addition(block: Fields, history: History) -> str:
    tool = block.object("tool")
    definition = tool.object("definition") if tool else None
    if definition is not None:
        history.tools.append(read_function_tool(definition, "input_schema"))
        return f"[tool {history.tools[-1].name} is available now]"
    return f"[tool {_referenced_name(block)} is available now]"


def _referenced_name(block: Fields) -> str:
    tool = block.object("tool") or Fields({}, block.param("tool"))
    for name in ("tool_name", "name", "mcp_server_name", "server_name"):
        if text := tool.text(name):
            return text
    raise bad_request(f"{tool.path} names no tool.", tool.path)
