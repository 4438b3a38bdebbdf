"""Values that a format can express come back as they were; the rule for closing tags against a naive reading of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pooled_mlx.core.request import Tool
from pooled_mlx.text.json_stream import JsonStream, StringField, quote_inner
from tests.answers import json_call, says, xml_call

TOOL = Tool("f", parameters={"type": "object", "properties": {name: {"type": "string"} for name in "abc"}})
SNIPPETS = [
    *("</parameter>", "\n</parameter>", "</parameter>\n", "</function>", "\n</function>\n", "</parameter1>"),
    *(f"<parameter={name}>\n" for name in ("a", "b", "zz")),
    *("\n", " ", "x", "\t", "\r\n", "é🙂", "<", "<function=f>", '"', "\\"),
]
contents = st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def naive_xml(body: str, declared: Sequence[str] = "abc") -> dict[str, str] | None:
    """The parameters of a call whose closing tag stands behind `body`, by the documented rule, looking at the whole text."""
    given: dict[str, str] = {}
    rest = body
    while True:
        rest = rest.lstrip(" \t\r\n")
        if re.fullmatch(r"</function>[ \t\r\n]*", rest):
            return given
        opening = re.match(r"<parameter=([^>\n]+)>\n?", rest)
        if opening is None or opening[1] in given:
            return None
        name, rest = opening[1], rest[opening.end() :]
        still = "|".join(re.escape(other) for other in declared if other != name and other not in given)
        following = rf"<parameter=(?:{still})>" if still else r"(?!)"
        close = re.search(rf"\n?</parameter>(?=[ \t\r\n]{{0,64}}(?:{following}|</function>[ \t\r\n]{{0,64}}\Z))", rest)
        if close is None:
            return None
        given[name], rest = rest[: close.start()], rest[close.end() :]


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), contents, min_size=1))
def test_qwen_xml_reads_values_by_the_documented_rule(arguments: dict[str, str]) -> None:
    said = xml_call("f", **arguments)
    body = said.removeprefix("<tool_call>\n<function=f>\n").removesuffix("</tool_call>")
    want = naive_xml(body)
    assume(want is not None)
    outcome = says(said, "qwen3_coder", (TOOL,), constrained=True)
    assert outcome.calls == [("f", want)]
    assert (outcome.text, outcome.reason) == ("", "tool_calls")


@settings(max_examples=300, deadline=None)
@given(contents, st.booleans())
def test_the_last_text_of_a_full_call_arrives_byte_for_byte(content: str, constrained: bool) -> None:
    """With every parameter given, only the end of the function and the real closing tag can end a value."""
    assume(constrained or "</parameter" not in re.sub("</parameter>", "", content))
    assume(constrained or not re.search(r"</function>\s*\Z", content))
    said = xml_call("f", a="1", b="2", c=content)
    assert says(said, "qwen3_coder", (TOOL,), constrained=constrained).calls == [("f", {"a": "1", "b": "2", "c": content})]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=6), json_values, max_size=4))
def test_hermes_arguments_come_back_as_they_were(arguments: dict[str, Any]) -> None:
    said = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
    assume(not re.search("[\ud800-\udfff]", said))
    outcome = says(said, "hermes", (TOOL,), tags=())
    assert outcome.raw_calls == [("f", json.dumps(arguments, ensure_ascii=False))]


@settings(max_examples=300, deadline=None)
@given(json_values, st.sampled_from([None, 1, "\t"]), st.booleans(), st.integers(1, 5))
def test_valid_json_is_copied_unchanged(value: Any, indent: Any, ascii_only: bool, size: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assume(not re.search("[\ud800-\udfff]|\\\\ud[89a-f]", text))
    stream = JsonStream()
    out = "".join(stream.feed(text[at : at + size])[0] for at in range(0, len(text), size))
    assert out + stream.close() == text
    assert stream.done


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([*"{}[],:\"'\\ \nux0tré", "true", "None", "\\u00e9", "\\ud83d", "12"]), max_size=25),
    st.integers(1, 4),
)
def test_anything_becomes_valid_json_whatever_the_pieces(snippets: list[str], size: int) -> None:
    text = "".join(snippets)
    whole = JsonStream()
    expected = whole.feed(text)[0] + whole.close()
    json.loads(expected)
    stream, out, at = JsonStream(), "", 0
    while at < len(text) and not stream.done:
        piece, used = stream.feed(text[at : at + size])
        out += piece
        at += used
    assert out + stream.close() == expected


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), st.booleans(), st.integers(1, 5))
def test_one_string_is_picked_out_of_an_object(value: str, other: str, ascii_only: bool, size: int) -> None:
    assume(not re.search("[\ud800-\udfff]", value + other))
    text = json.dumps({"other": other, "deep": {"input": other}, "input": value}, ensure_ascii=ascii_only)
    field = StringField("input")
    assert "".join(field.feed(text[at : at + size]) for at in range(0, len(text), size)) == value


@given(st.lists(st.text(max_size=6), max_size=6))
def test_quoted_fragments_join_to_the_quotation(fragments: list[str]) -> None:
    assert "".join(map(quote_inner, fragments)) == quote_inner("".join(fragments))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.text('xy<>/\n "', max_size=12), min_size=1))
def test_both_formats_give_the_same_arguments(arguments: dict[str, str]) -> None:
    by_xml = says(xml_call("f", **arguments), "qwen3_coder", (TOOL,), constrained=True)
    by_json = says(json_call("f", **arguments), "hermes", (TOOL,))
    assert by_xml.calls == by_json.calls == [("f", arguments)]
