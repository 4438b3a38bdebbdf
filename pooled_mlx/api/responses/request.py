"""Responses bodies to core requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pooled_mlx.api.common import (
    MAX_FORMAT_CHARACTERS,
    Fields,
    check_hosted_alone,
    check_tool_choice,
    check_tools,
    check_turns,
    clean,
    name_tool_results,
    read_effort,
    read_output_limit,
    read_sampling,
    read_schema,
    show,
)
from pooled_mlx.api.edge import Parsed
from pooled_mlx.api.responses.items import ItemReader
from pooled_mlx.api.responses.stored import Item, ResponseStore, expand
from pooled_mlx.api.responses.tools import CallName, read_tool_choice, read_tools, tool_set
from pooled_mlx.api.store import Piece
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import MAX_CALLS, Request, ResponseFormat, Thinking, Turn
from pooled_mlx.core.turns import arrange_turns

_REFUSED = {
    "background": "Send the request without it and keep the connection open.",
    "conversation": "Use previous_response_id, or send the whole conversation in input.",
    "prompt": "Send the prompt's text in input.",
    "top_logprobs": "Log probabilities are not computed.",
}
_ENCRYPTED = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """What rendering needs beyond the request.

    `echo`: the request's fields as the response object repeats them. `wire`: core tool name to wire form. `encrypted`:
    reasoning items carry their blob. `inputs`: all items this response answers, kept when `store`.
    """

    echo: dict[str, Any]
    wire: dict[str, CallName]
    encrypted: bool
    store: bool
    inputs: tuple[Piece, ...] = field(repr=False)


def parse_responses(body: Fields, store: ResponseStore, *, request_id: str, client: str) -> Parsed:
    """Check a body. Raises `ApiError` 400 naming the field."""
    body.refuse(_REFUSED)
    body.text("model")
    warnings: list[str] = []
    encrypted = _read_include(body)
    keep = body.flag("store") is not False
    items, paths = _read_input(body)
    earlier_id = body.text("previous_response_id")
    earlier = store.previous(earlier_id).history if earlier_id else ()
    pieces = (*earlier, *expand(items, paths, store, keep))
    all_items: list[Item] = [piece.value for piece in pieces]
    all_paths = [f"previous_response_id[{index}]" for index in range(len(earlier))] + paths

    added = [
        tool
        for item, path in zip(all_items, all_paths, strict=True)
        if item.get("type") == "additional_tools"
        for tool in Fields(item, path).objects("tools")
    ]
    tools = tool_set([*read_tools(body.objects("tools"), warnings), *read_tools(added, warnings)])
    check_tools(tools.tools)
    check_hosted_alone(body, tools.tools)
    choice = read_tool_choice(body, tools)
    check_tool_choice(choice, tools.tools)

    instructions = body.text("instructions")
    turns = [Turn("system", instructions)] if instructions else []
    turns.extend(ItemReader(tools, warnings).read(all_items, all_paths))
    arranged = arrange_turns(name_tool_results(turns))
    check_turns(arranged, tools.tools, "input")

    request = Request(
        id=request_id,
        turns=arranged,
        tools=tools.tools,
        tool_choice=choice,
        parallel_tool_calls=body.flag("parallel_tool_calls") is not False,
        max_calls=min(body.integer("max_tool_calls", 1, 128) or MAX_CALLS, MAX_CALLS),
        response_format=_read_format(body),
        sampling=read_sampling(body, 2),
        max_output_tokens=read_output_limit(body, "max_output_tokens"),
        thinking=_read_thinking(body, warnings),
        client=client,
    )
    _read_truncation(body, warnings)
    options = ResponsesOptions(_echo(body, request, keep), tools.wire, encrypted, keep, pieces)
    return Parsed(request, body.flag("stream") or False, options, tuple(warnings))


def _read_input(body: Fields) -> tuple[list[Item], list[str]]:
    """The items of this request and their places; a string is one user message."""
    value = body.get("input")
    if value is None:
        raise bad_request("input is missing: a string or an array of items is required.", "input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": clean(value)}], ["input"]
    entries = body.objects("input")
    return [dict(entry.values) for entry in entries], [entry.path for entry in entries]


def _read_include(body: Fields) -> bool:
    """Whether reasoning items carry their blob. Raises for log probabilities."""
    wanted = body.list("include") or ()
    for name in wanted:
        if not isinstance(name, str):
            raise bad_request(f"include takes strings, not {show(name)}.", "include")
        if "logprobs" in name:
            raise bad_request(f"include {show(name)} is not supported: log probabilities are not computed.", "include")
    return _ENCRYPTED in wanted


def _read_thinking(body: Fields, warnings: list[str]) -> Thinking:
    reasoning = body.object("reasoning")
    word = reasoning.text("effort") if reasoning else None
    effort, warning = read_effort(word, "reasoning.effort")
    if warning:
        warnings.append(warning)
    return Thinking(effort is not None or warning is not None, effort)


def _read_format(body: Fields) -> ResponseFormat:
    text = body.object("text")
    wanted = text.object("format") if text else None
    if wanted is None:
        return ResponseFormat()
    kind = wanted.get("type")
    if kind in ("text", "json_object"):
        return ResponseFormat(kind)
    if kind != "json_schema":
        raise bad_request(f"text.format.type must be text, json_object or json_schema, not {show(kind)}.", "text.format.type")
    schema = read_schema(wanted, "schema", MAX_FORMAT_CHARACTERS)
    if schema is None:
        raise bad_request("text.format.schema is missing: a JSON schema is required.", "text.format.schema")
    return ResponseFormat("json_schema", schema, wanted.text("name") or "response", wanted.flag("strict") or False)


def _read_truncation(body: Fields, warnings: list[str]) -> None:
    value = body.text("truncation")
    if value == "auto":
        warnings.append("truncation: 'auto' is taken as 'disabled': a prompt that is too long is refused, never cut")
    elif value not in (None, "disabled"):
        raise bad_request(f"truncation must be 'disabled', not {show(value)}.", "truncation")


def _echo(body: Fields, request: Request, store: bool) -> dict[str, Any]:
    """The fields of the request that the response object repeats, with their defaults: those that are in force."""
    values = body.values
    text = values.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    return {
        "background": False,
        "instructions": values.get("instructions"),
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": values.get("max_tool_calls"),
        "metadata": values.get("metadata") or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "reasoning": values.get("reasoning") or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": store,
        "temperature": request.sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": values.get("tool_choice") or "auto",
        "tools": values.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "user": values.get("user"),
    }
