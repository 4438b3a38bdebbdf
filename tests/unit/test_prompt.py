"""From a request to ids: turns and boundaries, on templates of several families."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.request import Thinking, Turn
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from tests.prompt_builders import FAMILIES, KEEP, READ, builder, call, marked, qwen, request, text_of, user
from tests.small_tokenizer import byte_level_tokens


def test_a_prompt_and_its_places() -> None:
    build = builder("replay", KEEP)
    prompt = build.build(
        request(
            Turn("system", "Sys."),
            user("hi"),
            Turn("assistant", "ok", tool_calls=(call('{"path": "a"}'), call('{"path": "b"}', "c2"))),
            Turn("tool", "A", tool_call_id="c1"),
            Turn("tool", "B", tool_call_id="c2"),
            Turn("assistant", "done"),
            user("more"),
            thinking=Thinking(on=True),
        )
    )
    assert marked(prompt, build.tokens) == [
        "<|im_start|>system\nSys.<|im_end|>\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\nok\n\n<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=read_file>\n<parameter=path>\nb\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>",
        "\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\ndone<|im_end|>",
        "\n<|im_start|>user\nmore<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
    ]
    assert prompt.head == prompt.boundaries[-1]
    assert prompt.system_end == prompt.boundaries[0]
    assert prompt.turns == tuple(zip((0, *prompt.boundaries[:5]), (0, 1, 2, 3, 5, 6), strict=True))
    assert prompt.opened == "<think>\n"
    assert prompt.reasoning_open
    assert prompt.ids.dtype == np.uint32
    assert not prompt.ids.flags.writeable


def test_thinking_off_closes_the_block_in_the_generation_prompt() -> None:
    prompt = builder("replay", KEEP).build(request(user("hi")))
    assert prompt.opened == "<think>\n\n</think>\n\n"
    assert not prompt.reasoning_open


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_head_and_a_boundary_for_each_turn(name: str) -> None:
    build = builder(name)
    turns = (user("one"), Turn("assistant", "two"), user("three"), Turn("assistant", "four"), user("five"))
    prompt = build.build(request(*turns))
    assert prompt.head in prompt.boundaries
    assert prompt.turns[-1][1] == 4
    starts = {start for start, _ in prompt.turns}
    assert {start for start in starts if start} <= set(prompt.boundaries)
    assert [index for _, index in prompt.turns] == [0, 1, 2, 3, 4]
    rest = build.tokens.bytes_for(prompt.ids[prompt.head :].tolist()).decode()
    assert rest.startswith(build.traits.header.rstrip())
    assert "five" not in rest
    for text in ("one", "two", "three", "four", "five"):
        assert text in text_of(prompt, build.tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_the_end_token_of_an_answer_belongs_to_the_next_turn(name: str) -> None:
    """That is where the cache of a generated answer ends: a boundary anywhere else would not meet it."""
    build = builder(name)
    prompt = build.build(request(user("one"), Turn("assistant", "two"), user("three"), Turn("assistant", "four"), user("five")))
    enders = [place + 1 for place, token in enumerate(prompt.ids.tolist()) if token in build.traits.enders]
    starts = [start for start, _ in prompt.turns]
    for answer in (1, 3):
        after = next((end for end in enders if starts[answer] < end <= starts[answer + 1]), starts[answer + 1])
        assert starts[answer + 1] == after
        assert after in prompt.boundaries


def test_where_no_token_opens_a_turn_boundaries_are_at_end_tokens() -> None:
    ended = "{{ m.role }}: {{ m.content }}{{ '</s>' if m.role == 'system' else '\\n' }}"
    source = "{% for m in messages %}" + ended + "{% endfor %}assistant: "
    build = PromptBuilder(byte_level_tokens(("</s>",), (), eos=("</s>",)), ChatTemplate(source), ModelCard("t", "T"))
    assert not build.traits.openers
    prompt = build.build(request(Turn("system", "Sys."), user("one"), Turn("assistant", "two"), user("three")))
    assert marked(prompt, build.tokens) == ["system: Sys.</s>", "user: one\nassistant: two\nuser: three\nassistant: "]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_longer_conversation_keeps_the_boundaries_of_its_beginning(name: str) -> None:
    build = builder(name)
    turns = [
        Turn("system", "Sys."),
        user("one"),
        Turn("assistant", "two"),
        user("three"),
        Turn("assistant", "four"),
        user("five"),
    ]
    short, long = build.build(request(*turns[:4])), build.build(request(*turns))
    same = next(
        (place for place, (a, b) in enumerate(zip(short.ids, long.ids, strict=False)) if a != b), min(len(short), len(long))
    )
    assert same >= short.head
    assert [b for b in short.boundaries if b <= short.head] == [b for b in long.boundaries if b <= short.head]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_one_role_and_a_missing_system_turn_are_no_problem(name: str) -> None:
    build = builder(name)
    text = text_of(
        build.build(request(user("aaa"), user("bbb"), Turn("assistant", "ccc"), Turn("assistant", "ddd"), user("eee"))),
        build.tokens,
    )
    places = [text.index(said) for said in ("aaa", "bbb", "ccc", "ddd", "eee")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", FAMILIES)
def test_after_compaction_there_may_be_no_user_turn(name: str) -> None:
    build = builder(name)
    turns = (
        Turn("system", "Sys."),
        Turn("assistant", tool_calls=(call('{"path": "a"}'),)),
        Turn("tool", "found", tool_call_id="c1"),
    )
    prompt = build.build(request(*turns, tools=(READ,)))
    text = text_of(prompt, build.tokens)
    assert "read_file" in text
    assert text.rindex("path") < text.index("found")
    assert np.array_equal(prompt.ids, build.build(request(*turns, tools=(READ,))).ids)


@pytest.mark.parametrize("turns", [(), (Turn("system", "s"),)], ids=["nothing", "system only"])
def test_nothing_to_answer_is_refused(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(ApiError, match="no user message") as refused:
        qwen().build(request(*turns))
    assert (refused.value.kind.status, refused.value.param) == (400, "messages")


def test_an_assistant_turn_last_is_refused() -> None:
    with pytest.raises(ApiError, match="last message is from the assistant") as refused:
        qwen().build(request(user("hi"), Turn("assistant", "1, 2,")))
    assert refused.value.param == "messages[1].role"


def test_what_a_template_refuses_is_a_clear_400() -> None:
    source = "{{ raise_exception('Never on a Sunday.') if 'b' in messages[0].content else messages[-1].content }}"
    build = PromptBuilder(byte_level_tokens(), ChatTemplate(source), ModelCard("t", "T"))
    with pytest.raises(ApiError, match=r"chat template refuses this conversation: Never on a Sunday\.") as refused:
        build.build(request(user("b")))
    assert refused.value.kind.status == 400


def test_only_what_is_new_is_encoded() -> None:
    build = builder("replay", KEEP)
    turns = [Turn("system", "Sys.")]
    for number in range(20):
        turns += [user(f"question {number}"), Turn("assistant", f"answer {number}")]
    build.build(request(*turns, user("last")))
    encoded: list[str] = []
    original = build.tokens._encode

    def counted(texts: list[str], inside: bool) -> list:
        encoded.extend(texts)
        return original(texts, inside)

    build.tokens._encode = counted
    prompt = build.build(request(*turns, user("last"), Turn("assistant", "new answer"), user("new question")))
    assert "new question" in text_of(prompt, build.tokens)
    assert [text.strip() for text in encoded] == ["new answer", "user\nnew question"]


def test_threads_may_build_at_once() -> None:
    build = builder("replay", KEEP)
    requests = [
        request(*[user(f"{number} <think> {place}") for place in range(number)], user("q"), tools=(READ,))
        for number in range(12)
    ]
    expected = [builder("replay", KEEP).build(one).ids.tolist() for one in requests]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert [prompt.ids.tolist() for prompt in pool.map(build.build, requests)] == expected
