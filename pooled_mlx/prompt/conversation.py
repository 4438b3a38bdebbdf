"""A request's turns as the messages a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pooled_mlx.chat_formats.base import CUSTOM_PARAMETER, tool_schema
from pooled_mlx.chat_formats.hermes import generic_instructions, render_call, render_tool_result
from pooled_mlx.chat_formats.kimi import call_id
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Request, Tool, ToolCall, Turn
from pooled_mlx.prompt.defuse import Disguise, strings_in
from pooled_mlx.prompt.template_traits import TemplateTraits

NEUTRAL_USER = "Continue."
"""Stands for the missing user turn where a template insists on one (after a client compacted its history)."""
_BLANK_LINE = "\n\n"


@dataclass(frozen=True, slots=True)
class SaidCall:
    """A past call, its arguments parsed."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Message:
    """One message to be rendered. `sources` are the indices of the request turns in it, () for one we added."""

    role: str
    text: str
    reasoning: str | None = None
    calls: tuple[SaidCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    sources: tuple[int, ...] = ()


def read_turns(request: Request, traits: TemplateTraits) -> list[Message]:
    """The turns with their calls parsed and their results paired. Raises `ApiError` (400) when there is nothing to answer."""
    turns = request.turns
    if all(turn.role == "system" for turn in turns):
        raise bad_request("messages holds no user message: there is nothing to answer. Send at least one.", "messages")
    if turns[-1].role == "assistant":
        raise bad_request(
            "The last message is from the assistant; continuing it is not supported. Send a user or tool message last.",
            f"messages[{len(turns) - 1}].role",
        )
    as_text = traits.text_arguments or not traits.native_tools
    return _paired([_said(turn, index, as_text) for index, turn in enumerate(turns)])


def strings_of(said: Iterable[Message]) -> Iterable[str]:
    """Every text of a client in these messages."""
    for one in said:
        yield one.text
        yield from (text for text in (one.reasoning, one.call_id, one.name) if text)
        for call in one.calls:
            yield call.id
            yield call.name
            yield from strings_in(call.arguments)


def names_of(said: Iterable[Message]) -> Iterable[str]:
    """The names in these messages that a template may put between brackets of its own."""
    for one in said:
        for call in one.calls:
            yield call.name
            if isinstance(call.arguments, dict):
                yield from call.arguments


def hidden(said: Iterable[Message], disguise: Disguise) -> list[Message]:
    """The messages with all client text hidden."""
    return [
        replace(
            one,
            text=disguise.hide(one.text),
            reasoning=None if one.reasoning is None else disguise.hide(one.reasoning),
            calls=tuple(_hidden_call(call, disguise) for call in one.calls),
            call_id=None if one.call_id is None else disguise.hide(one.call_id),
            name=None if one.name is None else disguise.hide_name(one.name),
        )
        for one in said
    ]


def arrange(said: Sequence[Message], tools: Sequence[Tool], traits: TemplateTraits) -> list[Message]:
    """Fit the messages to what the template can render. `tools` get generic instructions where it lists none."""
    arranged = list(said)
    if not traits.native_tools:
        arranged = _tools_as_text(arranged, tools)
    if traits.named_ids:
        arranged = _with_named_ids(arranged)
    if not traits.system:
        arranged = _system_into_user(arranged)
    if traits.alternates:
        arranged = _merged(arranged)
    first = next((place for place, one in enumerate(arranged) if one.role != "system"), len(arranged))
    has_user = any(one.role == "user" for one in arranged)
    if (traits.needs_user and not has_user) or (traits.alternates and arranged[first].role != "user"):
        arranged.insert(first, Message("user", NEUTRAL_USER))
    return arranged


def last_user(said: Sequence[Message]) -> int:
    """The index of the last user message, -1 without one."""
    return max((place for place, one in enumerate(said) if one.role == "user"), default=-1)


def parsed_arguments(call: ToolCall, text_arguments: bool) -> Any:
    """The arguments of a past call for a template: an object where they are one, never lost otherwise."""
    if call.custom:
        return {CUSTOM_PARAMETER: call.arguments}
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return call.arguments if text_arguments else {"arguments": call.arguments}


def listing(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in the form that chat templates list; they look into `parameters`, so that is always an object."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": described(tool), "parameters": _parameters(tool)},
        }
        for tool in tools
    ]


def described(tool: Tool) -> str:
    """The description of a tool, with the grammar of a custom one."""
    if not tool.custom or tool.grammar is None:
        return tool.description
    note = f"The input follows this {tool.grammar.syntax} grammar:\n{tool.grammar.definition}"
    return f"{tool.description}\n\n{note}" if tool.description else note


def _parameters(tool: Tool) -> Mapping[str, Any]:
    schema = tool_schema(tool)
    return schema if isinstance(schema, Mapping) and schema else {"type": "object", "properties": {}}


def _said(turn: Turn, index: int, text_arguments: bool) -> Message:
    calls = tuple(SaidCall(call.id, call.name, parsed_arguments(call, text_arguments)) for call in turn.tool_calls)
    return Message(turn.role, turn.text, turn.reasoning, calls, turn.tool_call_id, turn.name, (index,))


def _hidden_call(call: SaidCall, disguise: Disguise) -> SaidCall:
    arguments = call.arguments
    if isinstance(arguments, dict):
        hidden: Any = {disguise.hide_name(name): disguise.hide_value(value) for name, value in arguments.items()}
    else:
        hidden = disguise.hide_value(arguments)
    return SaidCall(disguise.hide(call.id), disguise.hide_name(call.name), hidden)


def _paired(said: Sequence[Message]) -> list[Message]:
    """Tool results in the order of their calls, each with its tool's name: most templates pair them by order alone."""
    paired: list[Message] = []
    calls: tuple[SaidCall, ...] = ()
    names: dict[str, str] = {}
    place = 0
    while place < len(said):
        if said[place].role != "tool":
            paired.append(said[place])
            if said[place].role == "assistant":
                calls = said[place].calls
                names.update((call.id, call.name) for call in calls)
            place += 1
            continue
        end = place
        while end < len(said) and said[end].role == "tool":
            end += 1
        group = said[place:end]
        order = {call.id: number for number, call in enumerate(calls)}
        ids = [one.call_id for one in group]
        if len(set(ids)) == len(ids) and all(one in order for one in ids):
            group = sorted(group, key=lambda one: order[one.call_id or ""])
        paired.extend(replace(one, name=one.name or names.get(one.call_id or "")) for one in group)
        place = end
    return paired


def _tools_as_text(said: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """For a template that knows no tools: instructions in the system turn, calls and results as Hermes writes them."""
    written: list[Message] = []
    for place, one in enumerate(said):
        if one.calls:
            parts = [one.text, *(_call_text(call) for call in one.calls)]
            one = replace(one, text="\n".join(part for part in parts if part), calls=())
        if one.role == "tool":
            result = render_tool_result(Turn("tool", one.text))
            if written and written[-1].role == "user" and said[place - 1].role == "tool":
                last = written.pop()
                one = Message("user", f"{last.text}\n{result}", sources=last.sources + one.sources)
            else:
                one = Message("user", result, sources=one.sources)
        written.append(one)
    if not tools:
        return written
    text = generic_instructions([replace(tool, description=described(tool)) for tool in tools])
    if written[0].role == "system":
        written[0] = replace(written[0], text=_BLANK_LINE.join(part for part in (written[0].text, text) if part))
        return written
    return [Message("system", text), *written]


def _with_named_ids(said: Sequence[Message]) -> list[Message]:
    """For a template that writes ids in place of names: ids that tell the tool, numbered through the conversation."""
    named: list[Message] = []
    ids: dict[str, str] = {}
    number = 0
    for one in said:
        calls: list[SaidCall] = []
        for call in one.calls:
            ids[call.id] = call_id(call.name, number)
            calls.append(replace(call, id=ids[call.id]))
            number += 1
        named.append(replace(one, calls=tuple(calls), call_id=ids.get(one.call_id or "", one.call_id)))
    return named


def _call_text(call: SaidCall) -> str:
    return render_call(ToolCall(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)))


def _system_into_user(said: list[Message]) -> list[Message]:
    """For a template without a system turn: its text leads the first user turn."""
    if said[0].role != "system":
        return said
    system, rest = said[0], list(said[1:])
    if not system.text:
        return rest
    for place, one in enumerate(rest):
        if one.role == "user":
            rest[place] = replace(one, text=f"{system.text}{_BLANK_LINE}{one.text}", sources=system.sources + one.sources)
            return rest
    return [replace(system, role="user"), *rest]


def _merged(said: Sequence[Message]) -> list[Message]:
    """For a template whose roles must alternate: neighbours of one role become one message."""
    merged: list[Message] = []
    for one in said:
        if merged and merged[-1].role == one.role and one.role in ("user", "assistant"):
            last = merged[-1]
            merged[-1] = replace(
                last,
                text=_BLANK_LINE.join(part for part in (last.text, one.text) if part),
                reasoning=_BLANK_LINE.join(part for part in (last.reasoning, one.reasoning) if part) or last.reasoning,
                calls=last.calls + one.calls,
                sources=last.sources + one.sources,
            )
        else:
            merged.append(one)
    return merged
