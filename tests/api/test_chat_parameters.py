"""Every parameter of a Chat Completions body, with its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.api.edge import Parsed
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.request import Request, ResponseFormat, Sampling, Thinking, ToolChoice

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
UNSUPPORTED = (
    "functions",
    "function_call",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prediction",
    "web_search_options",
)


def parsed(**fields: Any) -> Parsed:
    return EDGE.parse({"messages": [{"role": "user", "content": "hi"}], **fields}, request_id="r1", client="pi")


def request(**fields: Any) -> Request:
    return parsed(**fields).request


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    error = caught.value
    assert error.kind is ErrorKind.BAD_REQUEST
    assert error.message.endswith(".")
    return error


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_the_body_must_be_an_object() -> None:
    for body in ([], "x", 5, None):
        with pytest.raises(ApiError) as caught:
            EDGE.parse(body, request_id="r", client="c")
        assert caught.value.kind is ErrorKind.BAD_REQUEST


def test_nothing_but_messages() -> None:
    got = request()
    assert (got.id, got.client) == ("r1", "pi")
    assert got == Request("r1", got.turns, client="pi")
    assert not parsed().stream


@pytest.mark.parametrize("model", ["pooled", "gpt-4o", "../../etc", "/tmp/x", "", None])
def test_any_model_string(model: Any) -> None:
    assert request(model=model).turns


def test_model_of_another_type() -> None:
    assert refused(model=5).param == "model"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    ("value", "limit"), [(1, 1), (100, 100), (100.0, 100), (65_536, 65_536), (10**9, 65_536), (None, None)]
)
def test_output_limit(name: str, value: Any, limit: int | None) -> None:
    assert request(**{name: value}).max_output_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "many", "5", True, [], {}])
def test_senseless_output_limits(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


def test_max_completion_tokens_wins() -> None:
    assert request(max_tokens=5, max_completion_tokens=7).max_output_tokens == 7
    assert request(max_tokens=5, max_completion_tokens=None).max_output_tokens == 5


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, Sampling(None, None)),
        ({"temperature": None, "top_k": None}, Sampling(None, None)),
        ({"temperature": 0}, Sampling(0.0, 40)),
        ({"temperature": 2}, Sampling(2.0, 40)),
        ({"temperature": 0.3, "top_k": 5}, Sampling(0.3, 5)),
        ({"top_k": 1}, Sampling(0.8, 1)),
        ({"top_k": 64}, Sampling(0.8, 64)),
        ({"top_k": 65}, Sampling(0.8, 64)),
        ({"top_k": 10**6}, Sampling(0.8, 64)),
    ],
)
def test_sampling(fields: dict[str, Any], sampling: Sampling) -> None:
    assert request(**fields).sampling == sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, 5, "0.5", True, [], float("nan"), float("inf"))),
        *(("top_k", value) for value in (0, -1, 1.5, "40", True)),
    ],
)
def test_senseless_sampling(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    ("stop", "stops"),
    [(None, ()), ([], ()), ("a", ("a",)), (["a", "b", "c", "d"], ("a", "b", "c", "d")), (["x" * 64], ("x" * 64,))],
)
def test_stop(stop: Any, stops: tuple[str, ...]) -> None:
    assert request(stop=stop).stop == stops


@pytest.mark.parametrize("stop", [["a"] * 5, "x" * 65, ["x" * 65], [""], "", [5], 5, {"a": 1}])
def test_senseless_stop(stop: Any) -> None:
    assert refused(stop=stop).param == "stop"


def test_stream_and_its_options() -> None:
    assert parsed(stream=True).stream
    assert not parsed(stream=None).stream
    assert parsed(stream=True, stream_options={"include_usage": True}).options.include_usage
    for options in (None, {}, {"include_usage": False}, {"include_obfuscation": True}):
        assert not parsed(stream=True, stream_options=options).options.include_usage
    assert refused(stream="yes").param == "stream"
    assert refused(stream_options=[1]).param == "stream_options"
    assert refused(stream_options={"include_usage": 1}).param == "stream_options.include_usage"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": None}, Thinking()),
        ({"reasoning_effort": "none"}, Thinking()),
        ({"reasoning_effort": "minimal"}, Thinking()),
        *(({"reasoning_effort": word}, Thinking(True, word)) for word in ("low", "medium", "high", "xhigh", "max")),
        ({"chat_template_kwargs": {"enable_thinking": True}}, Thinking(True)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking()),
        ({"chat_template_kwargs": {"enable_thinking": None, "preserve_thinking": True}}, Thinking()),
        ({"chat_template_kwargs": None}, Thinking()),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, Thinking()),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, Thinking(True, "low")),
        ({"reasoning_effort": "low", "thinking_budget": 64}, Thinking(True, "low", 64)),
        ({"reasoning_effort": "low", "reasoning": {"max_tokens": 64}}, Thinking(True, "low", 64)),
        ({"reasoning": {"max_tokens": 64}}, Thinking()),
        ({"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": -1}, Thinking(True)),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: Thinking) -> None:
    assert request(**fields).thinking == thinking


@pytest.mark.parametrize("effort", ["extreme", "", "HIGH", 5, True])
def test_unknown_effort(effort: Any) -> None:
    error = refused(reasoning_effort=effort)
    assert error.param == "reasoning_effort"


def test_an_unknown_effort_is_told_the_known_ones() -> None:
    assert "none, minimal, low, medium, high, xhigh, max" in refused(reasoning_effort="extreme").message


def test_a_template_from_the_request_is_refused() -> None:
    bomb = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    assert refused(chat_template=bomb).param == "chat_template"
    assert refused(chat_template_kwargs={"chat_template": bomb}).param == "chat_template_kwargs.chat_template"
    assert refused(chat_template_kwargs={"enable_thinking": "yes"}).param == "chat_template_kwargs.enable_thinking"
    assert refused(chat_template_kwargs=[]).param == "chat_template_kwargs"
    assert request(chat_template=None).turns


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"function_call": {"name": "f"}},
        {"n": 2},
        {"n": "two"},
        {"n": -1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {"50256": -100}},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"prediction": {"type": "content", "content": "x"}},
        {"web_search_options": {"search_context_size": "low"}},
    ],
)
def test_not_supported(fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refused(**fields)
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("neutral", [None, False, 0, 0.0, [], {}])
def test_neutral_values_of_unsupported_fields_are_accepted(name: str, neutral: Any) -> None:
    if name == "web_search_options" and neutral == {}:
        assert refused(web_search_options={}).param == name  # an empty object switches a search on
    else:
        assert request(**{name: neutral}).turns


def test_one_answer_is_accepted() -> None:
    assert request(n=1).turns


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 9.9, "seed": "x", "store": True, "metadata": {"a": 1}, "user": "u", "service_tier": "auto"},
        {"prompt_cache_key": "k", "min_p": 0.1, "repetition_penalty": 1.3, "context_management": {}, "keep_alive": "5m"},
    ],
)
def test_ignored_fields(fields: dict[str, Any]) -> None:
    assert request(**fields) == request()


def test_function_tools() -> None:
    tools = request(tools=[function("f", description="d", parameters=SCHEMA, strict=True), function("a.b:c-d_9")]).tools
    assert [(tool.name, tool.description, tool.strict) for tool in tools] == [("f", "d", True), ("a.b:c-d_9", "", None)]
    schema = tools[0].parameters
    assert isinstance(schema, dict)
    assert list(schema["properties"]) == ["b", "a"]


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools(tools: Any) -> None:
    assert request(tools=tools).tools == ()


@pytest.mark.parametrize("fields", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": True}, {"description": None}])
def test_tools_without_parameters(fields: dict[str, Any]) -> None:
    assert [tool.name for tool in request(tools=[function("noop", **fields)]).tools] == ["noop"]


def test_tools_of_others_are_skipped_with_one_warning_each() -> None:
    got = parsed(tools=[{"type": "web_search"}, function("f"), {"type": "web_search"}, {"type": "code_interpreter"}])
    assert [tool.name for tool in got.request.tools] == ["f"]
    assert len(got.warnings) == 2
    assert "web_search" in got.warnings[0]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([function("f"), {"type": "function", "function": {}}], "tools[1].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("a b")], "tools[0].function.name"),
        ([function("x" * 129)], "tools[0].function.name"),
        ([function(5)], "tools[0].function.name"),
        ([function("f", description=5)], "tools[0].function.description"),
        ([function("f", parameters=[])], "tools[0].function.parameters"),
        ([function("f", parameters={"description": "x" * 32_000})], "tools[0].function.parameters"),
        ([function("f", strict="yes")], "tools[0].function.strict"),
        ([function("f"), function("f")], "tools"),
        ([5], "tools[0]"),
        ({}, "tools"),
        ([function(f"f{index}") for index in range(1025)], "tools"),
    ],
)
def test_malformed_tools_name_their_place(tools: Any, param: str) -> None:
    assert refused(tools=tools).param == param


def test_the_largest_tool_set() -> None:
    assert len(request(tools=[function(f"f{index}") for index in range(1024)]).tools) == 1024
    assert request(tools=[function("x" * 128)]).tools


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("any", ToolChoice("required")),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f")),
        ({"type": "function", "name": "f"}, ToolChoice("named", "f")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("f"), function("g")]}},
            ToolChoice("required", allowed=("f", "g")),
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("g")]}}, ToolChoice(allowed=("g",))),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, ToolChoice(allowed=("g",))),
    ],
)
def test_tool_choice(value: Any, choice: ToolChoice) -> None:
    got = request(tools=[function("f"), function("g")], tool_choice=value)
    assert got.tool_choice == choice
    assert [tool.name for tool in got.tools] == ["f", "g"]


@pytest.mark.parametrize("value", ["auto", "none"])
def test_tool_choice_without_tools(value: str) -> None:
    assert request(tool_choice=value).tool_choice.mode == value


@pytest.mark.parametrize(
    "value",
    [
        "sometimes",
        5,
        [],
        {},
        {"type": "custom", "custom": {"name": "f"}},
        {"type": "web_search"},
        {"type": "function"},
        {"type": "function", "function": {"name": "unknown"}},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [function("f")]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("unknown")]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "web_search"}]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "f"}},
    ],
)
def test_malformed_tool_choice(value: Any) -> None:
    assert (refused(tools=[function("f")], tool_choice=value).param or "").startswith("tool_choice")


def test_a_required_call_needs_a_tool() -> None:
    assert refused(tool_choice="required").param == "tool_choice"
    assert refused(tool_choice="required", tools=[{"type": "web_search"}]).param == "tools[0].type"


def test_tools_that_all_run_elsewhere_are_refused() -> None:
    hosted = [{"type": "web_search"}, {"type": "code_interpreter"}]
    error = refused(tools=hosted)
    assert error.param == "tools[0].type"
    assert "web_search" in error.message
    assert [tool.name for tool in request(tools=[*hosted, function("f")]).tools] == ["f"]
    assert request(tools=hosted, tool_choice="none").tools == ()
    assert request(tools=[]).tools == ()


def test_parallel_tool_calls() -> None:
    tools = [function("f")]
    assert request(tools=tools).call_limit == 16
    assert request(tools=tools, parallel_tool_calls=None).call_limit == 16
    assert request(tools=tools, parallel_tool_calls=False).call_limit == 1
    assert refused(parallel_tool_calls="no").param == "parallel_tool_calls"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ResponseFormat()),
        ({"type": "text"}, ResponseFormat()),
        ({"type": "json_object"}, ResponseFormat("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            ResponseFormat("json_schema", SCHEMA, "n", True),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": True, "strict": None}},
            ResponseFormat("json_schema", True, "response", False),
        ),
    ],
)
def test_response_format(value: Any, wanted: ResponseFormat) -> None:
    assert request(response_format=value).response_format == wanted


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {"x": "y" * 128_000}}}, "response_format.json_schema.schema"),
    ],
)
def test_malformed_response_format(value: Any, param: str) -> None:
    assert refused(response_format=value).param == param
