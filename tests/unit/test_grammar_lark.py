"""Building one Lark grammar out of rules."""

from __future__ import annotations

import json

import pytest

from pooled_mlx.grammar.lark import SELF, LarkBuilder, SchemaError
from pooled_mlx.grammar.match import GrammarTokenizer, build
from pooled_mlx.grammar.schema import lower

TOKENIZER = GrammarTokenizer.of_bytes(("<tool_call>",))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


def accepts(grammar: str, text: str, *, prefix: tuple[int, ...] = ()) -> bool:
    held = build(TOKENIZER, grammar).matcher()
    for token in (*prefix, *text.encode()):
        if not held.allows(token):
            return False
        held.consume(token)
    return held.may_end()


def test_rules_are_named_after_their_prefix_and_never_twice() -> None:
    lark = LarkBuilder({})
    names = [lark.rule("call", '"a"'), lark.rule("call", '"b"'), lark.rule("tool", '"c"')]
    assert len(set(names)) == 3
    assert all(name.startswith(prefix) for name, prefix in zip(names, ("call", "call", "tool"), strict=True))


def test_equal_bodies_share_one_rule() -> None:
    lark = LarkBuilder({})
    assert lark.rule("a", '"x"') == lark.rule("b", '"x"')
    assert lark.rule("a", '"x"') != lark.rule("a", '"x"', attributes='[suffix="y"]')
    assert lark.terminal("T", "/x/") == lark.terminal("U", "/x/")


def test_a_rule_and_a_terminal_of_equal_body_stay_apart() -> None:
    lark = LarkBuilder({})
    rule, terminal = lark.rule("a", "/x/"), lark.terminal("a", "/x/")
    assert rule.islower()
    assert terminal.isupper()
    assert accepts(lark.build(f"{rule} {terminal}"), "xx")


def test_a_rule_can_name_itself() -> None:
    lark = LarkBuilder({})
    choice = f'"." %if bit_set(0) | "a" {SELF}::set_bit(0) %if bit_clear(0) | "b" {SELF}::set_bit(1) %if bit_clear(1)'
    name = lark.rule("set", choice, attributes="::_")
    grammar = lark.build(f"{name}::0x0")
    assert [accepts(grammar, text) for text in ("a.", "ba.", "ab.", "b.", "aa.")] == [True, True, True, False, False]


def test_attributes_follow_the_name() -> None:
    lark = LarkBuilder({})
    value = lark.rule("value", r"/(?s:.*)/", attributes=f"[suffix={lark.text('</x>')}]")
    grammar = lark.build(f'{value} "!"')
    assert accepts(grammar, "a </y b</x>!")
    assert not accepts(grammar, "a</x>b</x>!")


LITERALS = ('"', "\\", "\n\t\r", "é日本🙂", 'a"b\\c\n', "</parameter>", "\x00\x1f\x7f", "\u2028", "%{}")


@pytest.mark.parametrize("literal", LITERALS)
def test_any_text_is_a_literal(literal: str) -> None:
    lark = LarkBuilder({})
    assert accepts(lark.build(lark.text(literal) + ' "."'), literal + ".")


def test_special_tokens() -> None:
    lark = LarkBuilder(TOKENIZER.added)
    grammar = lark.build(f'{lark.special("<tool_call>")} "a"')
    assert accepts(grammar, "a", prefix=(TOKENIZER.added["<tool_call>"],))
    assert not accepts(grammar, "<tool_call>a")
    assert lark.has_special("<tool_call>")
    assert not lark.has_special("<think>")
    with pytest.raises(LookupError, match="<think>"):
        lark.special("<think>")


def test_json_is_written_as_models_write_it() -> None:
    lark = LarkBuilder({})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"items": {"type": "integer"}}}}
    grammar = lark.build(lark.json(schema, ""))
    assert accepts(grammar, '{"a": 1, "b": [1, 2]}')
    for text in ('{"a":1}', '{"a": 1,"b": []}', '{ "a": 1}', '{"a": 1, "b": [1,2]}', ' {"a": 1}', '{"a": 1}\n'):
        assert not accepts(grammar, text), text


def test_schemas_that_differ_in_annotations_share_one_rule() -> None:
    lark = LarkBuilder({})
    noisy = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "d",
        **CITY,
        "properties": {"city": {"type": "string", "description": "Where", "default": "x", "examples": ["y"]}},
    }
    assert lark.json(CITY, "/a") == lark.json(noisy, "/b")


def test_names_of_properties_and_listed_values_are_no_annotations() -> None:
    lark = LarkBuilder({})
    schema = {
        "type": "object",
        "properties": {"description": {"const": {"title": "x"}}, "default": {"enum": [{"examples": 1}]}},
        "required": ["description", "default"],
        "additionalProperties": False,
    }
    value = {"description": {"title": "x"}, "default": {"examples": 1}}
    assert accepts(lark.build(lark.json(schema, "")), json.dumps(value))


def test_x_guidance_of_a_client_has_no_influence() -> None:
    lark = LarkBuilder({})
    wild = {"x-guidance": {"whitespace_pattern": "[ ]{0,9}", "lenient": True, "item_separator": ";"}}
    rule = lark.json({**CITY, **wild, "properties": {"city": {"type": "string", **wild}}}, "")
    assert rule == lark.json(CITY, "")


def test_what_is_not_enforced_is_listed_with_its_pointer() -> None:
    lark = LarkBuilder({})
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}, "c": {"pattern": "(?=x)"}}}
    lark.json(schema, "/where")
    assert [(item.pointer, item.keyword) for item in lark.unenforced] == [
        ("/where/properties/c/pattern", "pattern"),
        ("/where/properties/a~1b/uniqueItems", "uniqueItems"),
    ]


def test_strict_refuses_it() -> None:
    with pytest.raises(SchemaError) as error:
        LarkBuilder({}, strict=True).json({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "")
    assert (error.value.pointer, error.value.keyword) == ("/properties/a/uniqueItems", "uniqueItems")


def test_a_lowered_schema_is_taken_as_it_is() -> None:
    lark = LarkBuilder({})
    assert lark.lowered(lower(CITY, strict=True)) == lark.json(CITY, "")
    assert lark.unenforced == []


OBJECTS = [
    # properties, required, in which orders and choices they may come
    ("abc", "ab", ["ab", "abc"], ["", "a", "ba", "ac", "abcc"]),
    ("abc", "", ["", "a", "b", "c", "ab", "ac", "bc", "abc"], ["ba", "cc"]),
    ("abc", "c", ["c", "ac", "bc", "abc"], ["", "ab", "ca"]),
    ("abcde", "d", ["d", "ad", "bd", "cde", "abcde", "de"], ["", "e", "abc", "ed"]),
    ("", "", [""], ["a"]),
]


@pytest.mark.parametrize(("names", "required", "good", "bad"), OBJECTS)
def test_objects_of_listed_properties_become_rules(names: str, required: str, good: list[str], bad: list[str]) -> None:
    lark = LarkBuilder({})
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": list(required),
        "additionalProperties": False,
    }
    rule = lark.json(schema, "")
    assert rule.startswith("object")
    grammar = lark.build(rule)

    def written(given: str) -> str:
        return "{" + ", ".join(f'"{name}": {index}' for index, name in enumerate(given)) + "}"

    assert [given for given in good if not accepts(grammar, written(given))] == []
    assert [given for given in bad if accepts(grammar, written(given))] == []


def test_equal_properties_of_different_objects_share_one_rule() -> None:
    lark = LarkBuilder({})
    closed = {"type": "object", "additionalProperties": False}
    lark.json({**closed, "properties": {"a": {"type": "string", "maxLength": 9}}}, "")
    lark.json({**closed, "properties": {"b": {"type": "string", "maxLength": 9, "description": "x"}}}, "")
    assert lark.build("").count("maxLength") == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 0.2, "maximum": 0.8},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "enum": [1]},
        {"type": "array", "items": {"enum": []}, "minItems": 1},
        {"type": "object", "properties": {"b": {"type": "string", "pattern": "^[^\\s\\S]$"}}, "required": ["b"]},
    ],
)
def test_a_property_that_nothing_meets_is_left_out_and_breaks_nothing(part: dict[str, object]) -> None:
    lark = LarkBuilder({})
    schema = {"type": "object", "properties": {"a": part, "z": {"type": "integer"}}, "additionalProperties": False}
    grammar = lark.build(lark.json(schema, ""))
    assert accepts(grammar, '{"z": 1}')
    assert not accepts(grammar, '{"a": 1}')


@pytest.mark.parametrize("name", ['a"b', "a\\b", "größe", "🙂", "a\nb", "%{x}"])
def test_any_name_of_a_property(name: str) -> None:
    lark = LarkBuilder({})
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}
    assert accepts(lark.build(lark.json(schema, "")), json.dumps({name: 1}, ensure_ascii=False))
