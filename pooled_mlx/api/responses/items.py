"""Responses input items to turns of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pooled_mlx.api.blobs import UNREADABLE, decode_blob
from pooled_mlx.api.common import Fields, clean, compact_json, omitted, show
from pooled_mlx.api.responses.tools import ToolSet
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import ToolCall, Turn

_HOSTED_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_NOTES = {"input_image": "image", "image_url": "image", "input_file": "file"}


class _Group:
    """The assistant items that belong to one turn: reasoning, then a message, then calls."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.used = False
        self.message_last = False

    def turn(self) -> Turn:
        reasoning = "".join(self.reasoning) if self.reasoning else None
        return Turn("assistant", "".join(self.texts), reasoning, tuple(self.calls))


class ItemReader:
    """Reads items in order into `turns`; `warnings` gets each thing worth telling once."""

    def __init__(self, tools: ToolSet, warnings: list[str]) -> None:
        self.turns: list[Turn] = []
        self._tools = tools
        self._warnings = warnings
        self._group = _Group()

    def read(self, items: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> list[Turn]:
        """All turns of `items`; `paths` names the place of each in the body for complaints."""
        for item, path in zip(items, paths, strict=True):
            self._item(Fields(item, path))
        self._close()
        return self.turns

    def _item(self, item: Fields) -> None:
        kind = item.get("type")
        if kind is None and "role" in item.values:
            kind = "message"
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._reasoning(item)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add(Turn("tool", _output_text(item), tool_call_id=item.required_text("call_id")))
        elif kind in ("compaction", "context_compaction", "agent_message"):
            self._note(item)
        elif kind in ("compaction_trigger", "ghost_snapshot"):
            self._warn(f"input items of type {show(kind)} say nothing to the model and are skipped")
        elif isinstance(kind, str) and kind in _HOSTED_ITEMS:
            self._warn(f"input items of type {show(kind)} are skipped: that tool does not run on this server")
        elif kind != "additional_tools":
            raise bad_request(f"{item.param('type')} {show(kind)} is not supported here.", item.param("type"))

    def _note(self, item: Fields) -> None:
        """A client's own item: what it says in words becomes a late system message, wherever it keeps them."""
        words = "".join(
            _content_text(item, name) for name in ("content", "summary", "text", "message") if item.get(name) is not None
        )
        kind = item.get("type")
        if words:
            self._add(Turn("system", words))
        elif item.get("encrypted_content"):
            self._warn(f"input items of type {show(kind)} are encrypted for another server: what they hold is not known here")

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)

    def _close(self) -> None:
        if self._group.used:
            self.turns.append(self._group.turn())
            self._group = _Group()

    def _add(self, turn: Turn) -> None:
        self._close()
        self.turns.append(turn)

    def _message(self, item: Fields) -> None:
        role = item.get("role")
        core = _ROLES.get(role) if isinstance(role, str) else None
        if core is None:
            raise bad_request(
                f"{item.param('role')} must be user, assistant, system or developer, not {show(role)}.", item.param("role")
            )
        text = _content_text(item, "content")
        if core == "user":
            self._add(Turn("user", text))
        elif core == "system":
            if text:
                self._add(Turn("system", text))
        else:
            if self._group.calls or self._group.message_last:
                self._close()
            self._group.used = self._group.message_last = True
            self._group.texts.append(text)

    def _reasoning(self, item: Fields) -> None:
        """The exact reasoning from our blob, else the text of `content`, else the summary."""
        if self._group.calls:
            self._close()
        self._group.used, self._group.message_last = True, False
        reasoning = None
        if blob := item.text("encrypted_content"):
            reasoning = decode_blob(blob)
            if reasoning is None:
                self._warn(UNREADABLE)
        if reasoning is None:
            reasoning = _parts_text(item, "content") or _parts_text(item, "summary") or None
        if reasoning is not None:
            self._group.reasoning.append(reasoning)

    def _call(self, item: Fields, custom: bool) -> None:
        namespace = item.text("namespace")
        value = item.get("input" if custom else "arguments")
        if value is None:
            value = "" if custom else "{}"
        self._group.used, self._group.message_last = True, False
        self._group.calls.append(
            ToolCall(
                id=item.required_text("call_id"),
                name=self._tools.core_name(item.required_text("name"), namespace),
                arguments=clean(value) if isinstance(value, str) else compact_json(value),
                custom=custom,
                namespace=namespace,
            )
        )


def _parts_text(item: Fields, name: str) -> str:
    """The joined text of reasoning parts; null and absent are empty."""
    return "".join(part.text("text") or "" for part in item.objects(name))


def _content_text(item: Fields, name: str) -> str:
    """A string, or text parts joined by nothing; images and files become notes."""
    value = item.get(name)
    if value is None or isinstance(value, str):
        return clean(value or "")
    texts: list[str] = []
    for part in item.objects(name):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
            texts.append(part.text("text") or "")
        elif kind == "refusal":
            texts.append(part.text("refusal") or "")
        elif isinstance(kind, str) and kind in _NOTES:
            texts.append(omitted(_NOTES[kind]))
        else:
            raise bad_request(f"{part.param('type')} {show(kind)} is not supported here.", part.param("type"))
    return "".join(texts)


def _output_text(item: Fields) -> str:
    """A tool's output: text, parts, or any JSON value as text."""
    value = item.get("output")
    if (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(part, Mapping) for part in value))
    ):
        return _content_text(item, "output")
    return compact_json(value)
