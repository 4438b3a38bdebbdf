"""Any split of the same bytes into tokens gives the same events; streamed and whole are one fold."""

from __future__ import annotations

import re
from collections.abc import Callable

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pooled_mlx.core.answer import fold
from pooled_mlx.core.events import Finished, Usage
from pooled_mlx.core.request import Tool
from tests.answers import (
    GEMMA_TAGS,
    GLM_TAGS,
    HARMONY_TAGS,
    LLAMA_TAGS,
    MISTRAL_TAGS,
    PATCH,
    TAGS,
    Outcome,
    PieceTable,
    decoded,
    parts,
    says,
)
from tests.written_calls import FAMILIES

TYPED = Tool(
    "f",
    parameters={
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "string"},
            "n": {"type": "integer"},
            "l": {"type": "array"},
            "u": {"type": ["integer", "string", "array", "null"]},
        },
    },
)
TOOLS = (TYPED, PATCH, Tool("any"))
XML = [
    *("<tool_call>\n<function=f>\n<parameter=a>\n", "<function=f>", "<function=apply_patch>\n", "<function=zz>"),
    *(f"<parameter={name}>" for name in ("a", "b", "n", "l", "u", "input", "zz")),
    *("</parameter>", "\n</parameter>\n", "</function>", "</function>\n</tool_call>", "</parameter1>", "</parameterfunction>"),
    *("\n", " ", "x", "```", "5", "007", "[1,", '"a"]', "null", "{", "}", "é🙂", "\r\n", "<", "</"),
]
JSON = [
    *('<tool_call>{"name": "f", "arguments": {', '{"name": "f", ', '{"name": "apply_patch", "arguments": ', '"arguments": {'),
    *('"a": "x', '"input": "', '"', "\\", "\\n", "\\u00", "e9", "\\ud83d", "\\ude00", "{", "}", "}}", "[", "]", ",", ":"),
    *("1", "tru", "true", " ", "\n", "'", "x", "é🙂", '{"name": "zz"}', "\\d"),
]
GLM = [
    *(
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
        "f",
        "apply_patch\n",
        "zz",
        "a",
        "n",
        "input",
        "5",
        "\n",
        " ",
        "x",
        "é🙂",
        "<",
    ),
    *("</arg_value>\n</tool_call>", "[1,", '"a"]', "null"),
]
MISTRAL = ['[TOOL_CALLS]f[ARGS]{"a": "', '[TOOL_CALLS][{"name": "f", "arguments": {', "f", "zz", "abcdefghi", "[TOOL", *JSON]
GEMMA = ['<|tool_call>call:f{a:<|"|>', "call:f{", "call:apply_patch{input:", "thought\n", "thou", "a:", *JSON]
LLAMA = ['{"name": "f", "parameters": {', *JSON]
HARMONY = [
    *("analysis", "final", "commentary", " to=functions.f", " to=functions.zz ", "assistant", "json", "<|chan"),
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "',
    *JSON,
]


def _seed(snippet: str) -> str:
    return snippet.replace("tool_call>", "seed:tool_call>")


def _minimax(snippet: str) -> str:
    named = re.sub("<(function|parameter)=(\\w+)>", r'<\1 name="\2">', snippet)
    return named.replace("function", "invoke").replace("tool_call>", "minimax:tool_call>")


def _dsml(block: str) -> Callable[[str], str]:
    def written(snippet: str) -> str:
        return re.sub("<(/?)(?=\\w)", r"<\1｜DSML｜", _minimax(snippet).replace("minimax:tool_call", block))

    return written


PYTHON = [
    *("[f(", "f(", "[", "](", ")]", ")", ", ", "a=", "b=", "n=5", "l=[1,", "zz(", "apply_patch(input=", "=", "==", "True"),
    *("'", "'" * 3, '"' * 3, "f(a='it's')", "f(a='", "')", *JSON),
]
FAMILY_SNIPPETS: dict[str, list[str]] = {
    "lfm2": [*PYTHON, "<|tool_call"],
    "olmo3": [*PYTHON, "</function"],
    "deepseek": ["f", "apply_patch", "zz", "function", "f\n```json\n", "```", "<｜tool▁call", *JSON],
    "deepseek_v32": [*map(_dsml("function_calls"), XML), '" string="true">', 'string="false">', "｜DSML"],
    "deepseek_v4": [*map(_dsml("tool_calls"), XML), '" string="true">', 'string="false">', "｜DSML"],
    "minimax": [*map(_minimax, XML), '" string="true">', '"'],
    "seed_oss": [*map(_seed, XML), "<seed:think", "</seed:tool"],
    "kimi": ["f", "functions.f:0", "functions.apply_patch:1", "functions.zz:2", ":", "<|tool_call", *JSON],
}
SNIPPETS = {
    "plain": (["x ", "\n"], TAGS),
    "hermes": (JSON, TAGS),
    "qwen3_coder": (XML, TAGS),
    "glm": (GLM, GLM_TAGS),
    "mistral": (MISTRAL, MISTRAL_TAGS),
    "gemma": (GEMMA, GEMMA_TAGS),
    "llama3": (LLAMA, LLAMA_TAGS),
    "harmony": (HARMONY, HARMONY_TAGS),
    "pythonic": (PYTHON, TAGS[:2]),
    **{name: (FAMILY_SNIPPETS[name], family.tags) for name, family in FAMILIES.items()},
}


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str, tuple[str, ...], dict[str, object]]:
    chat_format = draw(st.sampled_from(sorted(SNIPPETS)))
    snippets, all_tags = SNIPPETS[chat_format]
    text = "".join(draw(st.lists(st.sampled_from([*snippets, *all_tags]), max_size=30)))
    tags = draw(st.sampled_from([all_tags, all_tags[: len(all_tags) // 2], ()]))
    options: dict[str, object] = {
        "tools": draw(st.sampled_from([TOOLS, TOOLS, ()])),
        "ends": draw(st.sampled_from(["stop", "length"])),
        "constrained": draw(st.booleans()),
        "stop": draw(st.sampled_from([(), (), ("x\n", "zz"), ("f",)])),
        "parallel_tool_calls": draw(st.booleans()),
    }
    return chat_format, text, tags, options


def splits(draw: st.DrawFn, text: str, tags: tuple[str, ...], pieces: PieceTable) -> list[int]:
    """Tags stay whole; the bytes between them are cut anywhere, inside characters too."""
    ids: list[int] = []
    for part in parts(text, tags):
        if part in tags:
            ids.append(256 + tags.index(part))
            continue
        data = part.encode()
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12)))
        ids += [pieces.token(data[start:end]) for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]
    return ids


def facts(outcome: Outcome) -> tuple[object, ...]:
    return outcome.events, outcome.reason, outcome.stop, outcome.notes


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_split_gives_the_same_events(data: st.DataObject) -> None:
    chat_format, text, tags, options = data.draw(answers())
    thinking = data.draw(st.booleans())
    by_byte = says(text, chat_format, tags=tags, thinking=thinking, **options)  # type: ignore[arg-type]
    pieces = PieceTable(tags)
    for _ in range(2):
        ids = data.draw(st.composite(splits)(text, tags, pieces))
        other = says(ids, chat_format, tags=tags, table=pieces.table, thinking=thinking, **options)  # type: ignore[arg-type]
        assert facts(other) == facts(by_byte)
    whole = says(
        [256 + tags.index(part) if part in tags else pieces.token(part.encode()) for part in parts(text, tags)],
        chat_format,
        tags=tags,
        table=pieces.table,
        thinking=thinking,
        **options,  # type: ignore[arg-type]
    )
    assert facts(whole) == facts(by_byte)


@settings(max_examples=300, deadline=None)
@given(answers(), st.booleans())
def test_calls_are_valid_json_and_the_fold_is_the_answer(
    answer: tuple[str, str, tuple[str, ...], dict[str, object]], thinking: bool
) -> None:
    chat_format, text, tags, options = answer
    outcome = says(text, chat_format, tags=tags, thinking=thinking, **options)  # type: ignore[arg-type]
    for name, arguments in outcome.raw_calls:
        assert name == "apply_patch" or decoded(arguments) != arguments or arguments.startswith('"')
    folded = fold([*outcome.raw_events, Finished(outcome.reason, Usage())])
    assert (folded.text, folded.reasoning) == (outcome.text, outcome.reasoning)
    assert [(call.name, call.arguments) for call in folded.calls] == outcome.raw_calls


def bare(text: str) -> str:
    return re.sub(r"\s+|</?(?:seed:|mm:)?think>", "", text)


@settings(max_examples=300, deadline=None)
@given(answers(), st.booleans())
def test_without_calls_nothing_of_the_text_is_lost(
    answer: tuple[str, str, tuple[str, ...], dict[str, object]], thinking: bool
) -> None:
    chat_format, text, tags, options = answer
    assume(chat_format in ("plain", "hermes", "qwen3_coder", "glm", *FAMILIES))
    options = {**options, "stop": (), "ends": "stop", "tools": ()}
    outcome = says(text, chat_format, tags=tags or TAGS[:2], thinking=thinking, **options)  # type: ignore[arg-type]
    assert sorted(bare(outcome.text + outcome.reasoning)) == sorted(bare(text))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_without_tags_arrives_exactly(text: str) -> None:
    data = text.encode("utf-8", "replace")
    assert says(list(data), "hermes", tools=()).text == data.decode()
