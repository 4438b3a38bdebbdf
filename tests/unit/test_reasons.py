from collections.abc import Sequence

import numpy as np
import pytest

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.request import Request, Thinking, Tool, ToolCall, ToolChoice, Turn
from pooled_mlx.prompt.reasons import PromptFacts, Reason, RecentPrompts, prompt_facts, words_apart

RULE = CutRule(step=32, spacing=128, minimum=16)
HEADER = "<assistant>"


def encode(text: str) -> np.ndarray:
    """One id per character."""
    return np.array([ord(character) for character in text], np.uint32)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def request(turns: Sequence[Turn], *, tools: Sequence[str] = (), thinking: bool = False, label: str = "agent") -> Request:
    return Request(
        id="r",
        turns=tuple(turns),
        tools=tuple(Tool(name, f"does {name}") for name in tools),
        thinking=Thinking(thinking),
        client=label,
    )


def render(asked: Request, *, restored: dict[int, str] | None = None) -> PromptFacts:
    """A template in small: tools and system first, reasoning in tags, thinking named in the generation prompt."""
    text = ""
    places: list[tuple[int, int]] = []
    tools = "".join(f"[{tool.name}]" for tool in asked.tools)
    system_end = 0
    for index, turn in enumerate(asked.turns):
        places.append((len(text), index))
        reasoning = turn.reasoning or (restored or {}).get(index, "")
        text += f"<{turn.role}>" + (tools if turn.role == "system" else "")
        text += (f"(({reasoning}))" if reasoning else "") + turn.text
        text += "".join(f"{call.name}:{call.arguments}" for call in turn.tool_calls) + "\n"
        if turn.role == "system":
            system_end = len(text)
    head = len(text)
    text += HEADER + ("((" if asked.thinking.on else "(())")
    return prompt_facts(asked, encode(text), head=head, system_end=system_end, turns=places)


SYSTEM = Turn("system", "You are a careful agent. " * 8 + "Today is 2026-11-28. " + "Follow the rules. " * 20)
USER = Turn("user", "please count the files in the folder")
ANSWER = Turn("assistant", "I will list them.", tool_calls=(ToolCall("c1", "ls", '{"path": "."}'),))
RESULT = Turn("tool", "a.txt b.txt " * 10)
DONE = Turn("assistant", "There are two kinds of files, a and b, ten of each.")
MORE = Turn("user", "and now delete all of them at once")
CHAT = [SYSTEM, USER, ANSWER, RESULT, DONE, MORE]


@pytest.fixture
def recent() -> RecentPrompts:
    return RecentPrompts(RULE, divisible=False)


def explain(recent: RecentPrompts, facts: PromptFacts, cached: int, matched: int | None = None) -> Reason:
    """By default the pool holds the ids of all that is remembered."""
    known = recent._nearest(facts)[1]
    return recent.explain(facts, cached, max(cached, known) if matched is None else matched, decode)


def changed(index: int, turn: Turn) -> list[Turn]:
    return [*CHAT[:index], turn, *CHAT[index + 1 :]]


def test_the_first_prompt_is_new(recent: RecentPrompts):
    facts = render(request([SYSTEM, USER]))
    reason = explain(recent, facts, 0)
    assert reason.kind == "new"
    assert reason.note() == f"reused 0 of {len(facts.ids)}: new"


def test_an_answer_that_came_back_changed_is_an_edit(recent: RecentPrompts):
    first = render(request(CHAT[:2]))
    recent.remember(first.answered(encode(f"{ANSWER.text}ls:{{}}\n"), ANSWER.text, [ToolCall("c1", "ls", "{}")]))
    facts = render(request(CHAT[:4]))
    reason = explain(recent, facts, first.head)
    # The client wrote other arguments into the call.
    assert (reason.kind, reason.message) == ("edited", 3)


def test_an_append_only_conversation_needs_no_reason(recent: RecentPrompts):
    for end in (2, 4, 6):
        facts = render(request(CHAT[:end]))
        cached = 0
        if end > 2:
            cached = render(request(CHAT[: end - 2])).head
            assert explain(recent, facts, cached).note() == f"reused {cached} of {len(facts.ids)} tokens"
        recent.remember(facts)
    assert len(recent) == 1


def test_the_same_prompt_again_is_reused_up_to_its_last_cut(recent: RecentPrompts):
    facts = render(request(CHAT))
    recent.remember(facts)
    assert explain(recent, facts, facts.head - 10).kind == "reused"
    assert explain(recent, facts, facts.head - 10, facts.head).kind == "reused"


def test_what_the_pool_lost_is_called_evicted(recent: RecentPrompts):
    facts = render(request(CHAT))
    recent.remember(facts)
    assert explain(recent, facts, 0, 0).note() == f"reused 0 of {len(facts.ids)}: evicted"
    assert explain(recent, facts, 100, 100).kind == "evicted"
    # All ids are there, but no state to resume from.
    assert explain(recent, facts, 100, facts.head).kind == "evicted"


def test_what_is_shorter_than_the_least_checkpoint_is_said_to_be(recent: RecentPrompts):
    facts = encode("0123456789")
    short = PromptFacts(facts, len(facts), 0, (), b"", b"", "", "agent")
    recent.remember(short)
    reason = recent.explain(short, 0, len(facts), decode)
    assert reason.kind == "short"
    assert reason.note() == "reused 0 of 10: shorter than the least checkpoint"
    assert recent.explain(short, 9, len(facts), decode).note() == "reused 9 of 10 tokens"


def test_a_small_prompt_can_be_evicted_too(recent: RecentPrompts):
    facts = render(request([Turn("user", "count to twenty please")]))
    assert len(facts.ids) < RULE.spacing
    recent.remember(facts)
    assert explain(recent, facts, 0, 0).kind == "evicted"


def test_an_edit_is_shown_with_its_turn_and_words(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    facts = render(request(changed(3, Turn("tool", "a.txt b.txt c.txt " + "a.txt b.txt " * 8))))
    position = facts.turns[3].start + len("<tool>a.txt b.txt ")
    reason = explain(recent, facts, facts.turns[3].start, position)
    assert (reason.kind, reason.message, reason.position) == ("edited", 4, position)
    assert reason.note() == f'reused {facts.turns[3].start} of {len(facts.ids)}: edited in turn 4 (…"a.txt"… / …"c.txt"…)'
    assert reason.note(words=False) == f"reused {facts.turns[3].start} of {len(facts.ids)}: edited in turn 4"


def test_an_edit_whose_history_is_gone_as_well_is_evicted(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    reason = explain(recent, render(request(changed(5, Turn("user", "keep them")))), 0, 0)
    assert reason.kind == "evicted"
    assert reason.message == 6


def test_an_edited_call_is_an_edit(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    call = ToolCall("c1", "ls", '{"path": "/"}')
    facts = render(request(changed(2, Turn("assistant", ANSWER.text, tool_calls=(call,)))))
    assert explain(recent, facts, facts.turns[2].start).kind == "edited"


def test_a_removed_turn_is_an_edit(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    facts = render(request([SYSTEM, *CHAT[3:]]))
    reason = explain(recent, facts, facts.system_end)
    assert (reason.kind, reason.message) == ("edited", 2)


def test_a_date_in_the_system_prompt(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    system = Turn("system", SYSTEM.text.replace("28", "29"))
    facts = render(request([system, Turn("user", "something else")]))
    position = decode(facts.ids.tolist()).index("29") + 1
    reason = explain(recent, facts, 128, position)
    assert (reason.kind, reason.position) == ("system changed", position)
    expected = f'reused 128 of {len(facts.ids)}: system changed at token {position} (…"2026-11-28."… / …"2026-11-29."…)'
    assert reason.note() == expected


def test_another_tool_set(recent: RecentPrompts):
    recent.remember(render(request(CHAT, tools=["ls", "rm"])))
    reason = explain(recent, render(request(CHAT, tools=["ls", "cp", "rm"])), 0, 12)
    assert reason.kind == "tools changed"
    assert reason.note(words=False).endswith(f"tools changed at token {reason.position}")
    same_order = request(CHAT, tools=["rm", "ls"])
    facts = render(request(CHAT, tools=["ls", "rm"]))
    assert facts.tools == render(same_order).tools


def test_another_system_prompt_of_a_stranger_is_new(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    stranger = request([Turn("system", "Du bist ein Übersetzer. " * 30), Turn("user", "Hallo")], label="chat")
    assert explain(recent, render(stranger), 0).kind == "new"


def test_a_new_conversation_reuses_the_shared_system_prompt(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    facts = render(request([SYSTEM, Turn("user", "write a poem")]))
    reason = explain(recent, facts, facts.system_end)
    assert reason.note() == f"reused {facts.system_end} of {len(facts.ids)}: new"
    assert explain(recent, facts, 0, 0).kind == "evicted"


def test_an_edited_first_user_turn_is_told_from_a_new_conversation(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    facts = render(request(changed(1, Turn("user", USER.text + " <reminder>"))))
    reason = explain(recent, facts, facts.system_end)
    assert (reason.kind, reason.message) == ("edited", 2)


def test_reasoning_that_did_not_come_back(recent: RecentPrompts):
    thought = Turn("assistant", DONE.text, "I counted them one by one.")
    recent.remember(render(request(changed(4, thought))))
    facts = render(request([*changed(4, DONE), DONE, MORE]))
    reason = explain(recent, facts, facts.turns[4].start)
    assert (reason.kind, reason.message) == ("reasoning missing", 5)


def test_reasoning_that_was_generated_and_not_sent_back(recent: RecentPrompts):
    facts = render(request(CHAT[:4], thinking=True))
    recent.remember(facts.answered(encode("I counted.))" + DONE.text + "\n"), DONE.text, (), "I counted."))
    again = render(request(CHAT, thinking=True))
    assert explain(recent, again, facts.head).kind == "reasoning missing"
    restored = render(request(CHAT, thinking=True), restored={4: "I counted."})
    whole = facts.answered(encode("I counted.))" + DONE.text + "\n"), DONE.text, (), "I counted.")
    assert explain(recent, restored, len(whole.ids)).kind == "reused"


def test_edited_reasoning_is_an_edit(recent: RecentPrompts):
    recent.remember(render(request(changed(4, Turn("assistant", DONE.text, "I counted them.")))))
    facts = render(request(changed(4, Turn("assistant", DONE.text, "I guessed them."))))
    assert explain(recent, facts, facts.turns[4].start).kind == "edited"


def test_other_options(recent: RecentPrompts):
    facts = render(request(CHAT[:4], thinking=False))
    recent.remember(facts.answered(encode(DONE.text + "\n"), DONE.text, ()))
    # The empty block that the generation prompt had is not in the history of a thinking request.
    again = render(request(CHAT, thinking=True))
    reason = explain(recent, again, facts.head)
    assert (reason.kind, reason.message) == ("options differ", 5)
    # Asking for the same answer in another mode loses nothing.
    retry = render(request(CHAT[:4], thinking=True))
    assert explain(recent, retry, facts.head).kind == "reused"


def test_hidden_tools_are_an_option():
    asked = request(CHAT, tools=["ls"])
    hidden = Request("r", asked.turns, asked.tools, ToolChoice("none"))
    assert render(asked).options != render(hidden).options


def test_the_conversation_with_the_same_turns_is_the_nearest(recent: RecentPrompts):
    recent.remember(render(request(CHAT)))
    recent.remember(render(request([SYSTEM, Turn("user", "poem please"), Turn("assistant", "roses"), Turn("user", "more")])))
    facts = render(request(changed(1, Turn("user", "please list the files in the folder"))))
    reason = explain(recent, facts, facts.system_end)
    assert reason.kind == "edited"
    assert reason.before == "count"


def test_memory_is_bounded():
    recent = RecentPrompts(RULE, divisible=True, budget_bytes=40_000, most=5)
    for number in range(20):
        recent.remember(render(request([Turn("user", f"{number} says hello")])))
        assert len(recent) <= 5
    for number in range(20):
        recent.remember(render(request([SYSTEM, Turn("user", f"{number} " * 800)])))
        assert recent.bytes <= 40_000
    assert len(recent) >= 1
    recent.remember(render(request([Turn("user", "long " * 10_000)])))
    assert recent.bytes <= 40_000


def test_a_divisible_model_resumes_on_its_grid():
    recent = RecentPrompts(RULE, divisible=True)
    facts = render(request(CHAT))
    recent.remember(facts)
    total = len(facts.ids)
    assert explain(recent, facts, total - RULE.step, total).kind == "reused"
    assert explain(recent, facts, total - 3 * RULE.step, total).kind == "evicted"


def test_notes_are_one_line():
    reason = Reason("edited", 1, 2, 1, 3, 'a"\n', "\u2028b")
    assert reason.note() == 'reused 1 of 2: edited in turn 3 (…"a\\"\\n"… / …"\u2028b"…)'.replace("\u2028", "\\u2028")
    assert len(reason.note().splitlines()) == 1
    assert reason.as_json()["note"] == reason.note()


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ("the year 2026-11-28 ends", "the year 2026-11-29 ends", ("2026-11-28", "2026-11-29")),
        ("one two three", "one six three", ("two", "six")),
        ("one file", "one files here", ("file", "files")),
        ("count them", "count", ("count them", "count")),
        ("one\ntwo", "one two", ("one\ntwo", "one two")),
        ("same", "same", ("same", "same")),
        ("", "", ("", "")),
        ("x" * 200 + "a" * 100, "x" * 200 + "b", ("x" * 16 + "a" * 16, "x" * 16 + "b")),
    ],
)
def test_words_apart(one: str, two: str, words: tuple[str, str]):
    ids = encode(one), encode(two)
    at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert words_apart(*ids, at, decode) == words


def test_words_apart_look_through_other_tokens_for_the_same_text():
    pieces = {1: "11-", 2: "28", 3: "2", 4: "9", 5: " ends"}
    one, two = np.array([1, 2, 5], np.uint32), np.array([1, 3, 4, 5], np.uint32)
    assert words_apart(one, two, 1, lambda ids: "".join(pieces[i] for i in ids)) == ("11-28", "11-29")
