"""From a request to the grammar of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pooled_mlx import chat_formats
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.request import (
    CustomGrammar,
    Request,
    ResponseFormat,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
)
from pooled_mlx.grammar import lint
from pooled_mlx.grammar.answer import AnswerGrammar, answer_grammar, needs_grammar
from pooled_mlx.grammar.match import Compiler, GrammarRefused, GrammarTokenizer

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOKENIZER = GrammarTokenizer.of_bytes(TAGS)
HERMES, XML = chat_formats.get("hermes"), chat_formats.get("qwen3_coder")
HELLO = (Turn("user", "hello"),)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, CLOCK = Tool("weather", parameters=CITY), Tool("clock")
JSON = ResponseFormat("json_schema", {**CITY, "additionalProperties": False}, strict=True)


def request(**parts: Any) -> Request:
    return Request("r", parts.pop("turns", HELLO), **parts)


def made(asked: Request, chat_format: Any = HERMES, **options: Any) -> AnswerGrammar:
    return answer_grammar(asked, chat_format, Compiler(TOKENIZER), **options)


def takes(grammar: AnswerGrammar, text: str) -> bool:
    """Whether the whole text, its tags as tokens, is a complete answer."""
    assert grammar.compiled is not None
    held = grammar.compiled.matcher()
    while text:
        tag = next((tag for tag in TAGS if text.startswith(tag)), None)
        tokens = [TOKENIZER.added[tag]] if tag else list(text[0].encode())
        text = text[len(tag or text[0]) :]
        for token in tokens:
            if not held.allows(token):
                return False
            held.consume(token)
    return held.may_end()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call("weather", '{"city": "Paris"}')
NOON = call("clock", "{}")


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        (request(), False),
        (request(thinking=Thinking(on=True)), False),
        (request(turns=(*HELLO, Turn("assistant", "hi"))), False),
        (request(tools=(WEATHER,)), True),
        (request(tools=(WEATHER,), tool_choice=ToolChoice("none")), True),
        (request(turns=(*HELLO, Turn("assistant", tool_calls=(ToolCall("c", "x", "{}"),)))), True),
        (request(response_format=ResponseFormat("json_object")), True),
        (request(response_format=JSON), True),
    ],
)
def test_a_grammar_is_used_where_there_is_something_to_hold(asked: Request, needed: bool) -> None:
    assert needs_grammar(asked) == needed
    assert (made(asked).text is not None) == needed
    assert (made(asked).compiled is not None) == needed


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        (ToolChoice("auto"), {"text": True, "paris": True, "noon": True, "both": True}),
        (ToolChoice("none"), {"text": True, "paris": False, "noon": False, "both": False}),
        (ToolChoice("required"), {"text": False, "paris": True, "noon": True, "both": True}),
        (ToolChoice("named", "clock"), {"text": False, "paris": False, "noon": True, "both": False}),
        (ToolChoice("auto", allowed=("clock",)), {"text": True, "paris": False, "noon": True, "both": False}),
    ],
)
def test_tool_choice(choice: ToolChoice, allowed: dict[str, bool]) -> None:
    grammar = made(request(tools=(WEATHER, CLOCK), tool_choice=choice))
    answers = {"text": "Hello.", "paris": PARIS, "noon": NOON, "both": f"{PARIS}\n{NOON}"}
    assert {name: takes(grammar, text) for name, text in answers.items()} == allowed


def test_calls_are_held_to_their_schemas() -> None:
    grammar = made(request(tools=(WEATHER, CLOCK)))
    for wrong in (
        call("weather", "{}"),
        call("weather", '{"city": 1}'),
        call("other", "{}"),
        call("weather", '{"city": "x", "y": 1}'),
    ):
        assert not takes(grammar, wrong)


def test_one_call_at_most() -> None:
    grammar = made(request(tools=(CLOCK,), parallel_tool_calls=False))
    assert takes(grammar, NOON)
    assert not takes(grammar, f"{NOON}\n{NOON}")


def test_formats() -> None:
    value = '{"city": "Paris"}'
    strict, loose = made(request(response_format=JSON)), made(request(response_format=ResponseFormat("json_object")))
    assert [takes(strict, text) for text in (value, '{"city": 1}', "{}", "[]", "hello")] == [True, False, False, False, False]
    assert [takes(loose, text) for text in (value, '{"any": [1, null]}', "[]", "hello")] == [True, True, False, False]


def test_a_format_with_tools_gives_one_or_the_other() -> None:
    auto = made(request(tools=(WEATHER,), response_format=JSON))
    assert [takes(auto, text) for text in ('{"city": "x"}', PARIS, "hello")] == [True, True, False]
    forced = made(request(tools=(WEATHER,), response_format=JSON, tool_choice=ToolChoice("required")))
    assert [takes(forced, text) for text in ('{"city": "x"}', PARIS)] == [False, True]


def test_thinking_comes_first() -> None:
    asked = request(response_format=JSON, thinking=Thinking(on=True))
    opened = made(asked, reasoning_open=True)
    assert takes(opened, 'hm {"city"</think>\n\n{"city": "x"}')
    assert not takes(opened, 'hm</think>\n\n{"city": 1}')
    free = made(asked)
    assert takes(free, '<think>hm</think>\n\n{"city": "x"}')
    assert takes(free, '{"city": "x"}')


def test_the_same_request_is_made_once() -> None:
    compiler = Compiler(TOKENIZER)
    tool = Tool("t", parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    one = answer_grammar(request(tools=(tool,)), HERMES, compiler)
    other = answer_grammar(replace(request(tools=(tool,)), id="other"), HERMES, compiler)
    assert one.warnings
    assert other.warnings == one.warnings  # who is told of them, and how often, is decided where answers are sent
    assert other.compiled is one.compiled
    assert answer_grammar(request(tools=(tool,)), XML, compiler).text != one.text


@pytest.mark.parametrize(
    "change",
    [
        {"tools": (replace(WEATHER, name="weather2"),)},
        {"tools": (replace(WEATHER, parameters={**CITY, "required": []}),)},
        {"tool_choice": ToolChoice("required")},
        {"parallel_tool_calls": False},
        {"response_format": JSON},
        {"thinking": Thinking(on=True)},
    ],
)
def test_what_differs_is_not_mistaken(change: dict[str, Any]) -> None:
    compiler = Compiler(TOKENIZER)
    asked = request(tools=(WEATHER,))
    assert answer_grammar(asked, HERMES, compiler).text != answer_grammar(replace(asked, **change), HERMES, compiler).text


def test_text_only_without_a_compiler() -> None:
    grammar = answer_grammar(request(tools=(WEATHER,)), HERMES, TOKENIZER)
    assert grammar.text is not None
    assert grammar.compiled is None


# --- formats that cannot be held


def refused(**parts: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        made(request(**parts))
    assert error.value.kind.status == 400
    return error.value


def test_a_strict_format_names_what_it_cannot_hold() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    error = refused(response_format=ResponseFormat("json_schema", schema, strict=True))
    assert error.param == "response_format"
    assert "/properties/tags/uniqueItems" in error.message
    assert "uniqueItems" in error.message


def test_a_format_that_is_not_strict_lists_it() -> None:
    schema = {"type": "object", "properties": {"größe\n": {"type": "array", "uniqueItems": True}}}
    grammar = made(request(response_format=ResponseFormat("json_schema", schema)))
    assert grammar.unenforced == ("uniqueItems at #/properties/gr%C3%B6%C3%9Fe%0A/uniqueItems",)
    assert grammar.warnings == ()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#/$defs/x"}, "/$ref"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "string", "pattern": "("}, "/pattern"),
        ({"type": "array", "items": [{}]}, "/items"),
        ({"enum": list(range(1001))}, "limit 1000"),
        ({"type": "integer", "multipleOf": 999983}, "limit 10000"),
        (False, "no finite value"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_broken_and_oversized_formats(schema: Any, text: str, strict: bool) -> None:
    assert text in refused(response_format=ResponseFormat("json_schema", schema, strict=strict)).message


def test_a_broken_format_is_refused_also_where_calls_are_forced() -> None:
    broken = ResponseFormat("json_schema", {"type": "objekt"})
    assert "objekt" in refused(response_format=broken, tools=(WEATHER,), tool_choice=ToolChoice("required")).message


# --- tools that cannot be held

ODD: tuple[tuple[str, Any], ...] = (
    ("objekt", {"type": "object", "properties": {"a": {"type": "objekt"}}}),
    ("listed", {"type": "object", "properties": {"a": {"type": ["string", {"type": "null"}]}}}),
    ("types", {"type": "object", "properties": {"a": {"type": {"enum": ["string"]}}}}),
    ("parts", {"type": "object", "allOf": None, "oneOf": [{"required": ["a"]}], "anyOf": [{"properties": {"a": {}}}]}),
    ("missing", {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}),
    ("enum", {"type": "object", "properties": {"a": {"enum": list(range(1001))}}}),
    ("multiple", {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999983}}}),
    ("endless", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "allOf": [False]}),
)


@pytest.mark.parametrize(("name", "schema"), ODD)
@pytest.mark.parametrize("chat_format", [HERMES, XML], ids=["hermes", "xml"])
def test_a_broken_tool_degrades_alone(name: str, schema: Any, chat_format: Any) -> None:
    grammar = made(request(tools=(WEATHER, Tool(name, parameters=schema))), chat_format)
    assert len(grammar.warnings) == 1
    assert f"tool {name!r}" in grammar.warnings[0]
    assert grammar.unenforced == ()
    if chat_format is HERMES:
        assert takes(grammar, call(name, '{"a": "anything", "b": []}'))
        assert not takes(grammar, call(name, "[]"))
        assert takes(grammar, PARIS)
        assert not takes(grammar, call("weather", '{"city": 1}'))


def test_thirty_tools_with_odd_but_sound_schemas_lose_nothing() -> None:
    odd = [
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 65_536}}},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "string", "pattern": "\\S"}}}}},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": {}}}}}},
    ]
    tools = [Tool(f"t{i}", parameters=odd[i % 4]) for i in range(30)]
    assert made(request(tools=tuple(tools))).warnings == ()
    # in bare text the length of a string is held up to a limit of the format's own
    assert not any("is not used" in warning for warning in made(request(tools=tuple(tools)), XML).warnings)


def test_what_a_tool_loses_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "integer"}}}
    grammar = made(request(tools=(Tool("t", parameters=schema),)))
    (warning,) = grammar.warnings
    assert made(request(tools=(Tool("t", parameters=schema),)), XML).warnings == grammar.warnings
    assert "tool 't'" in warning
    assert "uniqueItems at /properties/a/uniqueItems" in warning
    assert not takes(grammar, call("t", '{"b": "x"}'))


def test_tools_that_only_the_engine_refuses_are_found_and_degrade_alone() -> None:
    # each alternative is fine, their product is too large: nothing before the engine can tell
    wide = {
        "type": "object",
        "allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(8)]} for i in range(6)],
    }
    tools = tuple(Tool(f"t{i}", parameters=wide if i in (2, 5) else CITY) for i in range(8))
    grammar = made(request(tools=tools))
    assert sorted(warning.split("'")[1] for warning in grammar.warnings) == ["t2", "t5"]
    assert takes(grammar, call("t2", '{"x": 1}'))
    assert not takes(grammar, call("t1", "{}"))


def test_a_schema_nested_beyond_all_bounds_degrades_its_tool() -> None:
    schema: Any = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    for chat_format in (HERMES, XML):
        grammar = made(request(tools=(WEATHER, Tool("deep", parameters=schema))), chat_format)
        assert [warning.split("'")[1] for warning in grammar.warnings] == ["deep"]


def test_a_tool_schema_over_the_cap_is_a_400() -> None:
    large = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 32_000}}}
    error = refused(tools=(WEATHER, Tool("large", parameters=large)))
    assert error.param == "tools[1]"
    assert "'large'" in error.message
    assert "limit 32000" in error.message


def test_a_schema_full_of_numbers_is_measured_too() -> None:
    large = {"type": "object", "properties": {"a": {"enum": [0.1234567890123456 + i for i in range(900)], "x": [10**9] * 2000}}}
    assert "limit 32000" in refused(tools=(Tool("large", parameters=large),)).message


def test_the_whole_grammar_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint, "MAX_GRAMMAR_BYTES", 500)
    error = refused(tools=tuple(Tool(f"tool{i}", parameters={**CITY, "required": [f"r{i}"]}) for i in range(20)))
    assert "limit 500" in error.message
    assert error.param == "tools"


@pytest.mark.parametrize("definition", ["[a-z]{3}", "^[a-z]{3}$"])
def test_a_custom_tool_with_a_regular_expression(definition: str) -> None:
    tool = Tool("raw", custom=True, grammar=CustomGrammar("regex", definition))
    grammar = made(request(tools=(tool,)))
    assert takes(grammar, call("raw", '{"input": "abc"}'))
    assert not takes(grammar, call("raw", '{"input": "ab"}'))


def wrapped(text: str, name: str = "apply_patch") -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"


PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""


def test_a_custom_tool_with_a_lark_grammar() -> None:
    tool = Tool("apply_patch", custom=True, grammar=CustomGrammar("lark", PATCH))
    grammar = made(request(tools=(tool,)), XML)
    assert grammar.warnings == ()
    patch = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch"

    assert takes(grammar, wrapped(patch))
    assert not takes(grammar, wrapped("*** Begin Patch\nx\n*** End Patch"))


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        ("start: /.+/s", "a\nb"),
        ("start: /(.|\\n)+/", "a"),
        ("start: /SELECT (?s:.*);/", "SELECT 1;"),
        ("start: line+\nline: /[^<]+/", "a"),
        ('start: "a" | "b" /[a-z<>\\/\\n]+/', "bx"),
    ],
)
def test_a_lark_grammar_that_runs_on_into_the_closing_tag_is_named(definition: str, text: str) -> None:
    tool = Tool("raw", custom=True, grammar=CustomGrammar("lark", definition))
    grammar = made(request(tools=(tool, WEATHER)), XML)
    assert takes(grammar, wrapped(text, "raw"))
    (warning,) = grammar.warnings
    assert "tool 'raw'" in warning
    assert "run on into the tag" in warning


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        ("start: /[^\\n]+/", "a</parameter>"),
        ("start: /.+/", "a"),
        ('start: (LINE NL)* LINE\nLINE: /[^\\n]+/\nNL: "\\n"', "a\nb"),
        ("start: WORD+\nWORD: /\\s*\\S+/", "a b"),
        ("start: line+\nline: /[^\\n]*\\n/", "a\n"),
    ],
)
def test_a_lark_grammar_that_ends_before_the_closing_tag_is_held(definition: str, text: str) -> None:
    grammar = made(request(tools=(Tool("raw", custom=True, grammar=CustomGrammar("lark", definition)),)), XML)
    assert grammar.warnings == ()
    assert takes(grammar, wrapped(text, "raw"))


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", "start: nothing"), ("lark", "start: ("), ("regex", "("), ("regex", "(?=x)"), ("regex", "a{1,999999}")],
)
@pytest.mark.parametrize("chat_format", [HERMES, XML], ids=["hermes", "xml"])
def test_a_custom_grammar_that_cannot_be_used_is_named(syntax: Any, definition: str, chat_format: Any) -> None:
    tool = Tool("raw", custom=True, grammar=CustomGrammar(syntax, definition))
    (warning,) = made(request(tools=(WEATHER, tool)), chat_format).warnings
    assert "tool 'raw'" in warning


def test_a_format_that_only_this_vocabulary_makes_too_large_is_given_up_as_a_whole_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looked at over bytes it can be held; the real vocabulary needs more expressions than the engine makes."""
    real = Compiler.compile

    def compile_(self: Compiler, text: str) -> Any:
        if "maxLength" in text:
            raise GrammarRefused("nothing can be written under it (lexer error: too many expressions constructed)")
        return real(self, text)

    monkeypatch.setattr(Compiler, "compile", compile_)
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    got = made(request(response_format=ResponseFormat("json_schema", schema)))
    assert got.unenforced == ("schema at #",)
    assert takes(got, '{"b": 1}')
    assert not takes(got, "[1]")
    with pytest.raises(ApiError) as refused:
        made(request(response_format=ResponseFormat("json_schema", schema, strict=True)))
    assert refused.value.param == "response_format"
    assert "expressions" not in refused.value.message
