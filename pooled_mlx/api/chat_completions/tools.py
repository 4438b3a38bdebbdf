"""Tools, tool choice and response format of a Chat Completions body."""

from __future__ import annotations

from collections.abc import Sequence

from pooled_mlx.api.common import (
    MAX_FORMAT_CHARACTERS,
    MAX_TOOLS,
    Fields,
    check_tool_choice,
    check_tools,
    read_function_tool,
    read_schema,
    show,
    skipped_tool,
)
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import ResponseFormat, Tool, ToolChoice


def read_tools(body: Fields) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The function tools in their order, and one warning for each kind of tool that this server cannot run."""
    entries = body.objects("tools")
    if len(entries) > MAX_TOOLS:
        raise bad_request(f"tools has {len(entries)} entries; at most {MAX_TOOLS} are allowed.", "tools")
    tools: list[Tool] = []
    warnings: dict[str, None] = {}
    for entry in entries:
        kind = entry.text("type")
        if kind == "custom":
            raise bad_request(
                f"{entry.param('type')}: custom tools are not supported on Chat Completions. "
                "Declare a function, or use /v1/responses.",
                entry.param("type"),
                "unsupported_value",
            )
        if kind not in (None, "function"):
            warnings[skipped_tool(kind)] = None
            continue
        function = entry.object("function")
        if function is None:
            raise bad_request(
                f"{entry.param('function')} is missing: an object with name, description and parameters is required.",
                entry.param("function"),
            )
        tools.append(read_function_tool(function))
    check_tools(tools)
    return tuple(tools), tuple(warnings)


def read_tool_choice(body: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """The choice in all its forms: a word, a named function, or an allowed subset."""
    value = body.get("tool_choice")
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        choice = _choice_of_word(value, "tool_choice")
    else:
        choice = _choice_of_object(Fields(value, "tool_choice"))
    check_tool_choice(choice, tools)
    return choice


def _choice_of_word(word: str, param: str) -> ToolChoice:
    if word == "auto":
        return ToolChoice("auto")
    if word == "none":
        return ToolChoice("none")
    if word in ("required", "any"):
        return ToolChoice("required")
    raise bad_request(
        f"{param} must be none, auto, required, a named function or allowed_tools, not {show(word)}.", param, "invalid_value"
    )


def _choice_of_object(choice: Fields) -> ToolChoice:
    kind = choice.required_text("type")
    if kind == "function":
        # Responses clients send the name without the inner object: the intent is the same.
        owner = choice.object("function") or choice
        return ToolChoice("named", name=owner.required_text("name"))
    if kind == "allowed_tools":
        return _allowed_tools(choice.object("allowed_tools") or choice)
    if kind in ("auto", "none", "required", "any"):
        return _choice_of_word(kind, choice.param("type"))
    raise bad_request(
        f"{choice.param('type')} must be function or allowed_tools, not {show(kind)}.",
        choice.param("type"),
        "unsupported_value",
    )


def _allowed_tools(allowed: Fields) -> ToolChoice:
    mode = allowed.text("mode") or "auto"
    if mode not in ("auto", "required"):
        raise bad_request(f"{allowed.param('mode')} must be auto or required, not {show(mode)}.", allowed.param("mode"))
    names: list[str] = []
    for tool in allowed.objects("tools"):
        if tool.text("type") not in (None, "function"):
            raise bad_request(f"{tool.param('type')} must be function, not {show(tool.get('type'))}.", tool.param("type"))
        names.append((tool.object("function") or tool).required_text("name"))
    if not names:
        raise bad_request(f"{allowed.param('tools')} must name at least one tool.", allowed.param("tools"))
    return ToolChoice("required" if mode == "required" else "auto", allowed=tuple(names))


def read_response_format(body: Fields) -> ResponseFormat:
    """The shape of the answer text: free, any JSON object, or JSON of a schema."""
    value = body.object("response_format")
    if value is None:
        return ResponseFormat()
    kind = value.required_text("type")
    if kind == "text":
        return ResponseFormat()
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind == "json_schema":
        wrapper = value.object("json_schema")
        if wrapper is None:
            raise bad_request(
                f"{value.param('json_schema')} is missing: an object with name and schema is required.",
                value.param("json_schema"),
            )
        schema = read_schema(wrapper, "schema", MAX_FORMAT_CHARACTERS)
        if schema is None:
            raise bad_request(f"{wrapper.param('schema')} is missing: a JSON schema is required.", wrapper.param("schema"))
        return ResponseFormat(
            "json_schema", schema=schema, name=wrapper.text("name") or "response", strict=wrapper.flag("strict") is True
        )
    raise bad_request(
        f"{value.param('type')} must be text, json_object or json_schema, not {show(kind)}.",
        value.param("type"),
        "invalid_value",
    )
