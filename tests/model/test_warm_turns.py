"""Agent conversations through the whole engine: what is read again on each turn, on the hybrid model and on the real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pooled_mlx.core.request import Thinking, Tool, ToolCall, Turn
from pooled_mlx.prompt.exact_ids import ExactIds
from pooled_mlx.replay.script import ScriptLine
from pooled_mlx.store import Ready
from tests.model.rooms import Said, ask, result, scripted_room, small_room

TOOLS = tuple(
    Tool(
        f"tool_{index}",
        f"Tool number {index}: reads and writes things of kind {index}, carefully and in order.",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["path"],
        },
    )
    for index in range(8)
)
SYSTEM = Turn("system", "You are a careful agent that works in a repository. " * 12)
SLACK = 64
"""Tokens that may be read again because a cut closer than that to the last one is not kept."""


def call_text(tool: str, path: str, lines: int) -> str:
    return (
        f"I look at {path}.\n\n<tool_call>\n<function={tool}>\n<parameter=lines>\n{lines}\n</parameter>\n"
        f"<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>"
    )


def new_tokens(room_count: int, said: Said) -> int:
    """Tokens of the prompt that no earlier request had: its length minus the former prompt and answer."""
    return said.answer.usage.prompt_tokens - room_count


def known_after(said: Said) -> int:
    usage = said.answer.usage
    return usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("split", ["token", "byte"])
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_an_agent_pays_only_for_what_is_new(embedded: Ready, tmp_path: Path, split: str, thinking: bool) -> None:
    """Twelve turns with tool calls and results; the client drops the reasoning and writes the arguments anew."""
    thought = "Let me think about it.\n</think>\n\n" if thinking else ""
    lines = [
        ScriptLine(
            index,
            thought + (call_text(f"tool_{index % 8}", f"src/a{index}.py", index) if index % 3 else "Done. " * 9),
            split=split,
        )  # type: ignore[arg-type]
        for index in range(1, 13)
    ]
    with scripted_room(embedded, tmp_path / "model", lines) as room:
        turns = [SYSTEM, Turn("user", "Please look at the repository and tell me what is in it. " * 4)]
        known, computed = 0, []
        for index in range(12):
            said = ask(room, turns, tools=TOOLS, thinking=Thinking(on=thinking), most=400)
            assert said.answer.finish_reason in ("stop", "tool_calls")
            if known:
                computed.append(said.computed)
                assert said.computed <= new_tokens(known, said) + SLACK, f"turn {index}: {said.answer.cache_note}"
            known = known_after(said)
            if said.answer.calls:
                call = said.answer.calls[0]
                again = ToolCall(call.id, call.name, call.arguments.replace(": ", ":").replace(", ", ","))
                turns += [replace(said.turn, tool_calls=(again,)), result(call, f"file {index}: " + "def f(): pass\n" * 20)]
            else:
                turns += [said.turn, Turn("user", f"And now step {index}, please. " * 8)]
        assert len(computed) == 11
        assert max(computed) < 400 < known


def test_without_the_map_the_same_conversation_misses(embedded: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that exact ids are what makes a byte-wise answer a hit."""
    lines = [ScriptLine(1, "A first answer, written byte by byte. " * 8, split="byte"), ScriptLine(2, "Second.")]
    turns = [SYSTEM, Turn("user", "Please tell me a story about a tree and a river. " * 4)]
    computed = {}
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(ExactIds, "find", lambda *args, **fields: None)
        with scripted_room(embedded, tmp_path / str(kept), lines) as room:
            first = ask(room, turns, most=600)
            second = ask(room, [*turns, first.turn, Turn("user", "Go on.")], most=20)
            computed[kept] = second.computed
    assert computed[True] <= 30 + SLACK
    assert computed[False] > computed[True] + 40


def test_reasoning_sent_back_missing_edited_and_foreign(embedded: Ready, tmp_path: Path) -> None:
    thought = "The user wants a tree. " * 12
    lines = [
        ScriptLine(1, f"{thought.strip()}\n</think>\n\nA tree it is. " + "Green leaves. " * 10),
        ScriptLine(2, "x</think>\n\nYes."),
    ]
    with scripted_room(embedded, tmp_path / "model", lines) as room:
        on = Thinking(on=True)
        turns = [SYSTEM, Turn("user", "Draw something. " * 10)]
        first = ask(room, turns, thinking=on, most=400)
        assert first.answer.reasoning.strip() == thought.strip()
        follow = Turn("user", "And now?")
        for reasoning in (first.answer.reasoning, None):
            said = ask(room, [*turns, replace(first.turn, reasoning=reasoning), follow], thinking=on)
            assert said.computed <= 20 + SLACK, said.answer.cache_note
        for reasoning in ("Something else entirely. " * 12, thought + " More."):
            said = ask(room, [*turns, replace(first.turn, reasoning=reasoning), follow], thinking=on)
            assert said.computed > 60 + SLACK
        edited = replace(first.turn, text=first.turn.text.replace("Green", "Red"))
        said = ask(room, [*turns, edited, follow], thinking=on)
        assert said.computed > 60
        assert "edited" in said.answer.cache_note


def test_thinking_switched_between_turns(embedded: Ready, tmp_path: Path) -> None:
    lines = [
        ScriptLine(1, "Plain answer. " * 12),
        ScriptLine(2, "thought</think>\n\nThoughtful. " * 1),
        ScriptLine(3, "Plain again."),
    ]
    with scripted_room(embedded, tmp_path / "model", lines) as room:
        turns = [SYSTEM, Turn("user", "First question, please answer. " * 6)]
        known = 0
        for index, on in enumerate((False, True, False)):
            said = ask(room, turns, thinking=Thinking(on=on), most=300)
            if known:
                assert said.computed <= new_tokens(known, said) + SLACK, said.answer.cache_note
            known = known_after(said)
            turns += [said.turn, Turn("user", f"Question {index}, please. " * 5)]


def test_side_requests_and_parallel_agents_do_not_throw_a_conversation_out(embedded: Ready, tmp_path: Path) -> None:
    with scripted_room(embedded, tmp_path / "model", [ScriptLine(1, "An answer. " * 10)]) as room:
        agents = [[SYSTEM, Turn("user", f"Agent {name}: do your work. " * 8)] for name in "abcdefgh"]
        known = [0] * len(agents)
        for round_ in range(3):
            for index, turns in enumerate(agents):
                said = ask(room, turns, tools=TOOLS, most=200)
                if known[index]:
                    assert said.computed <= new_tokens(known[index], said) + SLACK
                elif index:
                    assert said.answer.usage.cached_tokens > 900  # system + tools are shared
                known[index] = known_after(said)
                turns += [said.turn, Turn("user", f"Round {round_}: go on. " * 6)]
                ask(room, [Turn("user", f"Generate a title for: agent {index} round {round_}")], most=20)


def test_a_hot_real_model_reuses_its_own_odd_tokens(embedded: Ready) -> None:
    """Sampled at temperature 1.3, retokenized answers nearly always differ from what was sampled: the map knows better."""
    questions = ["List three fruits.", "Write a haiku.", "Tell me about Paris.", "Describe a cat."]
    with small_room(embedded) as room:
        for number, question in enumerate(questions):
            turns = [Turn("system", "Answer well. " * 10), Turn("user", question)]
            first = ask(room, turns, temperature=1.3, most=40)
            sent = replace(first.turn, text=f"  {first.turn.text}\n")
            second = ask(room, [*turns, sent, Turn("user", "Go on.")], most=3)
            assert second.computed <= new_tokens(known_after(first), second) + SLACK, number
            assert second.answer.usage.cached_tokens >= first.answer.usage.prompt_tokens
