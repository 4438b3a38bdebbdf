"""The body of `POST /v1/chat/completions`, parsed into a `Request`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pooled_mlx.api.chat_completions.messages import read_messages
from pooled_mlx.api.chat_completions.tools import read_response_format, read_tool_choice, read_tools
from pooled_mlx.api.common import (
    Fields,
    check_hosted_alone,
    check_turns,
    is_unset,
    read_output_limit,
    read_sampling,
    read_stops,
    show,
)
from pooled_mlx.api.edge import Parsed
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.limits import EFFORTS, NO_EFFORT
from pooled_mlx.core.request import Request, Thinking
from pooled_mlx.core.turns import arrange_turns

_REFUSED = {
    "functions": "Declare them in tools.",
    "function_call": "Use tool_choice.",
    "presence_penalty": "Leave it out or send 0.",
    "frequency_penalty": "Leave it out or send 0.",
    "logit_bias": "Leave it out or send {}.",
    "logprobs": "Token probabilities are not reported. Leave it out or send false.",
    "top_logprobs": "Token probabilities are not reported. Leave it out or send 0.",
    "prediction": "Leave it out.",
    "web_search_options": "This server runs no web search. Leave it out.",
    "chat_template": "The model's own chat template is used. Leave it out.",
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What only the rendering of the answer needs: whether the stream ends with a usage chunk."""

    include_usage: bool = False


def parse_body(raw: Any, *, request_id: str, client: str) -> Parsed:
    """Check the decoded body. Raises `ApiError` 400 that names the field."""
    body = Fields(raw)
    body.text("model")
    body.refuse(_REFUSED)
    if body.get("web_search_options") == {}:  # an empty object switches it on
        body.refuse_field("web_search_options", _REFUSED["web_search_options"])
    if not is_unset(body.get("n")) and body.get("n") != 1:
        raise bad_request(
            f"n is {show(body.get('n'))}, but this server gives one answer per request. Send n: 1 or leave it out.",
            "n",
            "unsupported_parameter",
        )
    turns = arrange_turns(read_messages(body))
    tools, warnings = read_tools(body)
    check_hosted_alone(body, tools)
    check_turns(turns, tools, "messages")
    request = Request(
        id=request_id,
        turns=turns,
        tools=tools,
        tool_choice=read_tool_choice(body, tools),
        parallel_tool_calls=body.flag("parallel_tool_calls") is not False,
        response_format=read_response_format(body),
        sampling=read_sampling(body, 2.0),
        max_output_tokens=_output_limit(body),
        stop=read_stops(body, "stop"),
        thinking=_thinking(body),
        client=client,
    )
    stream_options = body.object("stream_options")
    include_usage = stream_options is not None and stream_options.flag("include_usage") is True
    return Parsed(request, body.flag("stream") is True, ChatOptions(include_usage), warnings)


def _output_limit(body: Fields) -> int | None:
    older = read_output_limit(body, "max_tokens")
    newer = read_output_limit(body, "max_completion_tokens")
    return older if newer is None else newer


def _thinking(body: Fields) -> Thinking:
    kwargs = body.object("chat_template_kwargs")
    switch: bool | None = None
    if kwargs is not None:
        # A template from the request would be a program from the request: it is never run, whatever it says.
        kwargs.refuse({"chat_template": "The model's own chat template is used. Leave it out."})
        switch = kwargs.flag("enable_thinking")
    word = body.text("reasoning_effort")
    if word is None:
        return Thinking(on=switch is True, budget_tokens=_budget(body) if switch else None)
    if word in NO_EFFORT:
        return Thinking()
    for effort in EFFORTS:
        if word == effort:
            return Thinking(on=True, effort=effort, budget_tokens=_budget(body))
    raise bad_request(
        f"reasoning_effort must be one of {', '.join([*NO_EFFORT, *EFFORTS])}, not {show(word)}.", "reasoning_effort"
    )


def _budget(body: Fields) -> int | None:
    """A limit on the reasoning in either of its two spellings; neither of them turns thinking on."""
    reasoning = body.get("reasoning")
    candidates = (body.get("thinking_budget"), reasoning.get("max_tokens") if isinstance(reasoning, dict) else None)
    for value in candidates:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
