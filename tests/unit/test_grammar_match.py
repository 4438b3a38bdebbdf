"""Compiling grammars and following answers under them."""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pooled_mlx import chat_formats
from pooled_mlx.core.request import Request, ResponseFormat, Turn
from pooled_mlx.grammar.answer import answer_grammar
from pooled_mlx.grammar.match import (
    WORN_TOKENS,
    Compiler,
    Constraint,
    GrammarFailed,
    GrammarRefused,
    GrammarTokenizer,
    build,
    check_grammar,
    first_line,
)
from pooled_mlx.grammar.memo import Memo
from pooled_mlx.grammar.schema import lower
from tests.small_tokenizer import byte_level

TAGS = ("<tool_call>", "</tool_call>")
TOKENIZER = GrammarTokenizer.of_bytes(TAGS)
(EOS,) = TOKENIZER.eos_ids
OPEN, CLOSE = (TOKENIZER.added[tag] for tag in TAGS)
HEAD = "%llguidance {}\n"


def constraint(body: str) -> Constraint:
    return build(TOKENIZER, f"{HEAD}start: {body}\nTEXT: /(?s:.*)/\n").matcher()


def feed(held: Constraint, text: str | bytes) -> Constraint:
    for token in text.encode() if isinstance(text, str) else text:
        held.consume(token)
    return held


def allowed(held: Constraint) -> set[int]:
    mask = np.zeros(TOKENIZER.mask_words, dtype=np.uint32)
    held.fill_mask(mask)
    return {token for token in range(TOKENIZER.n_vocab) if mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1)}


def test_the_byte_tokenizer_has_bytes_an_end_and_tags() -> None:
    assert TOKENIZER.n_vocab == 259
    assert (EOS, OPEN, CLOSE) == (256, 257, 258)
    assert TOKENIZER.mask_words == 9


def test_an_end_token_outside_the_logits_is_an_error() -> None:
    with pytest.raises(ValueError, match="outside the 10 logits"):
        GrammarTokenizer("{}", n_vocab=10, eos_ids=[10])


def test_mask_and_allows_agree_and_nothing_is_consumed() -> None:
    held = feed(constraint('"a" /[bc]/ TEXT'), "a")
    assert allowed(held) == {ord("b"), ord("c")}
    assert [held.allows(token) for token in (ord("b"), ord("c"), ord("a"), OPEN, EOS)] == [True, True, False, False, False]
    assert allowed(held) == {ord("b"), ord("c")}


def test_tags_are_never_text() -> None:
    held = feed(constraint("TEXT"), "x")
    assert not held.allows(OPEN)
    assert allowed(held) >= {*range(128), EOS}
    assert not allowed(held) & {OPEN, CLOSE}


def test_a_special_token_by_its_id() -> None:
    held = feed(constraint(f'TEXT <[{OPEN}]> "a"'), "hi")
    assert held.allows(OPEN)
    held.consume(OPEN)
    assert held.forced() == [ord("a")]


def test_forced_tokens_hold_no_end_token() -> None:
    held = constraint('"abc"')
    assert held.forced() == list(b"abc")
    feed(held, "abc")
    assert held.forced() == []


@pytest.mark.parametrize("body", ['"abc"', '"abc" TEXT', '"ab" ("c" | "cd")'])
def test_the_end_token_is_allowed_exactly_where_the_answer_is_complete(body: str) -> None:
    held = constraint(body)
    for token in b"abc":
        assert not held.may_end()
        assert not held.allows(EOS)
        held.consume(token)
    assert held.may_end()
    assert held.allows(EOS)
    assert EOS in allowed(held)


def test_after_the_end_only_the_end() -> None:
    held = feed(constraint('"a"'), "a")
    assert held.stopped()
    assert allowed(held) == {EOS}
    held.consume(EOS)
    assert held.stopped()
    assert not held.allows(ord("a"))
    assert allowed(held) == {EOS}
    with pytest.raises(GrammarFailed, match="after the end"):
        held.consume(ord("a"))


def test_an_open_end_is_not_stopped() -> None:
    held = feed(constraint("TEXT"), "a")
    assert held.may_end()
    assert not held.stopped()
    held.consume(EOS)
    assert held.stopped()


def test_rollback_over_the_end_token() -> None:
    held = feed(constraint('"a" /[bc]/'), "ab")
    held.consume(EOS)
    held.rollback(2)
    assert allowed(held) == {ord("b"), ord("c")}
    feed(held, "c")
    assert held.may_end()


def test_rollback_of_more_than_was_consumed_fails() -> None:
    with pytest.raises(GrammarFailed):
        feed(constraint('"ab"'), "a").rollback(2)


def test_a_refused_token_kills_the_constraint_for_good() -> None:
    held = constraint('"a"')
    with pytest.raises(GrammarFailed):
        held.consume(ord("x"))
    for ask in (held.may_end, held.stopped, held.forced, lambda: held.allows(ord("a")), lambda: allowed(held)):
        with pytest.raises(GrammarFailed):
            ask()


def test_an_early_end_token_is_refused_without_harm() -> None:
    held = constraint('"a"')
    with pytest.raises(GrammarFailed, match="before the answer is complete"):
        held.consume(EOS)
    assert feed(held, "a").may_end()


def test_the_mask_array_is_checked() -> None:
    held = constraint("TEXT")
    for wrong in (np.zeros(8, dtype=np.uint32), np.zeros(9, dtype=np.int32), np.zeros((1, 9), dtype=np.uint32)):
        with pytest.raises(ValueError, match=r"uint32\[9\]"):
            held.fill_mask(wrong)


def test_copies_and_matchers_are_independent() -> None:
    grammar = build(TOKENIZER, HEAD + 'start: "ab" | "ac"\n')
    one = feed(grammar.matcher(), "a")
    other = one.copy()
    feed(one, "b")
    assert allowed(other) == {ord("b"), ord("c")}
    assert grammar.matcher().allows(ord("a"))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: (", ""),
        ("start: missing\n", "missing"),
        ('start: %json {"type": "objekt"}\n', "objekt"),
        ('start: %json {"$ref": "#"}\n', "nothing can be written"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        build(TOKENIZER, HEAD + grammar)
    assert "\n" not in refusal.value.reason
    assert reason in refusal.value.reason.lower() or not reason
    assert check_grammar(HEAD + grammar)


def test_first_line_keeps_the_reason_of_a_regex_error() -> None:
    text = "at 2(8): failed to compile JSON schema: regex parse error:\n    (\n    ^\nerror: unclosed group\n   1 | x"
    assert first_line(text) == "regex parse error: unclosed group"


def test_compiled_grammars_are_remembered_by_their_text() -> None:
    compiler = Compiler(TOKENIZER)
    one = compiler.compile(HEAD + 'start: "a"\n')
    assert compiler.compile(HEAD + 'start: "a"\n') is one
    assert compiler.compile(HEAD + 'start: "b"\n') is not one


def test_a_refusal_leaves_the_compiler_working() -> None:
    compiler = Compiler(TOKENIZER)
    for _ in range(3):
        with pytest.raises(GrammarRefused):
            compiler.compile(HEAD + "start: nothing\n")
    assert compiler.compile(HEAD + 'start: "a"\n').matcher().allows(ord("a"))


def test_a_grammar_over_the_byte_cap_is_refused_unread() -> None:
    with pytest.raises(GrammarRefused, match=r"limit 8388608"):
        Compiler(TOKENIZER).compile("x" * (8 * 2**20 + 1))


def test_grammars_that_never_finish_are_left_behind_and_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    real = build

    def slow(tokenizer: GrammarTokenizer, text: str) -> object:
        if "never" in text:
            stuck.wait()
        return real(tokenizer, text)

    monkeypatch.setattr("pooled_mlx.grammar.match.build", slow)
    compiler = Compiler(TOKENIZER, deadline_seconds=0.05)
    patient = Compiler(TOKENIZER)
    try:
        for number in range(4):
            with pytest.raises(GrammarRefused, match=r"longer than 0\.05 seconds"):
                compiler.compile(f'{HEAD}start: "never{number}"\n')
        with pytest.raises(GrammarRefused, match="4 earlier grammars are still compiling"):
            compiler.compile(HEAD + 'start: "fine"\n')
        assert patient.compile(HEAD + 'start: "fine"\n').matcher().forced() == list(b"fine")
    finally:
        stuck.set()


def test_memo_forgets_the_least_recently_used() -> None:
    memo = Memo(2, 100)
    memo.put(b"a", 1, 1)
    memo.put(b"b", 2, 1)
    assert memo.get(b"a") == 1
    memo.put(b"c", 3, 1)
    assert [memo.get(key) for key in (b"a", b"b", b"c")] == [1, None, 3]


def test_memo_is_bounded_by_weight_and_keeps_the_last() -> None:
    memo = Memo(10, 100)
    memo.put(b"a", 1, 60)
    memo.put(b"b", 2, 60)
    assert memo.get(b"a") is None
    memo.put(b"c", 3, 500)
    assert memo.get(b"b") is None
    assert memo.get(b"c") == 3


def test_memo_keeps_what_it_has() -> None:
    memo = Memo(2, 100)
    memo.put(b"a", 1, 1)
    memo.put(b"a", 2, 1)
    assert memo.get(b"a") == 1


def test_memo_knows_an_object_again_and_only_that_one() -> None:
    memo = Memo(2, 100)
    asked: list[object] = []

    def digest(thing: object) -> bytes:
        asked.append(thing)
        return str(thing).encode()

    one, equal = [1, 2], [1, 2]
    assert [memo.digest_of(thing, digest) for thing in (one, one, equal, one)] == [b"[1, 2]"] * 4
    assert asked == [one, equal]
    for other in ("x", "y"):
        memo.digest_of(other, digest)
    memo.digest_of(one, digest)
    assert len(asked) == 5


# --- one answer does nothing to the next one


def follow(compiler: Compiler, grammar: str, text: str, every: int = 1) -> None:
    """Write `text` under `grammar`, with a mask before every so many tokens."""
    held = compiler.compile(grammar).matcher()
    mask = np.zeros(compiler.tokenizer.mask_words, dtype=np.uint32)
    for place, token in enumerate(words_of(text)):
        if place % every == 0:
            held.fill_mask(mask)
        held.consume(token)
    assert held.may_end()


@functools.cache
def word_tokenizer() -> tuple[GrammarTokenizer, Tokenizer]:
    tokenizer = byte_level()
    text = tokenizer.to_str()
    return GrammarTokenizer(text, n_vocab=tokenizer.get_vocab_size(), eos_ids=[tokenizer.token_to_id("<|im_end|>")]), tokenizer


def words_of(text: str) -> list[int]:
    return word_tokenizer()[1].encode(text).ids


PROSE = "the user asks and the assistant answers with a tool call or a text; one two three four five six seven - ".replace(
    "-", "42"
)
LONG = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20_000}}, "required": ["a"]}
THREE = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": most} for name, most in (("a", 4000), ("b", 5000), ("c", 8000))},
    "required": ["a", "b", "c"],
}
COUNTED = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}


@pytest.mark.parametrize(
    ("schema", "answers"),
    [
        (LONG, [{"a": (PROSE * 400)[shift : shift + 20_000]} for shift in range(3)]),
        (
            THREE,
            [
                {name: (PROSE * 99)[shift : shift + most] for name, most in (("a", 4000), ("b", 5000), ("c", 8000))}
                for shift in (0, 1)
            ],
        ),
        (COUNTED, [" ".join((PROSE * 9).split()[shift : shift + 50]) for shift in range(12)]),
    ],
    ids=["long", "three", "counted"],
)
def test_long_answers_one_after_the_other_under_one_schema(schema: dict[str, Any], answers: list[Any]) -> None:
    compiler = Compiler(word_tokenizer()[0])
    grammar = f"{HEAD}start: %json {json.dumps(lower(schema, strict=True).schema)}\n"
    for answer in answers:
        follow(compiler, grammar, json.dumps(answer))


def test_a_grammar_that_failed_is_built_afresh() -> None:
    compiler = Compiler(TOKENIZER)
    text = f'{HEAD}start: "a" /[bc]/\n'
    compiled = compiler.compile(text)
    with pytest.raises(GrammarFailed):
        feed(compiled.matcher(), "x")
    assert compiled.is_worn
    assert compiler.compile(text) is compiled
    assert not compiled.is_worn
    feed(compiled.matcher(), "ab")


def test_a_worn_grammar_gets_a_new_lexer_and_running_answers_keep_theirs() -> None:
    compiler = Compiler(TOKENIZER)
    text = f"{HEAD}start: TEXT\nTEXT: /(?s:.*)/\n"
    compiled = compiler.compile(text)
    running = feed(compiled.matcher(), "x" * 10)
    feed(compiled.matcher(), "y" * WORN_TOKENS)
    assert compiled.is_worn
    compiler.compile(text)
    assert not compiled.is_worn
    feed(running, "z" * 10)
    assert running.may_end()


def test_a_request_that_is_known_by_heart_gets_a_fresh_grammar_too() -> None:
    compiler = Compiler(TOKENIZER)
    request = Request("r", (Turn("user", "hi"),), response_format=ResponseFormat("json_object"))
    compiled = answer_grammar(request, chat_formats.get("hermes"), compiler).compiled
    assert compiled is not None
    with pytest.raises(GrammarFailed):
        feed(compiled.matcher(), "x")
    again = answer_grammar(request, chat_formats.get("hermes"), compiler).compiled
    assert again is compiled
    assert not again.is_worn


@pytest.mark.parametrize("nested", [False, True])
def test_an_object_of_many_optional_properties_is_held_to_its_end(nested: bool) -> None:
    several: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    schema = {"type": "array", "items": several} if nested else several
    value = {f"p{i}": i for i in (3, 4, 600)}
    compiler = Compiler(TOKENIZER)
    held = compiler.compile(f"{HEAD}start: %json {json.dumps(schema)}\n").matcher()
    for token in json.dumps([value] if nested else value).encode():
        assert token in allowed(held)
        held.consume(token)
    assert held.may_end()
