"""Whatever JSON arrives: a request, or a 400 that names a field. Never another exception."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pooled_mlx.api.body import decode_json
from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.api.edge import Parsed
from pooled_mlx.core.errors import ApiError, ErrorKind

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.sampled_from(
        ["", "user", "system", "tool", "text", "function", "auto", "required", "json_schema", "high", "\ud800", "x\x00"]
    ),
)
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "name",
        "function",
        "arguments",
        "id",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
    ]
)
ANY = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"])}, optional={"arguments": ANY})},
    optional={"id": ANY},
)
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | ANY},
    optional={
        "content": ANY,
        "tool_calls": st.lists(CALL | ANY, max_size=3) | ANY,
        "tool_call_id": ANY,
        "reasoning_content": ANY,
        "reasoning": ANY,
        "refusal": ANY,
        "function_call": ANY,
    },
)
FIELDS = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_k",
    "top_p",
    "stop",
    "stream",
    "stream_options",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "chat_template",
    "parallel_tool_calls",
    "response_format",
    "n",
    "functions",
    "logit_bias",
    "logprobs",
    "prediction",
    "reasoning",
]
BODY = st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=5) | ANY}, optional=dict.fromkeys(FIELDS, ANY))


def outcome(raw: bytes) -> Parsed | ApiError:
    try:
        return EDGE.parse(decode_json(raw), request_id="r", client="fuzz")
    except ApiError as error:
        return error


@settings(max_examples=300, deadline=None)
@given(BODY | ANY)
def test_any_json(body: Any) -> None:
    got = outcome(json.dumps(body).encode())
    if isinstance(got, ApiError):
        status, answer, _ = EDGE.error(got)
        assert (got.kind, status) == (ErrorKind.BAD_REQUEST, 400)
        assert json.dumps(answer, ensure_ascii=False).encode()
        return
    request = got.request
    assert request.turns[-1].role != "assistant"
    assert all(turn.role != "system" for turn in request.turns[1:])
    assert request.max_output_tokens is None or 1 <= request.max_output_tokens <= 65_536
    texts = [turn.text for turn in request.turns] + [call.arguments for turn in request.turns for call in turn.tool_calls]
    assert "".join(texts).encode().decode() == "".join(texts)
    assert repr(request).encode()
