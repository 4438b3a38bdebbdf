"""Recorded requests of real clients: every body parses, and a conversation only ever grows at its end."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from pooled_mlx.api.chat_completions import EDGE as CHAT
from pooled_mlx.api.edge import Edge
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.core.answer import fold
from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Finished, Text, Usage
from pooled_mlx.core.request import Request
from tests.shared_data import shared_path
from tests.wire import HEADER

FILES = [
    "aider",
    "claude-tui",
    "claude",
    "cline",
    "cn",
    "codex-ns",
    "codex-patch",
    "codex-responses",
    "codex-tui",
    "js-ai",
    "js-anthropic",
    "js-openai",
    "llm",
    "opencode-anthropic",
    "opencode",
    "pi-responses",
    "pi",
    "py-anthropic",
    "py-langchain",
    "py-litellm",
    "py-openai",
    "py-pydantic-ai",
    "qwen",
]
MAIN_LOOPS = {
    "claude": (0, 1, 2),
    "claude-tui": (3, 4, 5, 6),
    "cline": (0, 1, 2),
    "cn": (0, 1, 2),
    "codex-ns": (0, 1),
    "codex-patch": (0, 1),
    "codex-responses": (0, 1),
    "codex-tui": (0, 2, 3),
    "opencode": (1, 2, 3),
    "opencode-anthropic": (1, 2, 3, 4),
    "pi": (0, 1, 2),
    "pi-responses": (0, 1, 2, 3),
    "qwen": (0, 1, 2),
    "py-anthropic": (5, 6),
}
"""File -> lines that are one conversation, title requests and the like left out."""


class Replay:
    """Parses the lines of one file in order, answering each as the recording says, so that stored history exists."""

    def __init__(self, name: str) -> None:
        self._responses = ResponsesEdge()
        self._messages = MessagesEdge()
        lines = shared_path(f"traces/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def requests(self) -> list[Request | None]:
        """The request of each line; None where a line is no generating request."""
        return [self._request(number, entry) for number, entry in enumerate(self.entries)]

    def _request(self, number: int, entry: dict[str, Any]) -> Request | None:
        edges: dict[str, Edge] = {
            "/v1/chat/completions": CHAT,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
        }
        if entry["path"] == "/v1/messages/count_tokens":
            return self._messages.parse_count(entry["body"], request_id=f"n{number}", client="trace").request
        if entry["method"] != "POST":
            return None
        edge = edges[entry["path"]]
        body = dict(entry["body"])
        if "previous_response_id" in body:
            body["previous_response_id"] = f"resp_n{number - 1}"
        if body.get("thread", {}).get("type") == "continue":
            body["thread"] = {"type": "continue", "previous_message_id": f"msg_n{number - 1}"}
        parsed = edge.parse(body, request_id=f"n{number}", client="trace")
        edge.whole(parsed, HEADER, fold(self._answer(number, entry)))
        return parsed.request

    def _answer(self, number: int, entry: dict[str, Any]) -> list[Event]:
        calls = (entry.get("resp") or {}).get("calls") or []
        events: list[Event] = [] if calls else [Text("ok")]
        following = json.dumps(self.entries[number + 1 : number + 2])
        for index, (name, arguments) in enumerate(calls):
            marks = [mark for mark in following.replace('"', " ").split() if mark.startswith(("call_", "toolu_"))]
            call_id = next((mark for mark in marks if mark[-1].isalnum() and len(mark) > 20), f"call_{number}_{index}")
            events += [CallStart(index, call_id, name), CallArguments(index, json.dumps(arguments)), CallEnd(index)]
        return [*events, Finished("tool_calls" if calls else "stop", Usage(1, 1))]


@pytest.mark.parametrize("name", FILES)
def test_every_body_parses(name: str) -> None:
    requests = [request for request in Replay(name).requests() if request is not None]
    assert requests
    for request in requests:
        assert request.turns[-1].role in ("user", "tool")
        assert [turn.role for turn in request.turns].count("system") <= 1
        for turn in request.turns:
            for call in turn.tool_calls:
                assert isinstance(json.loads(call.arguments) if not call.custom else {}, dict)


@pytest.mark.parametrize("name", sorted(MAIN_LOOPS))
def test_a_conversation_only_grows_at_its_end(name: str) -> None:
    requests = Replay(name).requests()
    loop = [requests[number] for number in MAIN_LOOPS[name]]
    for before, after in itertools.pairwise(loop):
        assert before is not None
        assert after is not None
        assert after.turns[: len(before.turns)] == before.turns
        assert len(after.turns) > len(before.turns)
        assert after.tools == before.tools
        assert after.turns[len(before.turns)].role == "assistant"
    results = [turn for request in loop if request for turn in request.turns if turn.role == "tool"]
    assert all(turn.tool_call_id and turn.name for turn in results)


def test_a_stored_response_is_continued_without_its_instructions() -> None:
    before, after = Replay("py-openai").requests()[6:8]
    assert before is not None
    assert after is not None
    assert before.turns[0].role == "system"
    assert after.turns[:-2] == before.turns[1:]
    assert [turn.role for turn in after.turns[-2:]] == ["assistant", "tool"]


def test_title_requests_share_no_tools_with_the_main_loop() -> None:
    title = Replay("claude-tui").requests()[2]
    assert title is not None
    assert title.tools == ()
    assert title.response_format.kind == "json_schema"
    assert not title.thinking.on


def test_codex_tools_keep_namespaces_and_grammars() -> None:
    spaces = Replay("codex-ns").requests()[1]
    assert spaces is not None
    assert {tool.namespace for tool in spaces.tools} == {None, "multi_agent_v1"}
    assert spaces.turns[-2].tool_calls[0].namespace == "multi_agent_v1"
    patch = Replay("codex-patch").requests()[1]
    assert patch is not None
    custom = next(tool for tool in patch.tools if tool.custom)
    assert custom.grammar is not None
    assert custom.grammar.syntax == "lark"
    assert patch.turns[-2].tool_calls[0].custom
