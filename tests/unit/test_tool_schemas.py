"""Schemas of tools in the formats that write each parameter apart: held as in JSON, or named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pooled_mlx import chat_formats
from pooled_mlx.chat_formats.rules import arguments_schema
from pooled_mlx.chat_formats.schemas import Shape, json_of_text, parameters_of, shape_of, variants
from pooled_mlx.core.request import Request, ResponseFormat, Tool, ToolChoice, Turn
from pooled_mlx.grammar.answer import AnswerGrammar, answer_grammar
from pooled_mlx.grammar.match import Compiler, GrammarTokenizer
from tests.answers import TAGS, says

QUOTE = '<|"|>'


def xml(**values: str) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def glm(**values: str) -> str:
    inside = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in values.items())
    return f"<tool_call>f\n{inside}</tool_call>"


def gemma(arguments: str) -> str:
    return f"<|tool_call>call:f{{{arguments}}}<tool_call|>"


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def made(chat_format: str, schema: Any) -> tuple[AnswerGrammar, Any]:
    form = chat_formats.get(chat_format)
    tags = tuple(sorted(form.tags))
    tokenizer = GrammarTokenizer.of_bytes(tags)
    request = Request("r", (Turn("user", "hi"),), tools=(Tool("f", parameters=schema),), tool_choice=ToolChoice("required"))
    grammar = answer_grammar(request, form, Compiler(tokenizer))

    def takes(text: str) -> bool:
        assert grammar.compiled is not None
        held = grammar.compiled.matcher()
        while text:
            tag = next((tag for tag in tags if text.startswith(tag)), None)
            tokens = [tokenizer.added[tag]] if tag else list(text[0].encode())
            text = text[len(tag or text[0]) :]
            for token in tokens:
                if not held.allows(token):
                    return False
                held.consume(token)
        return held.may_end()

    return grammar, takes


def alternatives(word: str) -> dict[str, Any]:
    a = {"k": {"const": "a"}, "n": {"type": "integer"}}
    b = {"k": {"const": "b"}, "s": {"type": "string"}}
    return {
        "type": "object",
        word: [
            {"type": "object", "properties": part, "required": list(part), "additionalProperties": False} for part in (a, b)
        ],
    }


@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("qwen3_coder", [xml(k="a", n="1"), xml(s="x", k="b")], [xml(k="a", s="x"), xml(k="b", n="1"), xml(k="b")]),
        ("glm", [glm(k="a", n="1"), glm(s="x", k="b")], [glm(k="a", s="x"), glm(k="b", n="1"), glm(k="b")]),
        (
            "gemma",
            [gemma(f"k:{QUOTE}a{QUOTE},n:1"), gemma(f"s:{QUOTE}x{QUOTE},k:{QUOTE}b{QUOTE}")],
            [gemma(f"k:{QUOTE}a{QUOTE},s:{QUOTE}x{QUOTE}"), gemma(f"k:{QUOTE}b{QUOTE},n:1"), gemma(f"k:{QUOTE}b{QUOTE}")],
        ),
    ],
)
def test_each_alternative_of_a_tool_is_held_as_it_is(name: str, good: list[str], bad: list[str], word: str) -> None:
    grammar, takes = made(name, alternatives(word))
    assert grammar.warnings == ()
    assert [call for call in good if not takes(call)] == []
    assert [call for call in bad if takes(call)] == []


def test_an_alternative_is_read_with_its_own_types() -> None:
    schema = {
        "anyOf": [
            {"properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
            {"properties": {"k": {"const": "b"}, "v": {"type": "array", "items": {"type": "integer"}}}, "required": ["k", "v"]},
        ]
    }
    for call, value in ((xml(k="a", v="5"), 5), (xml(k="b", v="[5]"), [5])):
        outcome = says(call, "qwen3_coder", (Tool("f", parameters=schema),), tags=TAGS)
        assert json.loads(outcome.raw_calls[0][1])["v"] == value


def test_too_many_alternatives_are_joined_and_named() -> None:
    branches = [{"properties": {"k": {"const": f"v{n}"}}, "required": ["k"]} for n in range(20)]
    schema = {"type": "object", "anyOf": branches}
    assert variants(schema) == [schema]
    grammar, takes = made("qwen3_coder", schema)
    assert "anyOf at /anyOf" in grammar.warnings[0]
    assert (takes(xml(k="v19")), takes(xml(k="v20"))) == (True, False)


REF = {"$ref": "#/$defs/n"}
HOSTILE = {
    "fan": {"type": "object", "properties": {"v": REF}, "$defs": {"n": {"properties": {f"k{i}": REF for i in range(10)}}}},
    "own alternative": {
        "type": "object",
        "properties": {"v": REF},
        "$defs": {"n": {"anyOf": [*[REF] * 10, {"type": "array", "items": REF}, {"type": "string"}]}},
    },
    "circle": {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/a0"}},
        "$defs": {f"a{j}": {"anyOf": [*({"$ref": f"#/$defs/a{i}"} for i in range(10)), {"type": "array"}]} for j in range(10)},
    },
    "all of all": {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/a0"}},
        "$defs": {f"a{j}": {"type": "object", "allOf": [{"$ref": f"#/$defs/a{i}"} for i in range(10)]} for j in range(10)},
    },
}


@pytest.mark.parametrize("name", chat_formats.names())
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_walk_over_a_schema_looks_at_each_part_once(
    name: str, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """References that fan out: 10 of them 8 deep are a hundred million places, and 11 schemas."""
    looked = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal looked
            looked += 1
            assert looked < 50_000
            return function(*arguments)

        return call

    from pooled_mlx.chat_formats import gemma_values, raw_values, schemas

    for module in (schemas, raw_values, gemma_values):
        monkeypatch.setattr(module, "resolve", counted(schemas.resolve))
    grammar, _ = made(name, schema)
    assert grammar.text is not None


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "gemma"])
def test_what_no_rule_holds_of_a_tool_is_named(name: str) -> None:
    rules = {
        "minProperties": 1,
        "dependentRequired": {"a": ["b"]},
        "if": {"required": ["a"]},
        "not": {"required": ["b"]},
        "propertyNames": {"pattern": "^[ab]$"},
        "patternProperties": {"^x": {"type": "integer"}},
    }
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, **rules}
    (warning,) = made(name, schema)[0].warnings
    assert [keyword for keyword in rules if f"{keyword} at /{keyword}" not in warning] == []


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "gemma", "hermes"])
def test_annotations_are_not_named(name: str) -> None:
    value = {"type": "object", "description": "d", "title": "t", "examples": [1], "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "$schema": "http://json-schema.org/draft-07/schema#", "properties": {"v": value}, "x-own": 1}
    assert made(name, schema)[0].warnings == ()


def test_a_pattern_in_an_all_of_is_held() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "allOf": [{"pattern": "^x"}]}}}
    grammar, takes = made("qwen3_coder", schema)
    assert (takes(xml(a="xy")), takes(xml(a="yx")), grammar.warnings) == (True, False, ())


@pytest.mark.parametrize(("name", "call"), [("qwen3_coder", xml(a="1", zz="q")), ("hermes", hermes('{"a": 1, "zz": "q"}'))])
def test_a_required_name_that_is_declared_nowhere_can_be_given(name: str, call: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "zz"]}
    _, takes = made(name, schema)
    assert (takes(call), takes(call.replace("zz", "yy"))) == (True, False)
    assert json.loads(says(call, name, (Tool("f", parameters=schema),), tags=TAGS).raw_calls[0][1]) == {"a": 1, "zz": "q"}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "gemma"])
def test_a_parameter_that_no_value_can_meet_costs_the_tool_its_rules_with_a_word(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "enum": ["code"]}}}
    (warning,) = made(name, schema)[0].warnings
    assert "no value can meet this schema" in warning


def test_properties_that_are_named_like_keywords_keep_their_references() -> None:
    names = ("default", "enum", "const", "required", "examples")
    value = {"type": "object", "properties": dict.fromkeys(names, REF)}
    schema = {"type": "object", "properties": {"v": value}, "$defs": {"n": {"type": "integer"}}}
    for name in names:
        _, takes = made("qwen3_coder", schema)
        assert (takes(xml(v=f'{{"{name}": 1}}')), takes(xml(v=f'{{"{name}": "x"}}'))) == (True, False)


def test_references_under_an_id_at_the_root() -> None:
    chain = {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": REF, "n": {"type": "integer"}}
    schema = {"$id": "https://example.org/x.json", "type": "object", "properties": {"v": {"$ref": "#/$defs/a"}}, "$defs": chain}
    grammar, takes = made("qwen3_coder", schema)
    assert (takes(xml(v="[1]")), takes(xml(v='["x"]')), grammar.warnings) == (True, False, ())


def test_a_reference_into_one_of_leads_there() -> None:
    schema = {
        "type": "object",
        "properties": {"v": {"$ref": "#/definitions/a/oneOf/0"}},
        "definitions": {"a": {"oneOf": [{"type": "integer"}, {"type": "string"}]}},
    }
    grammar, takes = made("hermes", schema)
    assert (takes(hermes('{"v": 1}')), takes(hermes('{"v": "x"}')), grammar.warnings) == (True, False, ())


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}, ["[1]"], ["[]", "[1,2]"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            ["[1,2]", "[1,2,3]"],
            ["[1]", "[1,2,3,4]"],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            ["{a:1}", "{a:1,b:true}", "{b:[],a:1}"],
            ["{b:1}", "{a:1,a:2}", "{}"],
        ),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, ["{a:1}", "{}"], ["{b:1}"]),
        (
            {"type": "object", "additionalProperties": {"type": "string"}},
            ["{}", f"{{app.kubernetes.io/name:{QUOTE}x{QUOTE}}}"],
            ["{a:1}"],
        ),
        (
            {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}},
            ["{x:1}"],
            [f"{{x:{QUOTE}{QUOTE}}}"],
        ),
    ],
)
def test_nested_values_in_gemmas_notation(value: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar, takes = made("gemma", {"type": "object", "properties": {"v": value}})
    assert grammar.warnings == ()
    assert [text for text in good if not takes(gemma(f"v:{text}"))] == []
    assert [text for text in bad if takes(gemma(f"v:{text}"))] == []


def test_a_key_with_a_slash_is_read_in_gemmas_notation() -> None:
    schema = {"type": "object", "properties": {"v": {"type": "object", "additionalProperties": {"type": "string"}}}}
    call = gemma(f"v:{{app.kubernetes.io/name:{QUOTE}x{QUOTE}}}")
    tags = tuple(sorted(chat_formats.get("gemma").tags))
    outcome = says(call, "gemma", (Tool("f", parameters=schema),), tags=tags)
    assert json.loads(outcome.raw_calls[0][1]) == {"v": {"app.kubernetes.io/name": "x"}}


NUMBERS = ("1e999", "-1e999", "1e-999", "-0", "NaN", "Infinity", "1" * 5000, "-" + "9" * 5000, "1" * 400 + ".5", "0" * 10)


@pytest.mark.parametrize("kinds", [["number"], ["integer"], ["number", "string"], ["integer", "string"], ["string", "null"]])
@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: text[:12])
def test_no_number_breaks_a_call(text: str, kinds: list[str]) -> None:
    schema = {"type": "object", "properties": {"v": {"type": kinds}}}
    for name, call, tags in (
        ("qwen3_coder", xml(v=text), TAGS),
        ("glm", glm(v=text), tuple(sorted(chat_formats.get("glm").tags))),
        ("hermes", hermes(f'{{"v": {text}}}'), TAGS),
    ):
        outcome = says(call, name, (Tool("f", parameters=schema),), tags=tags)
        for _, arguments in outcome.raw_calls:
            value = json.loads(arguments, parse_int=str, parse_constant=pytest.fail)["v"]
            assert isinstance(value, str | float)


def test_a_number_beyond_floating_point_is_a_string_where_one_may_stand() -> None:
    shape = Shape(frozenset({"number", "string"}), None, frozenset({"number", "string"}))
    assert json_of_text("1e999", shape) is None
    assert json_of_text("1e5", Shape(frozenset({"integer"}))) == "100000"


def test_parts_that_say_something_of_one_parameter_are_joined() -> None:
    schema = {
        "properties": {"a": {"type": ["integer", "string"]}},
        "allOf": [{"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}],
        "oneOf": [{"properties": {"c": {"type": "integer"}}}, {"properties": {"c": {"type": "string"}}}],
    }
    found = parameters_of(schema)
    assert list(found) == ["a", "b", "c"]
    assert shape_of(found["a"]).types == {"integer"}
    assert shape_of(found["c"]).types == {"integer", "string"}
    assert arguments_schema(Tool("f", parameters={"type": "object", "properties": {}}))["additionalProperties"] is False


def test_a_format_and_a_tool_of_the_same_schema_are_made_apart() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = chat_formats.get("hermes")
    request = Request("r", (Turn("user", "hi"),), response_format=ResponseFormat("json_schema", schema, strict=True))
    compiled = answer_grammar(request, form, Compiler(GrammarTokenizer.of_bytes(TAGS))).compiled
    assert compiled is not None
    for text, good in (('{"a": "x"}', True), ('{"b": 1}', True), ('{"\\u0061": 1}', False)):
        held = compiled.matcher()
        taken = 0
        for byte in text.encode():
            if not held.allows(byte):
                break
            held.consume(byte)
            taken += 1
        assert (taken == len(text)) == good
