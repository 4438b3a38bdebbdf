"""Chat Completions renderings of the golden event files, byte for byte."""

from __future__ import annotations

import json

import pytest

from pooled_mlx.api.chat_completions import EDGE
from tests.golden.loader import case_names, check_golden, load_case, render_stream, render_whole, whole_text

API = "chat_completions"


def test_there_are_cases() -> None:
    assert len(case_names()) >= 12


@pytest.mark.parametrize("name", case_names())
def test_stream(name: str) -> None:
    check_golden(API, f"{name}.sse", render_stream(EDGE, API, load_case(name)))


@pytest.mark.parametrize("name", case_names())
def test_whole(name: str) -> None:
    check_golden(API, f"{name}.json", whole_text(render_whole(EDGE, API, load_case(name))))


@pytest.mark.parametrize("name", case_names())
def test_both_forms_say_the_same(name: str) -> None:
    case = load_case(name)
    whole = render_whole(EDGE, API, case)
    stream = render_stream(EDGE, API, case)
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    if "status" in whole:
        assert chunks[-1] == whole["body"]
        assert "[DONE]" not in stream
        return
    assert stream.count("data: [DONE]") == 1
    assert stream.endswith("data: [DONE]\n\n")
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    message = whole["choices"][0]["message"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole["choices"][0]["finish_reason"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == (message["content"] or "")
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices) == message.get("reasoning_content", "")
    assert {chunk["id"] for chunk in chunks} == {whole["id"]}
    assert choices[0]["delta"]["role"] == "assistant"
    calls: dict[int, dict[str, str]] = {}
    for delta in (choice["delta"] for choice in choices):
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"arguments": ""})
            call.update({key: piece[key] for key in ("id", "type") if key in piece})
            call["arguments"] += piece["function"]["arguments"]
            if "name" in piece["function"]:
                assert "name" not in call
                call["name"] = piece["function"]["name"]
    expected = [{"id": call["id"], "type": call["type"], **call["function"]} for call in message.get("tool_calls", ())]
    complete = [calls[index] for index in sorted(calls)][: len(expected)]
    assert complete == expected
