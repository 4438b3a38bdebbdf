"""Random walks through the grammars: whatever a grammar lets through, the parser reads as calls of valid arguments."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from pooled_mlx import chat_formats
from pooled_mlx.chat_formats.base import AnswerSpec
from pooled_mlx.chat_formats.gemma import QUOTE
from pooled_mlx.core.request import Request, Tool, ToolChoice
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import Constraint, GrammarTokenizer, build
from tests.answers import GEMMA_TAGS, GLM_TAGS, HARMONY_TAGS, LLAMA_TAGS, MISTRAL_TAGS, TAGS, parts, says, tokens, xml_call
from tests.property.test_parsers_property import naive_xml
from tests.shared_data import shared_path
from tests.written_calls import FAMILIES

_GRAMMAR_TAG = 257
"""Id of the first tag in the grammar's byte vocabulary, one behind the end token; in the stream's table it is 256."""

CAP = 300
BITS = [
    *("</parameter>", "\n</parameter>\n", "\n</function>\n", "</function>", "</tool_call>", "<parameter=", "\n<parameter="),
    *("a", "the ", "\n", " ", "x", '"', "5", "1", ".", "-", "}", "]", '", "', ": ", "true", "null", "é", "[", "{", "\\", "\\n"),
]
XML_ENDINGS = ("\n</parameter>\n</function>\n", "\n</function>\n", "\n</parameter>\n")
GLM_ENDINGS = ("</arg_value>\n</tool_call>", "</arg_value>\n<arg_key>", "</arg_value>", "</tool_call>")
ENDINGS = ('"}}\n', '"}', "}}\n", "]", '"', "}", "a", "1")
REQUIRED = ToolChoice("required")


def integers(low: int, high: int) -> dict[str, object]:
    return {"type": "integer", "minimum": low, "maximum": high}


TOOLS = [
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "days": integers(1, 14),
                "opts": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
            },
            "required": ["city"],
        },
    ),
    Tool(
        "search-db",
        parameters={
            "type": "object",
            "properties": {
                "q": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "tags": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}, "maxItems": 3},
                "f": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "s": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": {"type": "integer"}}]},
                "u": {"type": ["integer", "string"]},
                "e": {"anyOf": [{"enum": ["auto", 5]}, {"type": "boolean"}]},
            },
            "required": ["q"],
        },
    ),
    Tool("noargs"),
    Tool(
        "short",
        parameters={
            "type": "object",
            "properties": {"s": {"type": "string", "minLength": 2, "maxLength": 5}, "b": {"type": "boolean"}},
            "required": ["b", "s"],
        },
    ),
    Tool(
        "either",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
    ),
]
TEXTS = Tool(
    "texts", parameters={"type": "object", "properties": {name: {"type": "string"} for name in "abc"}, "required": ["a"]}
)


class Walk:
    """One random answer. `ids` are the stream's; `complete` tells whether the answer may end there."""

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: GrammarTokenizer,
        tags: Sequence[str],
        names: Sequence[str],
        endings: Sequence[str],
    ) -> None:
        self.constraint, self.tokenizer = constraint, tokenizer
        self.endings = [*endings, *ENDINGS]
        # the last ones first: they close, and a walk must come to an end
        self.tags = [_GRAMMAR_TAG + index for index in reversed(range(len(tags)))]
        self.quote = 256 + list(tags).index(QUOTE) if QUOTE in tags else -1
        self.names = list(tags)
        self.bits = [*BITS, *endings, *(f"\n<parameter={name}>\n" for name in names)]
        self.ids: list[int] = []
        self.mask = np.zeros(tokenizer.mask_words, dtype=np.uint32)

    def run(self, rnd: random.Random) -> bool:
        """Walk to a complete answer; False where the walk got lost."""
        while len(self.ids) < 10 * CAP:
            if self.constraint.may_end() and (self.constraint.stopped() or len(self.ids) > CAP or rnd.random() < 0.3):
                return True
            if self.ids[-1:] == [self.quote] and self._take(list(rnd.choice((b"}", b"}", b",", b"]", b"x")))):
                continue  # only there a quote ends a string
            if len(self.ids) > CAP and rnd.random() < 0.3 and any(map(self._whole, self.endings)):
                continue
            wanted = self.tags if len(self.ids) > CAP else rnd.sample(self.tags, len(self.tags))
            if rnd.random() < 0.5 and any(self._take([tag]) for tag in wanted):
                continue
            if len(self.ids) > CAP:
                if any(self._whole(ending) for ending in [*self.endings, *self.bits]):
                    continue
            elif rnd.random() < 0.85 and self._take(self._ids(rnd.choice(self.bits))):
                continue
            if not self._any(rnd):
                return self.constraint.may_end()
        return False

    def _take(self, ids: list[int]) -> bool:
        """Go on by as many of these ids as are allowed."""
        taken = 0
        for index in ids:
            if not self.constraint.allows(index):
                break
            self._consume(index)
            taken += 1
        return taken > 0

    def _whole(self, text: str) -> bool:
        ahead = self.constraint.copy()
        for index in self._ids(text):
            if not ahead.allows(index):
                return False
            ahead.consume(index)
        return self._take(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in parts(text, self.names):
            ids += [_GRAMMAR_TAG + self.names.index(part)] if part in self.names else part.encode()
        return ids

    def _any(self, rnd: random.Random) -> bool:
        self.constraint.fill_mask(self.mask)
        allowed = [int(index) for index in np.flatnonzero(np.unpackbits(self.mask.view(np.uint8), bitorder="little"))]
        usual = [index for index in allowed if 32 <= index < 127 or index == 10] or [i for i in allowed if i != 256]
        if usual:
            self._consume(rnd.choice(usual))
        return bool(usual)

    def _consume(self, index: int) -> None:
        self.constraint.consume(index)
        self.ids.append(index if index < 256 else index - 1)


def walks(chat_format: str, tools: Sequence[Tool], tags: Sequence[str], seed: int, count: int) -> Iterator[list[int]]:
    tokenizer = GrammarTokenizer.of_bytes(tags)
    request = Request("r", (), tools=tuple(tools), tool_choice=REQUIRED, max_calls=2)
    spec = AnswerSpec(request, request.callable_tools, markers=frozenset(tags))
    compiled = build(tokenizer, chat_formats.get(chat_format).grammar(spec, LarkBuilder(tokenizer.added)))
    assert spec.degraded == {}
    names = sorted(
        {name for tool in tools if isinstance(tool.parameters, dict) for name in tool.parameters.get("properties", {})}
    )
    rnd = random.Random(seed)
    for _ in range(count):
        endings = (
            GLM_ENDINGS if chat_format == "glm" else FAMILIES[chat_format].endings if chat_format in FAMILIES else XML_ENDINGS
        )
        walk = Walk(compiled.matcher(), tokenizer, tags, names, endings)
        if walk.run(rnd):
            yield walk.ids


def check(ids: list[int], chat_format: str, tools: Sequence[Tool], tags: Sequence[str]) -> int:
    """Everything is calls, and every call is valid. Returns how many there are."""
    outcome = says(ids, chat_format, tools, tags=tags, constrained=True, tool_choice=REQUIRED)
    assert 1 <= len(outcome.calls) <= 2
    assert outcome.reason == "tool_calls"
    assert outcome.text == "" or chat_format == "harmony"  # a preamble
    assert set(outcome.notes) <= ({"the turn ended inside a call"} if chat_format in _UNCLOSED else set())
    check_independently(ids, chat_format, tools, tags, outcome.calls)
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, arguments in outcome.calls:
        jsonschema.validate(arguments, schemas[name] or {"type": "object", "maxProperties": 0})
    return len(outcome.calls)


def check_independently(
    ids: list[int], chat_format: str, tools: Sequence[Tool], tags: Sequence[str], calls: list[tuple[str, Any]]
) -> None:
    """The same calls, read without our reader: by a JSON decoder, or by the naive reading of the rule for XML."""
    if chat_format not in ("hermes", "qwen3_coder") or not tags:
        return
    marked = [tags[index - 256].encode() if index > 255 else bytes([index]) for index in ids]
    bodies = [[]]
    for piece in marked:
        if piece == b"</tool_call>":
            bodies.append([])
        else:
            bodies[-1].append(piece)
    texts = [b"".join(body).decode().strip().removeprefix("<tool_call>").strip() for body in bodies if b"".join(body).strip()]
    assert len(texts) == len(calls)
    for text, (name, arguments) in zip(texts, calls, strict=True):
        if chat_format == "hermes":
            assert json.loads(text) == {"name": name, "arguments": arguments}
            continue
        head, _, body = text.partition(">\n" if ">\n" in text else ">")
        parameters = next(tool.parameters for tool in tools if tool.name == name) or {}
        assert isinstance(parameters, dict)
        read = naive_xml(body + "\n", list(parameters.get("properties", {})))
        assert head == f"<function={name}"
        assert read is not None
        assert list(read) == list(arguments)
        assert all(value == read[key] or value == json.loads(read[key]) for key, value in arguments.items())


WALKS = int(os.environ.get("POOLED_WALKS", "60"))
"""Walks for each format; more find more."""

_UNCLOSED = ("harmony", "mistral", "llama3")
CASES = [
    ("qwen3_coder", TAGS),
    ("hermes", TAGS),
    ("hermes", ()),
    ("qwen3_coder", ()),
    ("glm", GLM_TAGS),
    ("glm", ()),
    ("mistral", MISTRAL_TAGS),
    ("mistral", MISTRAL_TAGS[:3]),
    ("llama3", LLAMA_TAGS),
    ("gemma", GEMMA_TAGS),
    ("harmony", HARMONY_TAGS),
    *((name, family.tags) for name, family in FAMILIES.items()),
    *((name, ()) for name in FAMILIES),
    ("pythonic", TAGS[:2]),
]


@pytest.mark.parametrize(("chat_format", "tags"), CASES)
def test_every_finished_walk_is_valid_calls(chat_format: str, tags: tuple[str, ...]) -> None:
    counts = [check(ids, chat_format, TOOLS, tags) for ids in walks(chat_format, TOOLS, tags, 3, WALKS)]
    assert len(counts) > WALKS / 2


def test_grammar_and_parser_agree_where_a_raw_value_ends() -> None:
    seen = 0
    for ids in walks("qwen3_coder", [TEXTS], TAGS, 5, 80):
        outcome = says(ids, "qwen3_coder", [TEXTS], constrained=True)
        text = "".join(TAGS[index - 256] if index > 255 else chr(index) for index in ids).encode("latin-1").decode()
        for arguments, call in zip(
            [a for _, a in outcome.calls], text.split("<tool_call>\n<function=texts>\n")[1:], strict=True
        ):
            want = naive_xml(call.rstrip("\n").removesuffix("</tool_call>"))
            assert arguments == want
            seen += any("</parameter>" in value for value in arguments.values())
    assert seen > 20


@pytest.mark.parametrize("name", ["claude.jsonl", "cline.jsonl", "codex-tui.jsonl", "opencode.jsonl", "qwen.jsonl"])
@pytest.mark.parametrize(("chat_format", "tags"), [CASES[0], CASES[1], CASES[4], CASES[9]])
def test_agents_real_tool_sets(name: str, chat_format: str, tags: tuple[str, ...]) -> None:
    tools: list[Tool] = []
    for line in shared_path(f"traces/{name}").read_text(encoding="utf-8").splitlines():
        body = json.loads(line).get("body")
        for listed in (body.get("tools") or []) if isinstance(body, dict) else []:
            function = listed.get("function", listed)
            schema = function.get("parameters", function.get("input_schema"))
            if isinstance(schema, dict) and function["name"] not in [tool.name for tool in tools]:
                tools.append(Tool(function["name"], parameters=schema))
    counts = [check(ids, chat_format, tools, tags) for ids in walks(chat_format, tools, tags, 11, 6)] if tools else [1]
    assert len(counts) > 0


def test_a_value_with_thousands_of_closing_tags_stays_within_the_parsers_limits() -> None:
    content = "x</parameter> y\n</parameter>\n</function>\n z <parameter=a>\n" * 600
    said = f"<tool_call>\n<function=texts>\n<parameter=a>\n{content}\n</parameter>\n</function>\n</tool_call>"
    tokenizer = GrammarTokenizer.of_bytes(TAGS)
    request = Request("r", (), tools=(TEXTS,))
    spec = AnswerSpec(request, (TEXTS,), markers=frozenset(TAGS))
    grammar = build(tokenizer, chat_formats.get("qwen3_coder").grammar(spec, LarkBuilder(tokenizer.added))).matcher()
    head, body, tail = "<tool_call>", said[len("<tool_call>") : -len("</tool_call>")], "</tool_call>"
    grammar.consume(_GRAMMAR_TAG + TAGS.index(head))
    for byte in body.encode():
        grammar.consume(byte)
    grammar.consume(_GRAMMAR_TAG + TAGS.index(tail))
    assert grammar.may_end()
    assert says(said, "qwen3_coder", (TEXTS,), constrained=True).calls == [("texts", {"a": content})]


EXAMPLE = "see:\n<tool_call>\n<function=g>\n<parameter=p>\nv\n</parameter>\n</function>\n{}\nand go on"


@pytest.mark.parametrize(
    "content",
    [EXAMPLE, EXAMPLE + "\n" + EXAMPLE, "<tool_call>\n<function=g>\n</function>\n{} x", "<tool_call> {} <tool_call> {}"],
)
def test_an_example_that_ends_with_a_real_tag_stays_in_its_file(content: str) -> None:
    """The opening tag is spelled, the closing one a token: the file goes on behind it, under the grammar too."""
    close = 256 + TAGS.index("</tool_call>")
    file: list[int] = []
    for number, part in enumerate(content.split("{}")):
        file += [*([close] if number else []), *part.encode()]
    head = "\n<function=texts>\n<parameter=a>\n"
    ids = [256 + TAGS.index("<tool_call>"), *head.encode(), *file, *b"\n</parameter>\n</function>\n", close]
    want = [("texts", {"a": content.replace("{}", "</tool_call>")})]
    assert says(ids, "qwen3_coder", (TEXTS,), constrained=True).calls == want
    grammar = _texts_grammar("qwen3_coder")
    for index in ids:
        grammar.consume(index if index < 256 else index + 1)
    assert grammar.may_end()


def _texts_grammar(name: str, tags: tuple[str, ...] = TAGS) -> Constraint:
    tokenizer = GrammarTokenizer.of_bytes(tags)
    request = Request("r", (), tools=(TEXTS,), tool_choice=REQUIRED)
    spec = AnswerSpec(request, request.callable_tools, False, False, None, frozenset(tags))
    return build(tokenizer, chat_formats.get(name).grammar(spec, LarkBuilder(tokenizer.added))).matcher()


def test_an_opening_tag_that_is_only_mentioned_does_not_hold_the_call_open() -> None:
    said = "<tool_call>\n<function=texts>\n<parameter=a>\nuse {} to open\n</parameter>\n</function>\n</tool_call>"
    ids = [256 + TAGS.index("<tool_call>"), *said[len("<tool_call>") : -len("</tool_call>")].encode()]
    spelled = list(b"<tool_call>")
    at = ids.index(ord("{"))
    ids[at : at + 2] = spelled
    ids.append(256 + TAGS.index("</tool_call>"))
    assert says(ids, "qwen3_coder", (TEXTS,), constrained=True).calls == [("texts", {"a": "use <tool_call> to open"})]
    grammar = _texts_grammar("qwen3_coder")
    for index in ids:
        grammar.consume(index if index < 256 else index + 1)
    assert grammar.may_end()
    two = [*ids, ord("\n"), *ids]
    assert len(says(two, "qwen3_coder", (TEXTS,), constrained=True).calls) == 2


@pytest.mark.parametrize(("chat_format", "tags"), [("qwen3_coder", TAGS), ("glm", GLM_TAGS), ("glm", TAGS)])
@pytest.mark.parametrize("content", ["use <tool_call> to open", "<tool_call>", "<tool_call>\n</parameter> x </arg_value>\n z"])
def test_a_mention_of_the_opening_tag_leaves_the_grammar_as_it_is(
    chat_format: str, tags: tuple[str, ...], content: str
) -> None:
    for here in ({"a": "HERE", "b": "2"}, {"b": "1", "a": "HERE"}):
        if chat_format == "glm":
            pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in here.items())
            frame = f"<tool_call>texts\n{pairs}</tool_call>"
        else:
            frame = xml_call("texts", **here)
        before, after = frame.split("HERE")
        ids = [*tokens(before, tags), *content.encode(), *tokens(after, tags)]
        grammar = _texts_grammar(chat_format, tags)
        for index in ids:
            grammar.consume(index if index < 256 else index + 1)
        assert grammar.may_end()
        assert says(ids, chat_format, (TEXTS,), tags=tags, constrained=True).calls == [("texts", {**here, "a": content})]


@pytest.mark.parametrize("tags", [GLM_TAGS, TAGS])
@pytest.mark.parametrize(
    "content",
    [
        "see <tool_call>g\n<arg_key>k</arg_key>\n<arg_value>v{}\n{CALL}\nand go on",
        "a {} b{}{} c",
        "x <tool_call>{CALL} x <tool_call>{CALL}",
    ],
)
def test_glm_tags_that_are_content_stay_in_their_value(content: str, tags: tuple[str, ...]) -> None:
    """`{}` is a closing tag of a value, `{CALL}` one of a call, each the token where the model has one."""
    ids: list[int] = []
    frame = ["<tool_call>texts\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"]
    pieces = [*_parts(frame[0], tags, 0), *_parts(content, tags, 1), *_parts(frame[1], tags, 0)]
    for piece in pieces:
        ids += [256 + tags.index(piece)] if piece in tags else list(piece.encode())
    value = content.replace("{CALL}", "</tool_call>").replace("{}", "</arg_value>")
    assert says(ids, "glm", (TEXTS,), tags=tags, constrained=True).calls == [("texts", {"a": value})]
    if "{CALL} x" not in content:  # without a grammar a closing tag of the call may stand for all that is missing
        assert says(ids, "glm", (TEXTS,), tags=tags).calls == [("texts", {"a": value})]
    tokenizer = GrammarTokenizer.of_bytes(tags)
    request = Request("r", (), tools=(TEXTS,), tool_choice=REQUIRED)
    spec = AnswerSpec(request, request.callable_tools, False, False, None, frozenset(tags))
    grammar = build(tokenizer, chat_formats.get("glm").grammar(spec, LarkBuilder(tokenizer.added))).matcher()
    for index in ids:
        grammar.consume(index if index < 256 else index + 1)
    assert grammar.may_end()


def _parts(text: str, tags: tuple[str, ...], content: int) -> list[str]:
    """`text` cut at its tags: all that stand in a frame; in content only those written as placeholders."""
    marks = {"{CALL}": "</tool_call>", "{}": "</arg_value>"} if content else {tag: tag for tag in GLM_TAGS}
    pattern = re.compile("|".join(sorted(map(re.escape, marks), key=len, reverse=True)))
    found: list[str] = []
    at = 0
    for match in pattern.finditer(text):
        found += [text[at : match.start()], marks[match.group()]]
        at = match.end()
    return [piece for piece in [*found, text[at:]] if piece]
