"""Each feature of JSON schema, by hand: what is enforced, exactly; what is not, by name. jsonschema is the judge."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jsonschema
import pytest

from pooled_mlx.grammar.lark import SchemaError
from tests.unit.grammar_judge import Judge


class Feature(NamedTuple):
    name: str
    schema: dict[str, Any]
    good: list[Any]
    bad: list[Any]


NOT_ENFORCED = {
    "pattern lookahead": ("/pattern", "pattern"),
    "uniqueItems": ("/uniqueItems", "uniqueItems"),
    "contains": ("/contains", "contains"),
}
"""Features that no grammar holds: where and under which keyword they are named."""
ANNOTATION = "format unknown (annotation)"

FEATURES = [
    Feature(
        "string minLength",
        {"type": "string", "minLength": 3},
        ["abc", "abcd", "日本語"],
        ["ab", ""],
    ),
    Feature(
        "string maxLength",
        {"type": "string", "maxLength": 3},
        ["", "abc"],
        ["abcd"],
    ),
    Feature(
        "pattern anchored",
        {"type": "string", "pattern": "^[a-z]{2}[0-9]+$"},
        ["ab1"],
        ["a1", "ab1x"],
    ),
    Feature(
        "pattern unanchored",
        {"type": "string", "pattern": "[0-9]"},
        ["x1y", "1"],
        ["abc"],
    ),
    Feature(
        "pattern+maxLength",
        {"type": "string", "pattern": "^[a-z]*$", "maxLength": 3},
        ["abc"],
        ["abcd", "A"],
    ),
    Feature(
        "pattern lookahead",
        {"type": "string", "pattern": "^(?!foo).*$"},
        ["bar"],
        ["foobar"],
    ),
    Feature(
        "pattern \\d \\w",
        {"type": "string", "pattern": "^\\d\\w$"},
        ["1a"],
        ["aa"],
    ),
    Feature(
        "pattern with escape",
        {"type": "string", "pattern": '^a"b$'},
        ['a"b'],
        ["ab"],
    ),
    Feature(
        "format date",
        {"type": "string", "format": "date"},
        ["2024-02-28"],
        ["2024-13-01", "x"],
    ),
    Feature(
        "format date-time",
        {"type": "string", "format": "date-time"},
        ["2024-02-28T10:00:00Z"],
        ["2024-02-28"],
    ),
    Feature(
        "format email",
        {"type": "string", "format": "email"},
        ["a@b.co"],
        ["ab"],
    ),
    Feature(
        "format uuid",
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123"],
    ),
    Feature(
        "format ipv4",
        {"type": "string", "format": "ipv4"},
        ["1.2.3.4"],
        ["1.2.3.400"],
    ),
    Feature(
        "format uri",
        {"type": "string", "format": "uri"},
        ["https://a.b/c?d=e"],
        ["no uri"],
    ),
    Feature(
        ANNOTATION,
        {"type": "string", "format": "color-name"},
        ["x"],
        [],
    ),
    Feature(
        "integer min/max",
        {"type": "integer", "minimum": -5, "maximum": 120},
        [-5, 0, 99, 120],
        [-6, 121, 1000],
    ),
    Feature(
        "integer exclusive",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        [1, 9],
        [0, 10],
    ),
    Feature(
        "number min/max",
        {"type": "number", "minimum": 0.5, "maximum": 1.5},
        [0.5, 1, 1.25],
        [0.4, 1.6],
    ),
    Feature(
        "integer min only",
        {"type": "integer", "minimum": 10},
        [10, 1000000],
        [9, -1],
    ),
    Feature(
        "multipleOf int",
        {"type": "integer", "multipleOf": 5},
        [0, 5, -10, 125],
        [3, 12],
    ),
    Feature(
        "multipleOf 0.5",
        {"type": "number", "multipleOf": 0.5},
        [0.5, 2, 2.5],
        [0.3],
    ),
    Feature(
        "enum mixed",
        {"enum": ["a", 1, None, True, {"x": [1]}]},
        ["a", 1, None, True, {"x": [1]}],
        ["b", 2, False],
    ),
    Feature(
        "const object",
        {"const": {"a": [1, "x"]}},
        [{"a": [1, "x"]}],
        [{"a": [1]}],
    ),
    Feature(
        "type array",
        {"type": ["string", "null"]},
        ["a", None],
        [1],
    ),
    Feature(
        "required+optional",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        [{"b": 1}, {"a": "x", "b": 1}, {"a": "x", "b": 1, "c": True}, {"b": 1, "c": False}],
        [{"a": "x"}, {}, {"b": 1, "z": 1}],
    ),
    Feature(
        "all optional",
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"a": "x"}, {"b": 1}, {"a": "x", "b": 2}],
        [{"c": 1}],
    ),
    Feature(
        "required order != props order",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
            "required": ["b", "a"],
            "additionalProperties": False,
        },
        [{"a": "x", "b": 2}],
        [{"a": "x"}],
    ),
    Feature(
        "required not in properties",
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["z"]},
        [{"z": 1}, {"a": "q", "z": 1}],
        [{}, {"a": "q"}],
    ),
    Feature(
        "additionalProperties schema",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1, "b": 2}],
        [{"a": "x"}],
    ),
    Feature(
        "additionalProperties default true",
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        [{"a": "x"}, {"a": "x", "q": [1]}],
        [{"q": 1}],
    ),
    Feature(
        "patternProperties",
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"x_a": 1}],
        [{"y": 1}, {"x_a": "s"}],
    ),
    Feature(
        "minProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    Feature(
        "propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        [{"ab": 1}],
        [{"A1": 1}],
    ),
    Feature(
        "dependentRequired",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "dependentRequired": {"a": ["b"]},
            "additionalProperties": False,
        },
        [{"b": 1}, {"a": 1, "b": 1}, {}],
        [{"a": 1}],
    ),
    Feature(
        "minItems/maxItems",
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        [[1], [1, 2, 3]],
        [[], [1, 2, 3, 4]],
    ),
    Feature(
        "prefixItems closed",
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
        [["a", 1]],
        [["a"], [1, "a"], ["a", 1, 2]],
    ),
    Feature(
        "prefixItems open",
        {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
        [["a"], ["a", 1, 2], []],
        [["a", "b"]],
    ),
    Feature(
        "uniqueItems",
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        [[1, 2]],
        [[1, 1]],
    ),
    Feature(
        "contains",
        {"type": "array", "contains": {"type": "integer"}},
        [["a", 1]],
        [["a"]],
    ),
    Feature(
        "anyOf",
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
        ["ab", 5],
        ["abc", None],
    ),
    Feature(
        "oneOf disjoint",
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        ["abc", 5],
        [None],
    ),
    Feature(
        "oneOf discriminated",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "x": {"type": "integer"}},
                    "required": ["k", "x"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"k": {"const": "b"}, "y": {"type": "string"}},
                    "required": ["k", "y"],
                    "additionalProperties": False,
                },
            ]
        },
        [{"k": "a", "x": 1}, {"k": "b", "y": "s"}],
        [{"k": "a", "y": "s"}],
    ),
    Feature(
        "oneOf overlapping",
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]},
        [-1, 11],
        [5],
    ),
    Feature(
        "allOf merge",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
            ]
        },
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    Feature(
        "not",
        {"type": "string", "not": {"const": "x"}},
        ["y"],
        ["x"],
    ),
    Feature(
        "if/then/else",
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}},
            "if": {"properties": {"a": {"const": True}}, "required": ["a"]},
            "then": {"required": ["b"]},
        },
        [{"a": False}, {"a": True, "b": 1}],
        [{"a": True}],
    ),
    Feature(
        "$ref $defs",
        {
            "$defs": {
                "P": {
                    "type": "object",
                    "properties": {"n": {"type": "string"}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
            },
            "type": "array",
            "items": {"$ref": "#/$defs/P"},
        },
        [[{"n": "x"}], []],
        [[{"m": 1}]],
    ),
    Feature(
        "$ref recursion",
        {
            "$defs": {
                "T": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}},
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/T",
        },
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}],
        [{"kids": []}, {"v": 1, "kids": [{"x": 1}]}],
    ),
    Feature(
        "definitions (draft 7)",
        {
            "definitions": {"P": {"type": "integer"}},
            "properties": {"a": {"$ref": "#/definitions/P"}},
            "type": "object",
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
    Feature(
        "items array (draft 7)",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "string"}, {"type": "integer"}],
            "additionalItems": False,
            "minItems": 2,
        },
        [["a", 1]],
        [[1, "a"]],
    ),
    Feature(
        "nullable union anyOf null",
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": None}, {"a": "x"}],
        [{"a": 1}],
    ),
    Feature(
        "true / empty schema",
        {"type": "object", "properties": {"a": True, "b": {}}, "required": ["a", "b"], "additionalProperties": False},
        [{"a": [1, {"q": None}], "b": "x"}],
        [{"a": 1}],
    ),
    Feature(
        "unicode strings/escapes",
        {"type": "string"},
        ['é😀\n\t"\\\x01'],
        [],
    ),
    Feature(
        "unknown keyword",
        {"type": "string", "x-foo": 1, "description": "d", "examples": ["a"], "default": "b", "title": "t", "deprecated": True},
        ["q"],
        [],
    ),
    Feature(
        "big int / exp floats",
        {"type": "number"},
        [1e30, -1.5e-07, 12345678901234567890],
        [],
    ),
    Feature(
        "enum + type conflict",
        {"type": "string", "enum": ["a", "b"]},
        ["a"],
        ["c"],
    ),
    Feature(
        "deep nesting any",
        {},
        [{"a": [[[[1]]]]}],
        [],
    ),
]


def by_name(feature: Feature) -> str:
    return feature.name


def test_the_table_is_whole() -> None:
    assert len(FEATURES) == 57
    assert {feature.name for feature in FEATURES} >= set(NOT_ENFORCED)


@pytest.mark.parametrize("feature", FEATURES, ids=by_name)
def test_the_instances_are_what_they_say(feature: Feature) -> None:
    draft = jsonschema.Draft7Validator if "draft-07" in json.dumps(feature.schema) else jsonschema.Draft202012Validator
    validator = draft(feature.schema, format_checker=jsonschema.FormatChecker())
    assert all(validator.is_valid(value) for value in feature.good)


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.name not in {*NOT_ENFORCED, ANNOTATION}], ids=by_name)
def test_enforced_exactly(feature: Feature) -> None:
    judge = Judge(feature.schema)
    assert judge.unenforced == []
    assert [value for value in feature.bad if judge.accepts_somehow(value)] == []
    assert [value for value in feature.good if not judge.accepts_somehow(value)] == []


def test_a_format_that_nothing_holds_is_an_annotation() -> None:
    (feature,) = [feature for feature in FEATURES if feature.name == ANNOTATION]
    for strict in (True, False):
        judge = Judge(feature.schema, strict=strict)
        assert all(judge.accepts(value) for value in feature.good)
        assert [(item.pointer, item.keyword) for item in judge.unenforced] == [("/format", "format")]


@pytest.mark.parametrize("name", NOT_ENFORCED)
def test_not_enforced_is_named(name: str) -> None:
    (feature,) = [feature for feature in FEATURES if feature.name == name]
    with pytest.raises(SchemaError) as error:
        Judge(feature.schema)
    assert (error.value.pointer, error.value.keyword) == NOT_ENFORCED[name]
    lenient = Judge(feature.schema, strict=False)
    assert [(item.pointer, item.keyword) for item in lenient.unenforced] == [NOT_ENFORCED[name]]
    assert all(lenient.accepts(value) for value in feature.good)
