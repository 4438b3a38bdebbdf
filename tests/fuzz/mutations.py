"""Broken JSON out of whole JSON: one set of changes for the property tests and for the fuzzer.

Everything draws from a `random.Random`, so that a seed repeats a case and hypothesis can shrink one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Path = tuple[Any, ...]

NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 0.5, -0.0, 1e300, 1.5, 65, 70_000, 2**31, 2**63, 2**70, float("nan"), float("inf"))
TEXTS: tuple[str, ...] = (
    "",
    " ",
    "x",
    "a" * 200,
    "\0",
    "\ud800",
    "ä🙂\u2028\u0085",
    "\r\n\t",
    "<|im_end|>\n<|im_start|>system",
    "</think>",
    "<think>",
    "<tool_call>\n<function=read_file>",
    "</parameter>\n</function>\n</tool_call>",
    "{{ 1/0 }}{% for a in b %}",
    '{"a": ',
    "pooled1.AAAA",
    "resp_x",
    "none",
    "auto",
    "required",
    "message",
    "function",
    "custom",
    "namespace",
    "text",
    "json_schema",
    "high",
    "user",
    "system",
    "tool",
    "assistant",
)
SHAPES: tuple[Any, ...] = (
    [],
    {},
    [[]],
    [None],
    [{}],
    [""],
    {"type": None},
    {"type": "text"},
    {"type": []},
    {"type": "text", "text": "t"},
    {"role": "user"},
    {"role": "assistant", "content": ""},
    {"id": "x"},
    {"": 1},
)
KEYS: tuple[str, ...] = (
    *("role", "content", "type", "text", "name", "function", "arguments", "id", "call_id", "input", "output", "tools"),
    *("tool_calls", "tool_call_id", "tool_use_id", "reasoning_content", "reasoning", "thinking", "signature", "refusal"),
    *("function_call", "encrypted_content", "summary", "namespace", "format", "schema", "strict", "parameters", "description"),
    *("input_schema", "stream", "stream_options", "stop", "stop_sequences", "temperature", "top_k", "top_p", "max_tokens"),
    *("max_completion_tokens", "max_output_tokens", "max_tool_calls", "n", "functions", "logit_bias", "logprobs", "prediction"),
    *("reasoning_effort", "effort", "tool_choice", "parallel_tool_calls", "response_format", "output_format", "output_config"),
    *("chat_template", "chat_template_kwargs", "enable_thinking", "include", "store", "background", "conversation", "prompt"),
    *("previous_response_id", "truncation", "thread", "mcp_servers", "system", "metadata", "cache_control", "is_error"),
    *("budget_tokens", "display", "include_usage", "instructions", "messages", "model", "user", "definition", "syntax"),
)
RULES: tuple[tuple[str, Any], ...] = (
    ("type", "objekt"),
    ("type", []),
    ("type", ["string", "null"]),
    ("type", 5),
    ("enum", []),
    ("enum", ["é", 1, None, {"a": []}]),
    ("const", {"a": [1, 2.5]}),
    ("pattern", "("),
    ("pattern", "^(a|b){2,3}$"),
    ("pattern", "(?<=x)*"),
    ("pattern", "(a{0,500}){0,500}"),
    ("format", "date-time"),
    ("format", "nonsense"),
    ("minLength", -1),
    ("minLength", 9),
    ("maxLength", 65_536),
    ("minimum", 5),
    ("maximum", "x"),
    ("multipleOf", 0),
    ("items", []),
    ("items", [{"type": "string"}]),
    ("items", False),
    ("minItems", 10**9),
    ("uniqueItems", True),
    ("properties", []),
    ("properties", {"": {}, "a\nb": {"type": "integer"}}),
    ("required", "path"),
    ("required", ["missing", 5]),
    ("additionalProperties", {"type": "null"}),
    ("patternProperties", {"(": {}}),
    ("$ref", "#/nowhere"),
    ("$ref", "#"),
    ("$ref", "https://example.invalid/schema"),
    ("$defs", {"n": {"$ref": "#/$defs/n"}}),
    ("allOf", [{"type": "string"}, {"type": "integer"}]),
    ("anyOf", []),
    ("anyOf", [{"$ref": "#"}, {"type": "null"}]),
    ("oneOf", [True, False]),
    ("not", {}),
    ("if", {"required": ["path"]}),
    ("unevaluatedProperties", False),
    ("dependentRequired", {"path": ["x"]}),
)
_DEEP = (3, 40, 190, 210)
_HOW_MANY = (1, 1, 1, 2, 2, 3, 4)


def odd(random: Random) -> Any:
    """A value that most fields do not expect."""
    kinds: tuple[Sequence[Any], ...] = ((None, True, False), NUMBERS, TEXTS, SHAPES)
    return copy.deepcopy(random.choice(random.choice(kinds)))


def any_json(random: Random, levels: int = 3) -> Any:
    """Any JSON value of the words that bodies are made of."""
    if levels == 0 or random.randrange(3) == 0:
        return odd(random)
    if random.randrange(2):
        return [any_json(random, levels - 1) for _ in range(random.randrange(4))]
    return {random.choice(KEYS): any_json(random, levels - 1) for _ in range(random.randrange(5))}


def places(value: Any, path: Path = ()) -> list[Path]:
    """The paths of all values inside `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, child in inner:
        found += places(child, (*path, key))
    return found


def mutate(random: Random, body: Any, changes: int | None = None) -> Any:
    """A copy of `body` with one to four changes."""
    body = copy.deepcopy(body)
    for _ in range(random.choice(_HOW_MANY) if changes is None else changes):
        paths = places(body)
        if not paths:
            return odd(random)
        path = random.choice(paths)
        owner = body
        for key in path[:-1]:
            owner = owner[key]
        random.choice(_CHANGES)(random, body, owner, path[-1])
    return body


def garble(random: Random, raw: bytes) -> bytes:
    """`raw` with its bytes broken: cut, changed, or filled with what JSON forbids."""
    place = random.randrange(len(raw) + 1)
    broken = (b"", b"\xff", b"\0", b'"', b"}", b",", b"NaN", b"1e999", b"\\ud800", b"[" * 3000, b'{"a":' * 300, b"\xef\xbb\xbf")
    how = random.randrange(4)
    if how == 0:
        return raw[:place]
    if how == 1:
        return raw[:place] + raw[place + 1 :]
    if how == 2:
        return random.choice((b"\xef\xbb\xbf", b"\n ")) + raw
    return raw[:place] + random.choice(broken) + raw[place:]


def encode(body: Any) -> bytes:
    """`body` as a careless client writes it: NaN and lone surrogates included."""
    return json.dumps(body).encode()


def _is_deep(value: Any) -> bool:
    return max(map(len, places(value)), default=0) > 100


def _replace(random: Random, body: Any, owner: Any, key: Any) -> None:
    owner[key] = odd(random)


def _remove(random: Random, body: Any, owner: Any, key: Any) -> None:
    del owner[key]


def _double(random: Random, body: Any, owner: Any, key: Any) -> None:
    if isinstance(owner, list):
        owner.append(copy.deepcopy(owner[key]))
    else:
        owner[random.choice(KEYS)] = copy.deepcopy(owner[key])


def _wrap(random: Random, body: Any, owner: Any, key: Any) -> None:
    owner[key] = [owner[key]] if random.randrange(2) else {random.choice(KEYS): owner[key]}


def _bury(random: Random, body: Any, owner: Any, key: Any) -> None:
    if _is_deep(body):  # much deeper, and `copy` and `json` of the sender itself give up
        return
    for _ in range(random.choice(_DEEP)):
        owner[key] = [owner[key]]


def _add(random: Random, body: Any, owner: Any, key: Any) -> None:
    inner = owner[key]
    if isinstance(inner, dict):
        inner[random.choice(KEYS)] = odd(random)
    elif isinstance(inner, list):
        inner.insert(random.randrange(len(inner) + 1), odd(random))
    elif isinstance(owner, dict):
        owner[random.choice(KEYS)] = odd(random)


def _transplant(random: Random, body: Any, owner: Any, key: Any) -> None:
    value = body
    for step in random.choice(places(body)):
        value = value[step]
    if not _is_deep(value):
        owner[key] = copy.deepcopy(value)


def _exchange(random: Random, body: Any, owner: Any, key: Any) -> None:
    others = [other for other in (owner if isinstance(owner, dict) else range(len(owner))) if other != key]
    if others:
        other = random.choice(others)
        owner[key], owner[other] = owner[other], owner[key]


def _spoil(random: Random, body: Any, owner: Any, key: Any) -> None:
    value = owner[key]
    if isinstance(value, str):
        place = random.randrange(len(value) + 1)
        owner[key] = value[:place] + random.choice(TEXTS) + value[place:]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        owner[key] = random.choice(NUMBERS)
    else:
        owner[key] = odd(random)


def _rule(random: Random, body: Any, owner: Any, key: Any) -> None:
    """A rule that a schema may have, put into a schema where there is one."""
    schemas = [
        path for path in places(body) if path[-1] in ("schema", "parameters", "input_schema") or "properties" in path[:-1]
    ]
    value: Any = body
    for step in random.choice(schemas) if schemas else ():
        value = value[step]
    if isinstance(value, dict):
        keyword, rule = random.choice(RULES)
        value[keyword] = copy.deepcopy(rule)


_CHANGES: tuple[Callable[[Random, Any, Any, Any], None], ...] = (
    *(_replace, _remove, _double, _wrap, _add, _add, _transplant, _exchange, _spoil, _rule),
    *(_replace, _remove, _spoil, _bury),
)
