"""Requests in the shape that each agent sends: two turns of one conversation, as the agent would make the second of the first.

The words are filler; fields, roles, block forms and what changes between turns are the agent's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
_OUTPUT_TOKENS = 8
_FILLER = "The tool reads one file of the project and gives its text with line numbers. "
_SYSTEM = f"You are a careful assistant for a code base. {_FILLER * 40}"
_CWD = "/home/user/project"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one request. `items` are the output items or content blocks where the API has them."""

    text: str
    items: list[Any]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One agent: where it posts, its first body, and its second made of the first and the reply.

    `aside` is a request the agent sends beside its conversation, such as one for a title; None where it has none.
    """

    agent: str
    path: str
    first: Body
    second: Callable[[Body, Reply], Body]
    aside: Body | None = None


def _schema(more: Body | None = None) -> Body:
    properties = {"path": {"type": "string", "description": _FILLER}, **(more or {})}
    return {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}


def _chat_tools(*names: str, more: Body | None = None) -> list[Body]:
    return [
        {"type": "function", "function": {"name": name, "description": _FILLER * 3, "parameters": _schema(more)}}
        for name in names
    ]


def _next_chat(content: Any) -> Callable[[Body, Reply], Body]:
    def second(first: Body, reply: Reply) -> Body:
        said = {"role": "assistant", "content": reply.text}
        return {**first, "messages": [*first["messages"], said, {"role": "user", "content": content}]}

    return second


def _claude() -> Shape:
    reminder = f"<system-reminder>\nAs you answer, this context may help.\n{_FILLER * 3}</system-reminder>"
    marker = {"cache_control": {"type": "ephemeral"}}
    tools = [
        {
            "name": name,
            "description": _FILLER * 5,
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema()},
        }
        for name in ("Agent", "Bash", "Edit", "Read")
    ]

    def system(suffix: str) -> list[Body]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.332.{suffix}; cc_entrypoint=cli;"
        return [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", **marker},
            {"type": "text", "text": f"\n{_SYSTEM}", **marker},
        ]

    environment = f"# Environment\n - Working directory: {_CWD}\n{_FILLER * 10}"
    question = [{"type": "text", "text": reminder}, {"type": "text", "text": "What is in NOTES.md?"}]
    first = {
        "model": "claude-sonnet-4-6",
        "messages": [
            {"role": "user", "content": question},
            {"role": "system", "content": [{"type": "text", "text": environment, **marker}]},
        ],
        "system": system("b08"),
        "tools": tools,
        "metadata": {"user_id": "{}"},
        "max_tokens": _OUTPUT_TOKENS,
        "thinking": {"type": "disabled"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }

    def second(first: Body, reply: Reply) -> Body:
        messages = [
            {"role": "user", "content": question},
            {"role": "system", "content": environment},
            {"role": "assistant", "content": reply.items or [{"type": "text", "text": "Notes."}]},
            {"role": "user", "content": [{"type": "text", "text": "Now say bye.", **marker}]},
        ]
        return {**first, "system": system("18b"), "messages": messages}

    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    title = {
        "model": "claude-haiku-4-5",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "<session>\nWhat is in NOTES.md?\n</session>"}]}],
        "system": [{"type": "text", "text": "Write a short title."}],
        "tools": [],
        "max_tokens": 64,
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        "stream": True,
    }
    return Shape("Claude Code", "/v1/messages", first, second, title)


def _codex() -> Shape:
    def message(role: str, *texts: str) -> Body:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}

    function = {"type": "function", "description": _FILLER * 3, "strict": False, "parameters": _schema()}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /[^\\n]+/"}
    first = {
        "model": "gpt-5.5",
        "stream": True,
        "input": [
            message("developer", _SYSTEM),
            message("developer", f"<skills>\n{_FILLER * 5}</skills>", "<permissions>all</permissions>"),
            message("user", f"<environment_context>\n  <cwd>{_CWD}</cwd>\n</environment_context>"),
            message("user", "What is in NOTES.md?"),
        ],
        "tools": [
            {**function, "name": "exec_command"},
            {**function, "name": "view_image"},
            {"type": "custom", "name": "apply_patch", "description": _FILLER, "format": grammar},
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "Agents.",
                "tools": [{**function, "name": "spawn_agent"}],
            },
            {"type": "tool_search", "execution": "client", "description": _FILLER, "parameters": _schema()},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "text": {"verbosity": "low"},
        "client_metadata": {"turn_id": "1"},
        "max_output_tokens": _OUTPUT_TOKENS,
    }

    def second(first: Body, reply: Reply) -> Body:
        return {**first, "input": [*first["input"], *reply.items, message("user", "Now say bye.")]}

    preload = {"model": "gpt-5.5", "input": "", "max_output_tokens": 1}
    return Shape("Codex", "/v1/responses", first, second, preload)


def _chat(agent: str, first: Body, content: Any = "Now say bye.", aside: Body | None = None) -> Shape:
    return Shape(agent, "/v1/chat/completions", {"model": "any", "stream": True, **first}, _next_chat(content), aside)


def _others() -> list[Shape]:
    usage = {"stream_options": {"include_usage": True}}
    system = {"role": "system", "content": _SYSTEM}
    ask = {"role": "user", "content": "What is in NOTES.md?"}
    title: Body = {
        "model": "any",
        "stream": True,
        "max_tokens": _OUTPUT_TOKENS,
        "messages": [
            {"role": "system", "content": "You write titles."},
            {"role": "user", "content": "Generate a title for this conversation:\n"},
            ask,
        ],
        **usage,
    }
    commit: Body = {
        "model": "any",
        "temperature": 0,
        "max_tokens": _OUTPUT_TOKENS,
        "messages": [{"role": "system", "content": "You write commit messages."}, {"role": "user", "content": "diff"}],
    }
    parts = [{"type": "text", "text": f"<system-reminder>{_FILLER}</system-reminder>"}, {"type": "text", "text": "What is it?"}]
    lists = {"files": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}, "minItems": 1}}
    limits = {"limit": {"type": "integer", "minimum": 0, "default": 10}, "kind": {"type": "string", "enum": ["a", "b"]}}
    shots = [{"role": role, "content": _FILLER} for role in ("user", "assistant", "user", "assistant")]
    return [
        _chat(
            "opencode",
            {
                "max_tokens": _OUTPUT_TOKENS,
                "messages": [system, ask],
                "tools": _chat_tools("bash", "edit", "read", more=limits),
                "tool_choice": "auto",
                **usage,
            },
            aside=title,
        ),
        _chat(
            "pi",
            {
                "messages": [{"role": "developer", "content": _SYSTEM}, {"role": "user", "content": parts[1:]}],
                "store": False,
                "max_completion_tokens": _OUTPUT_TOKENS,
                "tools": _chat_tools("read", "bash"),
                **usage,
            },
            [{"type": "text", "text": "Now say bye."}],
        ),
        _chat(
            "Qwen Code",
            {
                "messages": [system, {"role": "user", "content": parts}],
                "max_tokens": _OUTPUT_TOKENS,
                "tools": _chat_tools("read_file", "run_shell_command", more=limits),
                **usage,
            },
            parts,
        ),
        _chat(
            "Cline",
            {
                "messages": [system, ask],
                "max_tokens": _OUTPUT_TOKENS,
                "tools": _chat_tools("read_files", "run_commands", more=lists),
                "tool_choice": "auto",
                **usage,
            },
        ),
        _chat(
            "Continue",
            {"messages": [system, ask], "max_tokens": _OUTPUT_TOKENS, "tools": _chat_tools("Read", "Bash"), **usage},
        ),
        _chat(
            "aider",
            {"messages": [system, *shots, ask], "temperature": 0, "max_tokens": _OUTPUT_TOKENS, **usage},
            aside=commit,
        ),
    ]


def all_shapes() -> list[Shape]:
    """Every agent's shape, the ones with an API of their own first."""
    return [_claude(), _codex(), *_others()]
