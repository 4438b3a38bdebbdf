"""Volatile client text is neutralised, in system text only."""

import json

import pytest

from pooled_mlx.core.request import Turn
from pooled_mlx.core.turns import arrange_turns
from pooled_mlx.core.volatile import RULES, neutralise
from tests.shared_data import shared_path

HEADER = "x-anthropic-billing-header: cc_version=2.1.332.b08; cc_entrypoint=sdk-cli;"


def system_texts(name: str) -> list[list[str]]:
    found: list[list[str]] = []
    for line in shared_path(f"traces/{name}.jsonl").read_text().splitlines():
        body = json.loads(line).get("body")
        if isinstance(body, dict) and isinstance(body.get("system"), list):
            found.append([block["text"] for block in body["system"]])
    return found


@pytest.mark.parametrize("name", ["claude", "claude-tui"])
@pytest.mark.parametrize("separator", ["", "\n", "\n\n"])
def test_recorded_billing_line_is_removed_however_the_blocks_are_joined(name: str, separator: str) -> None:
    recorded = system_texts(name)
    assert recorded
    for blocks in recorded:
        assert blocks[0].startswith("x-anthropic-billing-header:")
        assert neutralise(separator.join(blocks)) == separator.join(blocks[1:])


@pytest.mark.parametrize(
    "line",
    [
        HEADER,
        "x-anthropic-billing-header: cc_version=2.1.0.aaa; cc_entrypoint=cli; cch=11111;",
        "x-anthropic-billing-header: cc_version=2.1.0.bbb; cc_entrypoint=cli; cch=22222",
    ],
)
def test_billing_line_disappears_with_every_nonce(line: str) -> None:
    assert neutralise(line) == ""
    assert neutralise(f"{line}\nYou are an agent. a=b;") == "You are an agent. a=b;"
    assert neutralise(f"Before.\n{line}\nAfter.") == "Before.\nAfter."


def test_text_that_only_mentions_the_header_stays() -> None:
    text = "Never print the x-anthropic-billing-header: cc_version=1; line."
    assert neutralise(text) == text


def test_countdowns_get_fixed_words() -> None:
    first = neutralise("A <total_tokens>4990000 tokens left</total_tokens> B")
    assert first == neutralise("A <total_tokens>4,812,001 tokens left</total_tokens> B")
    assert "4990000" not in first
    assert neutralise("Token usage: 35000/200000; 165000 remaining") == neutralise("Token usage: 1/200000; 199999 remaining")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_settle_after_one_pass(rule) -> None:
    text = f"{HEADER}\nx <total_tokens>5 tokens left</total_tokens> Token usage: 1/2; 1 remaining"
    once = rule.pattern.sub(rule.fixed, text)
    assert once != text
    assert rule.pattern.sub(rule.fixed, once) == once


def test_only_system_text_is_touched() -> None:
    countdown = "<total_tokens>5 tokens left</total_tokens>"
    turns = arrange_turns(
        [Turn("system", HEADER), Turn("system", "Sys."), Turn("user", f"{HEADER} {countdown}"), Turn("system", countdown)]
    )
    assert turns == (
        Turn("system", "Sys."),
        Turn("user", f"{HEADER} {countdown}\n\n<total_tokens>enough tokens left</total_tokens>"),
    )


def test_system_prompt_of_volatile_text_alone_is_no_system_prompt() -> None:
    assert arrange_turns([Turn("system", HEADER), Turn("user", "hi")]) == (Turn("user", "hi"),)
    assert arrange_turns([Turn("system", ""), Turn("user", "hi")]) == (Turn("system", ""), Turn("user", "hi"))
    assert arrange_turns([Turn("user", "hi"), Turn("system", HEADER)]) == (Turn("user", "hi"),)


COUNTDOWNS = [f"<total_tokens>{left} tokens left</total_tokens>" for left in (900_000, 812_345, 7)]


@pytest.mark.parametrize("separator", ["\n", "\n\n", " "])
def test_counters_that_pile_up_in_one_text_are_one(separator: str) -> None:
    texts = [neutralise("Sys." + separator + separator.join(COUNTDOWNS[:count])) for count in (1, 2, 3)]
    assert texts[0] == texts[1] == texts[2]
    usage = [f"Token usage: {n}/200000; {200000 - n} remaining" for n in (1, 2, 3)]
    assert neutralise("\n".join(usage)) == neutralise(usage[0])


def test_counter_blocks_that_pile_up_turn_by_turn_leave_the_system_prompt_as_it_is() -> None:
    """A client that adds one block a turn to its top-level system list, and keeps the old ones."""
    prompts = [
        arrange_turns([Turn("system", "Sys."), *(Turn("system", text) for text in COUNTDOWNS[:count]), Turn("user", "hi")])
        for count in (1, 2, 3)
    ]
    assert prompts[0] == prompts[1] == prompts[2]
    same = [Turn("system", "Sys."), Turn("system", "Be brief."), Turn("system", "Be brief."), Turn("user", "hi")]
    assert arrange_turns(same)[0].text == "Sys.\n\nBe brief.\n\nBe brief."


def test_user_text_with_a_row_of_counters_stays_untouched() -> None:
    words = "\n".join(COUNTDOWNS)
    assert arrange_turns([Turn("system", "Sys."), Turn("user", words)])[1].text == words
