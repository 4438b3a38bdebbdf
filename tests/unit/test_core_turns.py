"""Where system and developer messages go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooled_mlx.core.request import ToolCall, Turn
from pooled_mlx.core.turns import arrange_turns

CALL = ToolCall("c1", "f", "{}")


def turns(text: str) -> list[Turn]:
    """`s:A u:hi` as turns."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [Turn(roles[part[0]], part[2:]) for part in text.split()]  # type: ignore[arg-type]


def arranged(text: str) -> str:
    short = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
    return " ".join(f"{short[turn.role]}:{turn.text}" for turn in arrange_turns(turns(text))).replace("\n\n", "|")


@pytest.mark.parametrize(
    ("given_turns", "wanted"),
    [
        ("u:a", "u:a"),
        ("s:A u:a", "s:A u:a"),
        ("s:A s:B u:a", "s:A|B u:a"),
        ("s: s:B u:a", "s:B u:a"),
        ("s: u:a", "s: u:a"),
        ("u:a s:B", "u:a|B"),
        ("u:a s:B s:C", "u:a|B|C"),
        ("u:a s: u:b", "u:a u:b"),
        ("u:a s:B u:c", "u:a|B u:c"),
        ("u:a a:b s:C u:d", "u:a a:b u:C|d"),
        ("u:a a:b s:C s:D u:e", "u:a a:b u:C|D|e"),
        ("u:a a:b s:C", "u:a a:b u:C"),
        ("u:a a:b s:C a:d u:e", "u:a a:b a:d u:C|e"),
        ("u:a a:b s:C a:d", "u:a a:b a:d u:C"),
        ("u:a a:b t:1 s:C", "u:a a:b t:1|C"),
        ("u:a a:b t:1 s:C t:2", "u:a a:b t:1|C t:2"),
        ("u:a a:b s:C t:1", "u:a a:b t:1|C"),
        ("s:A a:b t:1", "s:A a:b t:1"),
        ("s:A s:B", "s:A|B"),
        ("s:A u:hi s:B u:go", "s:A u:hi|B u:go"),
        ("u: s:B", "u:B"),
    ],
)
def test_arrange(given_turns: str, wanted: str) -> None:
    assert arranged(given_turns) == wanted


def test_nothing_of_a_turn_is_lost() -> None:
    assistant = Turn("assistant", "a", reasoning="r", tool_calls=(CALL,))
    result = Turn("tool", "x", tool_call_id="c1", name="f", is_error=True)
    got = arrange_turns([Turn("user", "u"), assistant, Turn("system", "late"), result, Turn("user", "v")])
    assert got[1] == assistant
    assert got[2] == Turn("tool", "x\n\nlate", tool_call_id="c1", name="f", is_error=True)


def test_an_empty_conversation() -> None:
    assert arrange_turns([]) == ()


@given(st.lists(st.tuples(st.sampled_from("suat"), st.integers(0, 9))))
def test_every_text_survives_and_the_rest_keeps_its_order(raw: list[tuple[str, int]]) -> None:
    sent = turns(" ".join(f"{role}:{role}{number}." for role, number in raw))
    got = arrange_turns(sent)
    assert sorted("".join(turn.text for turn in got).replace("\n\n", "")) == sorted("".join(turn.text for turn in sent))
    assert [turn.role for turn in got[1:]].count("system") == 0
    kept = [turn.text for turn in sent if turn.role != "system"]
    pieces = [piece for turn in got for piece in turn.text.split("\n\n") if not piece.startswith("s")]
    assert [piece for piece in pieces if piece] == kept
    assert arrange_turns(got) == got
