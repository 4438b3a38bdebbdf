"""Responses tools: functions, custom tools and namespaces, and the names under which the model sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pooled_mlx.api.common import Fields, found_later_last, read_function_tool, read_tool_name, show, skipped_tool
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import CustomGrammar, Tool, ToolChoice

_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class CallName:
    """How a call of one tool is written on the wire."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolSet:
    """The tools of a request. `wire` maps each tool's core name to its wire form."""

    tools: tuple[Tool, ...] = ()
    wire: dict[str, CallName] = field(default_factory=dict[str, CallName])

    def core_name(self, name: str, namespace: str | None) -> str:
        """The core name of a tool that the client names in wire form; unknown ones keep their name."""
        if namespace is not None:
            for core, wire in self.wire.items():
                if wire.name == name and wire.namespace == namespace:
                    return core
        return name


def read_tools(tools: Iterable[Fields], warn: list[str]) -> list[Tool]:
    """Tools in the order sent, deferred ones last; hosted and unknown types are skipped with one warning for each type."""
    read: list[Tool] = []
    deferred: list[str] = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "namespace":
            namespace = tool.required_text("name")
            for inner in tool.objects("tools"):
                read.extend(_read_tool(inner, namespace, warn))
        else:
            read.extend(_read_tool(tool, None, warn))
            if tool.get("defer_loading") is True and read:
                deferred.append(read[-1].name)
    return found_later_last(read, deferred)


def _read_tool(tool: Fields, namespace: str | None, warn: list[str]) -> list[Tool]:
    kind = tool.get("type")
    if kind == "function":
        return [read_function_tool(tool, namespace=namespace)]
    if kind == "custom":
        return [_read_custom(tool, namespace)]
    text = skipped_tool(kind)
    if text not in warn:
        warn.append(text)
    return []


def _read_custom(tool: Fields, namespace: str | None) -> Tool:
    form = tool.object("format")
    grammar = None
    if form is not None and form.get("type") == "grammar":
        syntax = form.get("syntax")
        if syntax not in ("lark", "regex"):
            raise bad_request(f"{form.param('syntax')} must be 'lark' or 'regex', not {show(syntax)}.", form.param("syntax"))
        grammar = CustomGrammar(syntax, form.required_text("definition"))
    elif form is not None and form.get("type") != "text":
        raise bad_request(
            f"{form.param('type')} must be 'text' or 'grammar', not {show(form.get('type'))}.", form.param("type")
        )
    name = read_tool_name(tool)
    return Tool(name, tool.text("description") or "", custom=True, namespace=namespace, grammar=grammar)


def tool_set(tools: Sequence[Tool]) -> ToolSet:
    """Give every tool a core name of its own: the bare name, or `namespace__name` where the bare one stands elsewhere too."""
    counts = Counter(tool.name for tool in tools)
    named: list[Tool] = []
    wire: dict[str, CallName] = {}
    for tool in tools:
        core = tool.name
        if tool.namespace is not None and counts[tool.name] > 1:
            core = f"{tool.namespace}{_SEPARATOR}{tool.name}"
        named.append(tool if core == tool.name else replace(tool, name=core))
        wire[core] = CallName(tool.name, tool.namespace, tool.custom)
    return ToolSet(tuple(named), wire)


def read_tool_choice(body: Fields, tools: ToolSet) -> ToolChoice:
    """`tool_choice` in all its forms; a hosted tool and a malformed `allowed_tools` are refused."""
    value = body.get("tool_choice")
    if value is None or value == "auto":
        return ToolChoice()
    if value in ("none", "required"):
        return ToolChoice(value)
    if isinstance(value, str):
        raise bad_request(f"tool_choice must be auto, none, required or an object, not {show(value)}.", "tool_choice")
    choice = Fields(value, "tool_choice")
    if choice.get("type") == "allowed_tools":
        mode = choice.get("mode")
        if mode not in ("auto", "required"):
            raise bad_request(f"tool_choice.mode must be auto or required, not {show(mode)}.", "tool_choice.mode")
        allowed = [name for entry in choice.objects("tools") for name in _chosen(entry, tools)]
        if not allowed:
            raise bad_request("tool_choice.tools must name at least one tool.", "tool_choice.tools")
        return ToolChoice(mode, allowed=tuple(dict.fromkeys(allowed)))
    names = _chosen(choice, tools)
    if choice.get("type") == "namespace":
        return ToolChoice("required", allowed=tuple(names))
    return ToolChoice("named", names[0])


def _chosen(entry: Fields, tools: ToolSet) -> list[str]:
    """The core names that one entry of a choice means."""
    kind = entry.get("type")
    name = entry.text("name")
    if kind == "namespace" and name:
        inside = [core for core, wire in tools.wire.items() if wire.namespace == name]
        if inside:
            return inside
        raise bad_request(f"{entry.path} names the namespace {show(name)}, which holds no tool.", entry.path)
    if kind in ("function", "custom") and name:
        return [tools.core_name(name, entry.text("namespace"))]
    if kind in ("function", "custom"):
        raise bad_request(f"{entry.param('name')} is missing.", entry.param("name"))
    raise bad_request(
        f"{entry.param('type')} {show(kind)} is not supported: only function and custom tools can be chosen here.",
        entry.param("type"),
    )
