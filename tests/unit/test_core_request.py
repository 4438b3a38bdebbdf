"""What a request allows: calls and callable tools."""

from __future__ import annotations

import pytest

from pooled_mlx.core.errors import ErrorKind, bad_request, prompt_too_long, queue_full
from pooled_mlx.core.request import MAX_CALLS, Request, Tool, ToolChoice

TOOLS = (Tool("f"), Tool("g"))


def request(choice: ToolChoice, *, parallel: bool = True, tools: tuple[Tool, ...] = TOOLS) -> Request:
    return Request("r", (), tools, choice, parallel)


@pytest.mark.parametrize(
    ("choice", "limit", "names"),
    [
        (ToolChoice("auto"), MAX_CALLS, ["f", "g"]),
        (ToolChoice("required"), MAX_CALLS, ["f", "g"]),
        (ToolChoice("none"), 0, []),
        (ToolChoice("named", "g"), 1, ["g"]),
        (ToolChoice("auto", allowed=("f",)), MAX_CALLS, ["f"]),
        (ToolChoice("required", allowed=("g", "f")), MAX_CALLS, ["f", "g"]),
    ],
)
def test_calls(choice: ToolChoice, limit: int, names: list[str]) -> None:
    assert request(choice).call_limit == limit
    assert request(choice, parallel=False).call_limit == min(limit, 1)
    assert [tool.name for tool in request(choice).callable_tools] == names


def test_no_tools_no_calls() -> None:
    assert request(ToolChoice("auto"), tools=()).call_limit == 0


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_only_refusals_are_permanent(kind: ErrorKind) -> None:
    assert kind.permanent == (400 <= kind.status < 500 and kind.status != 429)


def test_wordings() -> None:
    error = prompt_too_long(40_000, 32_768)
    assert error.code == "context_length_exceeded"
    assert error.message.startswith("prompt is too long: 40000 tokens > 32768 maximum")
    assert (queue_full(8).retry_after_seconds, queue_full(8).kind.status) == (5, 429)
    assert repr(bad_request("m", "p", "c")) == "ApiError(BAD_REQUEST, 'm', param='p', code='c')"
