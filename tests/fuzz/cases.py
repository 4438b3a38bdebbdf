"""The fuzzer's requests: whole bodies of every API, and from a seed and a number one broken request."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from random import Random
from typing import Any

from pooled_mlx.connect.shapes import Reply, all_shapes
from tests.fuzz.mutations import any_json, encode, garble, mutate
from tests.golden.test_one_conversation import CHAT_BODY, MESSAGES_BODY, RESPONSES_BODY

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNTS = {RESPONSES: "/v1/responses/input_tokens", MESSAGES: "/v1/messages/count_tokens"}
LIMIT_FIELDS = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
KINDS = ("mutated", "mutated", "mutated", "mutated", "mutated", "mutated", "garbled", "invented", "whole", "continued")

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "next"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
}
TOOL = {
    "name": "read_file",
    "description": "Reads.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
_REPLY = Reply("Notes.", [], 0, 0)
_LONGEST_TEXT = 40
_LONGEST_TEXT = 40


@dataclass(frozen=True, slots=True)
class Case:
    """One request: `raw` goes to `path`. `first` is a whole body whose answer's id `raw` holds as the text `ID`.

    `leaves_after` is the number of streamed pieces after which the client goes away, None: it stays.
    """

    number: int
    kind: str
    path: str
    raw: bytes
    first: bytes | None = None
    leaves_after: int | None = None

    @property
    def endpoint(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    @property
    def api(self) -> str:
        """The path of the API's generating endpoint."""
        return next(api for api in (CHAT, RESPONSES, MESSAGES) if self.path.startswith(api))


def whole_bodies() -> dict[str, list[dict[str, Any]]]:
    """Bodies that are answered, by path: one conversation in every API's words, agents' requests, and every option."""
    bodies: dict[str, list[dict[str, Any]]] = {
        CHAT: _chat_bodies(),
        RESPONSES: _responses_bodies(),
        MESSAGES: _messages_bodies(),
    }
    for shape in all_shapes():
        bodies[shape.path] += [shape.first, shape.second(shape.first, _REPLY), *([shape.aside] if shape.aside else [])]
    return {path: [shortened(body) for body in bodies[path]] for path in bodies}


def shortened(value: Any) -> Any:
    """A copy of `value` with its long texts cut: nothing here depends on their length."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in value]
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def make_case(seed: int, number: int, bodies: dict[str, list[dict[str, Any]]], most_tokens: int | None = None) -> Case:
    """Request `number` of a run. `most_tokens` bounds what a request may ask for, so that no answer takes long."""
    random = Random(f"{seed}:{number}")
    api = random.choice((CHAT, RESPONSES, MESSAGES))
    kind = random.choice(KINDS)
    if kind == "continued" and api == CHAT:
        kind = "mutated"
    body: Any = copy.deepcopy(random.choice(bodies[api]))
    first = None
    if kind == "continued":
        first, body = _continued(api, body)
    if random.randrange(3) == 0:
        body["stream"] = not body.get("stream", False)
    if kind in ("mutated", "continued"):
        body = mutate(random, body)
    elif kind == "invented":
        body = invented_body(random, api)
    if most_tokens is not None:
        _bound(random, body, LIMIT_FIELDS[api], most_tokens)
        if first is not None:
            _bound(random, first, LIMIT_FIELDS[api], most_tokens)
    raw = encode(body)
    if kind == "garbled":
        raw = garble(random, raw)
    path = COUNTS.get(api, api) if random.randrange(5) == 0 else api
    if api == MESSAGES and random.randrange(2):
        path += "?beta=true"
    leaves = random.randrange(6) if random.randrange(25) == 0 else None
    return Case(number, kind, path, raw, None if first is None else encode(first), leaves)


def invented_body(random: Random, api: str) -> dict[str, Any]:
    """A body of nothing but chance: known words in unknown places, and somewhat more often messages with roles."""
    field = "input" if api == RESPONSES else "messages"
    more = any_json(random)
    body = {"max_tokens": 8, field: any_json(random), **(more if isinstance(more, dict) else {})}
    if random.randrange(2):
        roles = ("system", "user", "assistant", "tool", "developer")
        made = [any_json(random) for _ in range(random.randint(1, 4))]
        body[field] = [{"role": random.choice(roles), **(one if isinstance(one, dict) else {"content": one})} for one in made]
    return body


def continue_from(case: Case, answer: dict[str, Any]) -> bytes:
    """The bytes of a continuing request once the first answer is known."""
    return case.raw.replace(b'"ID"', json.dumps(str(answer.get("id"))).encode())


def _bound(random: Random, body: Any, fields: tuple[str, ...], most: int) -> None:
    """Lower what is over `most`; what the API refuses stays as it is."""
    if not isinstance(body, dict):
        return
    absent = [field for field in fields if body.get(field) is None]
    if len(absent) == len(fields) and not (len(fields) == 1 and fields[0] in body):
        body[fields[0]] = random.randint(1, most)
    for field in fields:
        value = body.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and most < value < float("inf"):
            body[field] = random.randint(1, most)


def _continued(api: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A first request whose answer is kept, and one that goes on from it."""
    if api == RESPONSES:
        first = {"model": "m", "input": "Remember the number 7.", "tools": body.get("tools") or [], "max_output_tokens": 8}
        more = [{"type": "message", "role": "user", "content": "Which number?"}, {"type": "item_reference", "id": "item_x"}]
        return first, {**first, "previous_response_id": "ID", "input": more[:1] if len(str(body)) % 2 else more}
    first = {
        "model": "m",
        "max_tokens": 8,
        "thread": {"type": "create"},
        "messages": [{"role": "user", "content": "Remember the number 7."}],
    }
    thread = {"type": "continue", "previous_message_id": "ID"}
    return first, {**first, "thread": thread, "messages": [{"role": "user", "content": [{"type": "text", "text": "Which?"}]}]}


def _chat_bodies() -> list[dict[str, Any]]:
    ask = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": TOOL}
    return [
        {"model": "m", **CHAT_BODY},
        {
            "messages": ask,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["five", "\n\n"],
            "temperature": 1.5,
        },
        {
            "messages": ask,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}},
            "top_k": 3,
        },
        {"messages": ask, "response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": ask, "tools": [tool], "tool_choice": "required", "reasoning_effort": "low", "thinking_budget": 3},
        {
            "messages": ask,
            "tools": [tool, {"type": "function", "function": {**TOOL, "name": "b", "parameters": FORM, "strict": True}}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": FORM}},
        },
        {
            "messages": [*ask, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "late"}],
            "tools": [tool],
            "tool_choice": "none",
            "n": 1,
            "metadata": {},
            "seed": 5,
            "user": "u",
        },
    ]


def _responses_bodies() -> list[dict[str, Any]]:
    custom = {"type": "custom", "name": "raw", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /./"}}
    spaces = {"type": "namespace", "name": "space", "tools": [{"type": "function", **TOOL}]}
    form = {"type": "json_schema", "name": "a", "schema": FORM, "strict": True}
    return [
        {
            "model": "m",
            **RESPONSES_BODY,
            "include": ["reasoning.encrypted_content"],
            "previous_response_id": None,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
            "tools": [*RESPONSES_BODY["tools"], custom, spaces],
        },
        {
            "input": "hi",
            "stream": True,
            "reasoning": {"effort": "high"},
            "metadata": {"a": "b"},
            "temperature": 0.2,
            "top_k": 5,
        },
        {
            "input": "hi",
            "text": {"format": form},
            "tools": [{"type": "function", **TOOL}],
            "max_tool_calls": 2,
            "store": False,
        },
        {"input": [{"role": "user", "content": "hi"}], "tools": [custom, spaces], "tool_choice": "required", "stream": True},
        {
            "instructions": "Be brief.",
            "input": [
                {"type": "additional_tools", "tools": [{"type": "function", **TOOL}]},
                {"role": "user", "content": "hi"},
                {"type": "custom_tool_call", "call_id": "c", "name": "raw", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
                {"type": "web_search_call", "id": "w"},
            ],
            "tools": [custom],
            "tool_choice": {"type": "custom", "name": "raw"},
            "truncation": "auto",
        },
    ]


def _messages_bodies() -> list[dict[str, Any]]:
    ask = [{"role": "user", "content": "hi"}]
    tool = {"name": "read_file", "description": "Reads.", "input_schema": TOOL["parameters"]}
    form = {"type": "json_schema", "schema": FORM}
    return [
        {
            "model": "m",
            **MESSAGES_BODY,
            "thread": {"type": "create"},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        {
            "messages": ask,
            "max_tokens": 30,
            "stream": True,
            "stop_sequences": ["five"],
            "temperature": 1,
            "top_k": 9,
            "top_p": 0.9,
        },
        {
            "messages": ask,
            "max_tokens": 30,
            "thinking": {"type": "enabled", "budget_tokens": 4},
            "output_config": {"format": form},
        },
        {
            "messages": [*ask, {"role": "system", "content": [{"type": "tool_addition", "tool": {"tool_name": "x"}}]}, *ask],
            "max_tokens": 30,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "tools": [tool, {"type": "bash_20250124", "name": "bash"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "u"},
            "output_format": {"type": "json_object"},
        },
    ]
