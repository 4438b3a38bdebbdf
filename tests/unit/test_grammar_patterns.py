"""Regular expressions of ECMA 262 in the engine's dialect, and formats as expressions."""

from __future__ import annotations

import json

import pytest

from pooled_mlx.grammar import formats, patterns
from pooled_mlx.grammar.patterns import MAX_PATTERN_LENGTH, PatternError, length, literal, none_of, one_of, translate
from tests.shared_data import shared_path
from tests.unit.grammar_judge import TOKENIZER as BYTES
from tests.unit.grammar_judge import Judge, build

SAME = [
    # pattern, texts that match, texts that do not
    ("[0-9]", ["x1y"], ["abc", ""]),
    ("^[[a]$", ["a", "["], ["b", "[a"]),
    ("^[a&&b]$", ["a", "&", "b"], ["c"]),
    ("^[+--b]$", ["+", "-", "b"], ["_"]),
    ("^[a-]$", ["a", "-"], ["b"]),
    ("^[]a]$", [], ["]a]", "a"]),
    ("^[^]$", ["x", "\n"], ["", "xy"]),
    (r"^[\w-]+$", ["a-b_1"], ["é", ""]),
    (r"^\d$", ["7"], ["٣"]),
    (r"^\w$", ["_"], ["é"]),
    (r"^\S$", ["x"], [" ", "\ufeff", "\x1f", "\x85"]),
    (r"^\s$", [" ", "\t", "\ufeff", "\u2003"], ["x", "\x1f", "\x85"]),
    (r"^[\S]$", ["x"], ["\ufeff"]),
    ("^.$", ["x", "é", "🙂"], ["\n", "\r", "\u2028"]),
    (r"^\<b\>$", ["<b>"], ["b"]),
    (r"^a\/b\-c$", ["a/b-c"], ["a/bc"]),
    (r"^\u00e9\x41\cA\0$", ["éA\x01\0"], ["e"]),
    (r"^\ud83d\ude42$", ["🙂"], ["x"]),
    (r"^\u{1F642}$", ["🙂"], ["x"]),
    (r"^\p{L}\P{L}$", ["é1"], ["11"]),
    (r"^[\b]$", ["\x08"], ["b"]),
    ("^a{$", ["a{"], ["a"]),
    ("^{a}$", ["{a}"], ["a"]),
    ("^a{2}$", ["aa"], ["a", "aaa"]),
    ("^a{2,}$", ["aa", "aaa"], ["a"]),
    ("^a{0,2}?$", ["", "aa"], ["aaa"]),
    ("^(a|b){2,3}$", ["ab", "aba"], ["a", "abab"]),
    ("^(?:a)(?<n>b)(?P<m>c)$", ["abc"], ["ab"]),
    ("^(?i:ab)c$", ["ABc", "abc"], ["abC"]),
    ("^a$|^b$", ["a", "b"], ["ab"]),
    ("(^|,)x", ["x", ",x"], ["yx"]),
    ("", ["", "x"], []),
    ('^a"b\\\\$', ['a"b\\'], ["ab"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), SAME, ids=[row[0] for row in SAME])
def test_patterns_mean_what_ecma_says(pattern: str, good: list[str], bad: list[str]) -> None:
    if not good:
        assert "^" in translate(pattern)
        return
    judge = Judge({"type": "string", "pattern": pattern})
    assert [text for text in good if not judge.accepts(text)] == []
    assert [text for text in bad if judge.accepts(text)] == []


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "not closed"),
        (")", "never opened"),
        ("[a", "set"),
        ("*a", "nothing to repeat"),
        ("a**", "two repeats"),
        ("|*", "nothing to repeat"),
        ("a{2,1}", "out of order"),
        ("[b-a]", "out of order"),
        ("a\\", "backslash"),
        (r"\q", "escape"),
        (r"\u12", "hex"),
        (r"\ud800", "no character"),
        (r"\p", "property"),
        ("(?>a)", "unknown group"),
    ],
)
def test_what_is_no_expression_is_broken(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why) as error:
        translate(pattern)
    assert error.value.broken


@pytest.mark.parametrize("pattern", ["(?=x)", "(?!x)a", "(?<=x)*", "(?<!x)", r"(a)\1", r"(?<n>a)\k<n>", r"a\b", r"\Ba"])
def test_what_no_grammar_can_hold(pattern: str) -> None:
    with pytest.raises(PatternError, match="not supported") as error:
        translate(pattern)
    assert not error.value.broken
    assert not error.value.over_limit


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        ("(" * 60_000, f"limit {MAX_PATTERN_LENGTH}"),
        ("[" * 60_000, f"limit {MAX_PATTERN_LENGTH}"),
        ("(a{0,500}){0,500}(b{0,500}){0,500}", "limit 100000"),
        ("^(a{1,1000}){1,1000}$", "limit 100000"),
        ("((a{50}){50}){50}", "limit 100000"),
        ("a{1,999999}", "limit 100000"),
    ],
)
def test_patterns_over_a_cap(pattern: str, limit: str) -> None:
    with pytest.raises(PatternError, match=limit) as error:
        translate(pattern)
    assert error.value.over_limit


def test_repeats_side_by_side_do_not_multiply() -> None:
    assert translate("a{1,60000}b{1,60000}(c{1,300}){1,300}")


@pytest.mark.parametrize("text", ["", "abc", 'a"b\\c', "a.b*c[d]{e}(f)|^$", "é日本🙂", "\n\t\x00", "-]&~"])
def test_literals_and_their_complement(text: str) -> None:
    for candidate in ("", "x", text, text + "x", text[:-1], "abc", text.upper()):
        listed = [text, "abd"]
        assert Judge({"type": "string", "pattern": "x|y"}).accepts("x")
        inside, outside = _matches(one_of(listed), candidate), _matches(none_of(listed), candidate)
        assert inside == (candidate in listed)
        assert outside == (candidate not in listed)


def _matches(expression: str, text: str) -> bool:
    schema = json.dumps({"type": "string", "pattern": expression})
    held = build(BYTES, f"%llguidance {{}}\nstart: %json {schema}\n").matcher()
    for byte in json.dumps(text, ensure_ascii=False).encode():
        if not held.allows(byte):
            return False
        held.consume(byte)
    return held.may_end()


def test_lengths_count_characters() -> None:
    assert [_matches(length(2, 3), text) for text in ("é", "é🙂", "日本x", "abcd")] == [False, True, True, False]
    assert [_matches(length(1, None), text) for text in ("", "a", "a" * 50)] == [False, True, True]


def test_a_literal_stands_for_itself_inside_a_set() -> None:
    assert _matches(f"^[{literal('-]^&')}]$", "]")
    assert not _matches(f"^[{literal('-]^&')}]$", "x")


@pytest.mark.parametrize("name", sorted({*formats.NATIVE, *formats.PATTERNS}))
def test_no_format_accepts_what_its_rfc_refuses(name: str) -> None:
    (groups,) = [json.loads(shared_path(f"json-schema-test-suite/tests/draft2020-12/optional/format/{name}.json").read_text())]
    judge = Judge({"type": "string", "format": name})
    cases = [test for group in groups for test in group["tests"] if isinstance(test["data"], str)]
    assert [case["data"] for case in cases if not case["valid"] and judge.accepts(case["data"])] == []
    good = [case["data"] for case in cases if case["valid"]]
    assert sum(judge.accepts(text) for text in good) >= len(good) / 3


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01", "0000-01-01"]),
        ("time", ["23:59:60Z", "10:00:00+01:00"], ["22:59:60Z", "24:00:00Z", "10:00:00"]),
        ("hostname", ["a.b-c.example", "x" * 63], ["-a", "a-", "x" * 64, "xn--x", "a..b", ".".join(["x" * 60] * 5)]),
    ],
)
def test_some_formats_by_hand(name: str, good: list[str], bad: list[str]) -> None:
    judge = Judge({"type": "string", "format": name})
    assert [text for text in good if not judge.accepts(text)] == []
    assert [text for text in bad if judge.accepts(text)] == []


@pytest.mark.parametrize(("name", "inside", "outside"), [("int8", [-128, 127], [128, -129]), ("uint8", [0, 255], [-1, 256])])
def test_formats_of_numbers_are_bounds(name: str, inside: list[int], outside: list[int]) -> None:
    judge = Judge({"type": "integer", "format": name})
    assert all(judge.accepts(value) for value in inside)
    assert not any(judge.accepts(value) for value in outside)


def test_translations_are_remembered() -> None:
    translate("^remember[0-9]$")
    before = patterns.translate.cache_info().hits
    translate("^remember[0-9]$")
    assert patterns.translate.cache_info().hits == before + 1
