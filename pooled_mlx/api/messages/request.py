"""Messages bodies to core requests."""

from __future__ import annotations

from dataclasses import dataclass

from pooled_mlx.api.common import (
    MAX_FORMAT_CHARACTERS,
    Fields,
    check_hosted_alone,
    check_tool_choice,
    check_tools,
    check_turns,
    found_later_last,
    name_tool_results,
    read_effort,
    read_function_tool,
    read_output_limit,
    read_sampling,
    read_schema,
    read_stops,
    show,
    skipped_tool,
)
from pooled_mlx.api.edge import Parsed
from pooled_mlx.api.messages.blocks import History, read_messages, read_system
from pooled_mlx.api.messages.threads import MessageThread
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Request, ResponseFormat, Thinking, Tool, ToolChoice
from pooled_mlx.core.turns import arrange_turns

_MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class MessagesOptions:
    """What the renderer needs beyond the request.

    `omit_thinking`: thinking blocks come with their signature and no text. `thread`: the whole conversation, to be kept
    under the answer's id; None when the client asked for no thread.
    """

    omit_thinking: bool = False
    thread: MessageThread | None = None


def parse_messages(body: Fields, *, request_id: str, client: str, counting: bool, thread: MessageThread | None) -> Parsed:
    """Check a body. With `counting` the output limit may be absent. Raises `ApiError` 400 naming the field."""
    body.refuse({"mcp_servers": "MCP servers are not called from here: connect them to your client."})
    body.text("model")
    limit = read_output_limit(body, "max_tokens")
    if limit is None and not counting:
        raise bad_request("max_tokens is missing: a whole number of 1 or more is required.", "max_tokens")
    history = read_messages(body)
    tools = [*_read_tools(body, history), *history.tools]
    check_tools(tools)
    check_hosted_alone(body, tools)
    choice, parallel = _read_tool_choice(body)
    check_tool_choice(choice, tools)
    turns = arrange_turns(name_tool_results([*read_system(body), *history.turns]))
    check_turns(turns, tools, "messages")
    thinking, omit = _read_thinking(body, history)
    request = Request(
        id=request_id,
        turns=turns,
        tools=tuple(tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_read_format(body),
        sampling=read_sampling(body, 1),
        max_output_tokens=limit,
        stop=read_stops(body, "stop_sequences", _MAX_STOPS),
        thinking=thinking,
        client=client,
    )
    return Parsed(request, body.flag("stream") or False, MessagesOptions(omit, thread), tuple(history.warnings))


def _read_tools(body: Fields, history: History) -> list[Tool]:
    """The client's own tools; those that would run on Anthropic's servers are skipped with a warning.

    Tools that a search has found, and then those still deferred, come last.
    """
    tools: list[Tool] = []
    deferred: list[str] = []
    for tool in body.objects("tools"):
        kind = tool.get("type")
        if kind in (None, "custom", "function"):
            tools.append(read_function_tool(tool, "input_schema"))
            if tool.get("defer_loading") is True:
                deferred.append(tools[-1].name)
        else:
            history.warn(skipped_tool(kind))
    return found_later_last(tools, [*history.found, *deferred])


def _read_tool_choice(body: Fields) -> tuple[ToolChoice, bool]:
    choice = body.object("tool_choice")
    if choice is None:
        return ToolChoice(), True
    parallel = not choice.flag("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind == "tool":
        return ToolChoice("named", choice.required_text("name")), parallel
    if kind == "any":
        return ToolChoice("required"), parallel
    if kind in ("auto", "none"):
        return ToolChoice(kind), parallel
    raise bad_request(f"tool_choice.type must be auto, any, tool or none, not {show(kind)}.", "tool_choice.type")


def _read_thinking(body: Fields, history: History) -> tuple[Thinking, bool]:
    """The thinking setting, and whether its text is to be left out. Only `thinking` switches; effort sets the level."""
    output = body.object("output_config")
    effort, warning = read_effort(output.text("effort") if output else None, "output_config.effort")
    if warning:
        history.warn(warning)
    thinking = body.object("thinking")
    kind = thinking.get("type") if thinking else "disabled"
    if thinking is None or kind == "disabled":
        return Thinking(), False
    omit = thinking.text("display") == "omitted"
    if kind == "adaptive":
        return Thinking(True, effort), omit
    if kind == "enabled":
        return Thinking(True, effort, thinking.integer("budget_tokens", 1)), omit
    raise bad_request(f"thinking.type must be enabled, adaptive or disabled, not {show(kind)}.", "thinking.type")


def _read_format(body: Fields) -> ResponseFormat:
    """`output_config.format`, or the older `output_format`."""
    output = body.object("output_config")
    wanted = (output.object("format") if output else None) or body.object("output_format")
    if wanted is None:
        return ResponseFormat()
    kind = wanted.get("type")
    if kind in ("text", "json_object"):
        return ResponseFormat(kind)
    if kind != "json_schema":
        raise bad_request(f"{wanted.param('type')} must be 'json_schema', not {show(kind)}.", wanted.param("type"))
    schema = read_schema(wanted, "schema", MAX_FORMAT_CHARACTERS)
    if schema is None:
        raise bad_request(f"{wanted.param('schema')} is missing: a JSON schema is required.", wanted.param("schema"))
    return ResponseFormat("json_schema", schema, wanted.text("name") or "response")
