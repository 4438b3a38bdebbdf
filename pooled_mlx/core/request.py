"""What a client asks for, free of any wire format.

Three wire formats parse into one `Request`; the engine reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "medium", "high", "xhigh", "max"]

MAX_CALLS = 16
"""Calls one answer may contain unless the request allows fewer (spec: parallel calls)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    `arguments` is the text as it was generated or sent: JSON for a function tool, the raw input for a custom tool. Text
    that is not JSON is kept as it is, so that nothing of a client's history is lost.
    """

    id: str
    name: str
    arguments: str
    custom: bool = False
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation.

    `reasoning` is None when the client sent none and "" when it sent an empty one. `tool_call_id` and `is_error` belong to
    role "tool" only. `name` is the tool's name for role "tool", where known.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class CustomGrammar:
    """The grammar of a custom (free-form) tool: `syntax` is "lark" or "regex"."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool the model may call.

    `parameters` is the JSON schema as sent (property order kept), None when the client sent none. A custom tool has no
    schema: its argument is one raw string, bounded by `grammar` where that is not None.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | bool | None = None
    strict: bool | None = None
    custom: bool = False
    namespace: str | None = None
    grammar: CustomGrammar | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls the answer may or must contain.

    `name` is set for mode "named" only. `allowed` restricts the callable tools to a subset without changing the prompt;
    None means all of them.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The shape of the answer text. `schema` is set for kind "json_schema" only."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: Mapping[str, Any] | bool | None = None
    name: str = "response"
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. None means: the model card's own setting for this kind of answer.

    `temperature` 0 is greedy. `top_k` is 1..64. The seed is drawn by the server per request; a client's seed and top_p
    have no influence.
    """

    temperature: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning before the answer. `budget_tokens` None means: no limit of its own."""

    on: bool = False
    effort: Effort | None = None
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request.

    `turns` are arranged by `core.turns.arrange_turns`: at most one system turn, which is the first. `max_output_tokens`
    None means the server's default. `client` is the product name of the User-Agent and `api` the name of the wire format it
    came by: labels for logs, pins and the status page, never part of a cache key.
    """

    id: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    max_calls: int = MAX_CALLS
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: Thinking = field(default_factory=Thinking)
    client: str = "unknown"
    api: str = ""

    @property
    def call_limit(self) -> int:
        """The largest number of calls this answer may contain."""
        if not self.tools or self.tool_choice.mode == "none":
            return 0
        if not self.parallel_tool_calls or self.tool_choice.mode == "named":
            return 1
        return self.max_calls

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools this answer may call: all, the allowed subset, the named one, or none."""
        choice = self.tool_choice
        if choice.mode == "none":
            return ()
        if choice.mode == "named":
            return tuple(tool for tool in self.tools if tool.name == choice.name)
        if choice.allowed is not None:
            return tuple(tool for tool in self.tools if tool.name in choice.allowed)
        return self.tools
