"""A coding agent's conversation: system prompt and ten tools, then user turns, calls and their results, and the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.client import Stream, stream
from benchmarks.prompts import words
from benchmarks.servers import Server

INCOMING: tuple[tuple[Literal["user", "tool"], int], ...] = (
    ("user", 40),
    ("tool", 120),
    ("tool", 80),
    ("user", 30),
    ("tool", 250),
    ("tool", 60),
    ("tool", 90),
    ("user", 50),
    ("tool", 150),
    ("tool", 40),
    ("user", 70),
    ("tool", 110),
)
"""What arrives in each of the twelve turns, and how many words. An answer calls a tool where a tool's result comes next."""
TOOL_COUNT = 10
THINKING = {"reasoning_effort": "medium"}


def tools() -> list[dict[str, Any]]:
    """Ten tools with descriptions and schemas, about 200 tokens each."""
    return [_tool(number) for number in range(TOOL_COUNT)]


def _tool(number: int) -> dict[str, Any]:
    properties = {
        "path": {"type": "string", "description": words(14, 40 + number)},
        "mode": {"type": "string", "enum": ["read", "write", "list"], "description": words(12, 60 + number)},
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "description": words(10, 80 + number)},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    description = words(70, 20 + number)
    return {"type": "function", "function": {"name": f"tool_{number}", "description": description, "parameters": parameters}}


def system_text(seed: int, count: int = 600) -> str:
    """The system prompt: with the tools about 3,000 tokens."""
    return f"You are a coding agent. {words(count, seed)}"


def marker(turn: int, thinking: bool) -> str:
    """What the scripted answers of a turn are found by."""
    return f"({'thought' if thinking else 'step'} {turn})"


def incoming_text(turn: int, seed: int, thinking: bool) -> str:
    """What arrives in a turn."""
    return f"{words(INCOMING[turn][1], seed * 31 + turn)} {marker(turn, thinking)}"


def calls_next(turn: int) -> bool:
    """True when the answer of this turn calls a tool."""
    return turn + 1 < len(INCOMING) and INCOMING[turn + 1][0] == "tool"


def answers(form: Literal["hermes", "xml"]) -> list[dict[str, Any]]:
    """Scripted answers for all turns, without and with reasoning."""
    lines = []
    for turn in range(len(INCOMING)):
        for thinking in (False, True):
            text = f"{words(10, 300 + turn)}."
            if calls_next(turn):
                text += "\n\n" + _call(form, f"tool_{turn % TOOL_COUNT}", f"src/{words(1, turn)}.py")
            if thinking:
                text = f"{words(20, 400 + turn)}\n</think>\n\n{text}"
            lines.append({"match": marker(turn, thinking), "text": text})
    return lines


def _call(form: Literal["hermes", "xml"], name: str, path: str) -> str:
    if form == "hermes":
        call = json.dumps({"name": name, "arguments": {"path": path}})
        return f"<tool_call>\n{call}\n</tool_call>"
    return f"<tool_call>\n<function={name}>\n<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost. Counts are the server's own; `new_tokens` were not there before: message + generation prompt."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    answer_tokens: int
    first_token_seconds: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def history_tokens(self) -> int:
        """Prompt tokens that were there before: the last prompt and its answer."""
        return self.prompt_tokens - self.new_tokens


@dataclass
class Agent:
    """One conversation with one server. The client sends back what the server answered.

    `plain_system` replaces system prompt and tools by one text, and results of tools become user turns: for a server whose
    template knows no tools. `keeps_reasoning` False: a client that drops `reasoning_content`.
    """

    server: Server
    seed: int = 1
    thinking: bool = False
    keeps_reasoning: bool = True
    plain_system: str | None = None
    answer_tokens: int = 64
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": self.plain_system or system_text(self.seed)}]

    @property
    def more(self) -> dict[str, Any]:
        """The rest of the request's body."""
        body: dict[str, Any] = {} if self.plain_system else {"tools": tools()}
        return body | THINKING if self.thinking else body

    def next(self) -> Turn:
        """Run the next turn."""
        number = len(self.turns)
        self.starts.append(len(self.messages))
        self.messages.append(self._incoming(number, self.seed))
        answer = self.ask(self.messages)
        before = self.turns[-1].prompt_tokens + self.turns[-1].answer_tokens if self.turns else 0
        turn = self._cost(answer, before)
        self.turns.append(turn)
        self.messages.append(answer.message(reasoning=self.keeps_reasoning))
        return turn

    def again(self, number: int, *, seed: int | None = None) -> Turn:
        """Send the conversation up to turn `number` once more: the same, or with that turn's message edited."""
        before = self.turns[number - 1].prompt_tokens + self.turns[number - 1].answer_tokens
        messages = self.messages[: self.starts[number]]
        last = self.messages[self.starts[number]] if seed is None else self._incoming(number, seed)
        return self._cost(self.ask([*messages, last], 4), before)

    def ask(self, messages: Sequence[dict[str, Any]], tokens: int | None = None) -> Stream:
        """Send these messages. Raises RuntimeError when no token came."""
        answer = stream(self.server, messages, tokens or self.answer_tokens, **self.more)
        if not answer.times:
            raise RuntimeError(f"no token came: {answer}")
        return answer

    @staticmethod
    def _cost(answer: Stream, before: int) -> Turn:
        prompt = answer.prompt_tokens
        return Turn(prompt, answer.cached_tokens, prompt - before, answer.tokens, answer.first_token_seconds)

    def _incoming(self, number: int, seed: int) -> dict[str, Any]:
        role, _ = INCOMING[number]
        text = incoming_text(number, seed, self.thinking)
        if role == "user":
            return {"role": "user", "content": text}
        if self.plain_system:
            return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        calls = self.messages[-1].get("tool_calls") if number == len(self.turns) else None
        return {"role": "tool", "tool_call_id": calls[0]["id"] if calls else "call_0", "content": text}
