"""Lowering JSON schemas: references, drafts, numbers, rewrites, and what is named as not enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.match import check_grammar
from pooled_mlx.grammar.schema import lower
from tests.unit.grammar_judge import Judge

CLOSED = {"type": "object", "additionalProperties": False}


def error_of(schema: Any, **options: Any) -> SchemaError:
    with pytest.raises(SchemaError) as error:
        lower(schema, **{"strict": True, **options})
    return error.value


def check(schema: Any, good: list[Any], bad: list[Any]) -> None:
    judge = Judge(schema)
    assert [value for value in good if not judge.accepts_somehow(value)] == []
    assert [value for value in bad if judge.accepts_somehow(value)] == []


# --- broken schemas


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ([], "", ""),
        ("string", "", ""),
        (None, "", ""),
        ({"properties": {"a": 5}}, "/properties/a", ""),
        ({"type": "objekt"}, "/type", "type"),
        ({"type": 5}, "/type", "type"),
        ({"type": []}, "/type", "type"),
        ({"type": ["string", "any"]}, "/type", "type"),
        ({"not": {"const": 1}, "type": [{}]}, "/type", "type"),
        ({"properties": []}, "/properties", "properties"),
        ({"required": "a"}, "/required", "required"),
        ({"required": [1]}, "/required", "required"),
        ({"enum": "a"}, "/enum", "enum"),
        ({"anyOf": {}}, "/anyOf", "anyOf"),
        ({"allOf": []}, "/allOf", "allOf"),
        ({"items": [{"type": "string"}]}, "/items", "items"),
        ({"minLength": -1}, "/minLength", "minLength"),
        ({"maxItems": 1.5}, "/maxItems", "maxItems"),
        ({"minimum": "1"}, "/minimum", "minimum"),
        ({"minimum": True}, "/minimum", "minimum"),
        ({"multipleOf": 0}, "/multipleOf", "multipleOf"),
        ({"pattern": 5}, "/pattern", "pattern"),
        ({"pattern": "("}, "/pattern", "pattern"),
        ({"patternProperties": {"[": {}}}, "/patternProperties/[", "patternProperties"),
        ({"format": 5}, "/format", "format"),
        ({"uniqueItems": "yes"}, "/uniqueItems", "uniqueItems"),
        ({"dependentRequired": {"a": "b"}}, "/dependentRequired/a", "dependentRequired"),
        ({"$ref": 5}, "/$ref", "$ref"),
        ({"properties": {"a/b": {"$ref": "#/$defs/no"}}}, "/properties/a~1b/$ref", "$ref"),
        ({"$ref": "#nothing"}, "/$ref", "$ref"),
        ({"$ref": "#/$defs/x", "$defs": {"x": 5}}, "/$ref", "$ref"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_broken_schemas_name_the_place(schema: Any, pointer: str, keyword: str, strict: bool) -> None:
    error = error_of(schema, strict=strict, where="/x")
    assert (error.pointer, error.keyword) == ("/x" + pointer, keyword)
    assert "Traceback" not in error.message


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"not": {}},
        {"$ref": "#"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "pattern": "^a$", "maxLength": 0},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_schema_that_no_finite_value_meets_is_refused(schema: Any) -> None:
    assert "finite value" in error_of(schema).message or "Unsatisfiable" in error_of(schema).message


@pytest.mark.parametrize("schema", [True, {}, {"description": "anything"}])
def test_every_value_is_allowed(schema: Any) -> None:
    check(schema, [None, True, 1, "x", [1], {"a": {}}], [])


# --- references


def test_recursion_through_properties_and_items() -> None:
    node = {**CLOSED, "properties": {"v": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    schema = {"$defs": {"n": {**node, "required": ["v", "kids"]}}, "$ref": "#/$defs/n"}
    leaf = {"v": "x", "kids": []}
    check(schema, [leaf, {"v": "", "kids": [leaf, {"v": "y", "kids": [leaf]}]}], [{"v": "x"}, {"v": "x", "kids": [{}]}])


def test_a_reference_to_the_root() -> None:
    check({**CLOSED, "properties": {"a": {"$ref": "#"}}}, [{}, {"a": {"a": {}}}], [{"a": 1}, {"b": {}}])


def test_a_reference_into_a_property() -> None:
    tree = {"anyOf": [{**CLOSED, "properties": {"l": {"$ref": "#/properties/tree/anyOf/0"}}}, {"type": "null"}]}
    check({**CLOSED, "properties": {"tree": tree}}, [{"tree": {"l": {}}}, {"tree": None}], [{"tree": {"l": None}}])


def test_escaped_pointers_anchors_and_ids() -> None:
    defs = {
        "a/b~c%": {"type": "integer"},
        "n": {"$anchor": "named", "type": "string"},
        "i": {"$id": "http://x/i", "type": "null"},
    }
    check({"$defs": defs, "$ref": "#/$defs/a~1b~0c%25"}, [1], ["x"])
    check({"$defs": defs, "$ref": "#named"}, ["x"], [1])
    check({"$defs": defs, "$ref": "http://x/i"}, [None], [1])


def test_a_reference_counts_together_with_its_siblings() -> None:
    schema = {"$defs": {"s": {"type": "string", "minLength": 2}}, "$ref": "#/$defs/s", "maxLength": 3}
    check(schema, ["ab", "abc"], ["a", "abcd", 1])


def test_only_definitions_in_use_are_kept() -> None:
    schema = {"$defs": {"used": {"type": "integer"}, "unused": {"type": "objekt"}}, "$ref": "#/$defs/used"}
    assert lower(schema, strict=True).schema == {"$ref": "#/$defs/d0", "$defs": {"d0": {"type": "integer"}}}


def test_an_optional_property_that_can_never_be_there_is_never_there() -> None:
    schema = {**CLOSED, "properties": {"a": {"$ref": "#/$defs/x"}, "b": True}, "$defs": {"x": {"not": {}}}}
    check(schema, [{}, {"b": 1}], [{"a": 1}])
    endless = {**CLOSED, "properties": {"next": {"$ref": "#/$defs/e"}, "b": True}}
    defs = {"e": {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}}
    check({**endless, "$defs": defs}, [{"b": 1}], [{"next": {"e": {}}}])


@pytest.mark.parametrize("reference", ["http://169.254.169.254/x", "file:///etc/passwd", "other.json#/a"])
def test_nothing_is_fetched(reference: str) -> None:
    assert error_of({"items": {"$ref": reference}}).pointer == "/items/$ref"
    lowered = lower({"items": {"$ref": reference}}, strict=False)
    assert [(item.pointer, item.keyword) for item in lowered.unenforced] == [("/items/$ref", "$ref")]


def test_dynamic_references_of_one_document() -> None:
    tree = {"$dynamicAnchor": "t", **CLOSED, "properties": {"kids": {"type": "array", "items": {"$dynamicRef": "#t"}}}}
    check(tree, [{"kids": [{"kids": []}]}], [{"kids": [1]}])


# --- drafts


def test_draft_7() -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    pair = {"items": [{"type": "string"}, {"type": "integer"}], "additionalItems": False, "minItems": 2}
    check({**draft, "type": "array", **pair}, [["a", 1]], [[1, "a"], ["a", 1, 2], ["a"]])
    check({**draft, "definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s", "maxLength": 1}, ["abc"], [1])
    check({**draft, **CLOSED, "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}])


def test_draft_4() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True}
    check(schema, [4], [3])


def test_tuples_in_items_are_forgiven_in_tools() -> None:
    lowered = lower({"type": "array", "items": [{"type": "string"}]}, strict=False, tool=True)
    assert lowered.schema == {"type": "array", "prefixItems": [{"type": "string"}]}


def test_an_unknown_dialect_is_named() -> None:
    assert error_of({"$schema": "http://example.com/mine", "type": "string"}).keyword == "$schema"


# --- numbers and values


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 2**53 + 1, 1e30, float("nan"), float("inf"), "\ud800", [[2**60]]])
def test_values_that_cannot_be_spelled_exactly_are_named(value: Any) -> None:
    for schema in ({"const": value}, {"enum": [1, value]}):
        (keyword,) = schema
        assert error_of(schema).pointer == f"/{keyword}"
        assert [item.keyword for item in lower(schema, strict=False).unenforced] == [keyword]


@pytest.mark.parametrize("value", [0, -5, 2**53, -(2**53), 0.1, 1.5, "é日本🙂", 'a"b\\', {"b": [1, None], "a": {}}])
def test_values_are_forced_exactly(value: Any) -> None:
    check({"const": value}, [value], [None, "x", 7])


def test_a_condition_on_an_infinite_number() -> None:
    schema = {"enum": [1, float("inf")], "not": {"const": 1}}
    assert [item.keyword for item in lower(schema, strict=False).unenforced] == ["enum"]


def test_values_nested_too_deep_are_named() -> None:
    value: Any = 1
    for _ in range(40):
        value = [value]
    assert error_of({"const": value}).keyword == "const"


def test_the_ends_of_64_bit_integers_are_bounds() -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    check(schema, [0, 10**18, -(10**18), 2**62], [10**19, -(10**19)])
    check({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 10**18], [-1])


def test_bounds_that_are_no_floats_move_inwards() -> None:
    lowered = lower({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5}, strict=True).schema
    assert lowered["minimum"] == 2**53 + 2
    assert lowered["maximum"] == 2**53 + 4


def test_bounds_beyond_are_named() -> None:
    assert error_of({"type": "number", "minimum": 1, "maximum": 1e300}).pointer == "/maximum"


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"exclusiveMinimum": 2, "maximum": 2.5}, [2.1, 2.5, 2.001], [2, 2.6]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, [0.1, 0.499], [0, 0.5]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, [-0.5, -0.1], [0, -0.6]),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, [-2.1, -2.5], [-2, -3]),
        ({"minimum": 1.5, "exclusiveMaximum": 2}, [1.5, 1.99], [2, 1.4]),
        ({"exclusiveMinimum": 0}, [1, 0.1, 0.0001], [0, -1]),
    ],
)
def test_exclusive_bounds_next_to_fractions(bounds: dict[str, float], good: list[float], bad: list[float]) -> None:
    check({"type": "number", **bounds}, good, bad)
    low = {key: value for key, value in bounds.items() if "Min" in key or key == "minimum"}
    high = {key: value for key, value in bounds.items() if key not in low}
    check({"allOf": [{"type": "number", **low}, high]} if high else {"type": "number", **low}, good, bad)


def test_multiples() -> None:
    check({"type": "integer", "multipleOf": 1.5}, [0, 3, -6], [1, 2])
    check({"type": "number", "multipleOf": 0.01}, [0.5, 1, 12.25], [0.001])


# --- rewrites


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"], "not": {"enum": ["a", "ab"]}}, ["", "b", "abc", None], ["a", "ab"]),
        ({"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
        ({"type": "integer", "not": {"minimum": 3}}, [2], [3]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"type": "object", "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, [{}, {"a": 2}], [{"a": 1}]),
        ({"type": "array", "not": {"maxItems": 1}}, [[1, 2]], [[], [1]]),
        ({"not": {"type": ["number", "object"]}}, ["x", None, []], [1, 1.5, {}]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["b", "a"]], [["a", "a"]]),
        (
            {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
            [[True, False]],
            [[True], [True] * 2],
        ),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
        ({"type": "array", "contains": {"const": 1}, "maxItems": 3}, [[1], [2, 1], [0, 0, 1]], [[], [2, 3]]),
        ({"type": "array", "contains": {"const": 1}, "maxItems": 3, "maxContains": 1}, [[1, 0]], [[1, 1], [0]]),
        ({"type": "array", "contains": True, "minContains": 2}, [[1, 2]], [[1]]),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, [{}, {"a": 1}], [{"A": 1}, {"ab": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1, "b": 2}], [{"c": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        ({"type": "object", "propertyNames": {"type": "string"}}, [{"x": 1}], [1]),
        ({"properties": {"a": {}}, "minProperties": 1, "type": "object"}, [{"a": 1, "b": 2}, {"c": 1, "d": 1}], [{}]),
        ({"required": ["a"], "minProperties": 2, "type": "object"}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1, "type": "object"}, [{}, {"b": 1}], [{"a": 1, "b": 2}]),
        ({"dependentRequired": {"a": ["b"]}, "type": "object"}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"maxProperties": 1}}, "type": "object"}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
        (
            {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}], "unevaluatedProperties": False, "type": "object"},
            [{"a": 1, "b": 2}],
            [{"c": 1}],
        ),
        ({"prefixItems": [{}], "allOf": [{"prefixItems": [{}, {}]}], "unevaluatedItems": False}, [[1, 2]], [[1, 2, 3]]),
    ],
)
def test_keywords_that_the_engine_does_not_have(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    check(schema, good, bad)


def test_one_of_many_alternatives_told_apart_by_a_tag() -> None:
    kinds = [
        {**CLOSED, "properties": {"kind": {"const": f"k{i}"}, "x": {"type": "integer"}}, "required": ["kind"]}
        for i in range(40)
    ]
    schema = {"oneOf": kinds}
    check(schema, [{"kind": "k0", "x": 1}, {"kind": "k39"}], [{"kind": "k40"}, {"x": 1}])


def test_one_of_is_any_of_in_tools() -> None:
    schema = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}
    check(schema, [-2, 10], [0, 9])
    assert "anyOf" in lower(schema, strict=False, tool=True).schema


def test_a_condition_on_a_tag() -> None:
    schema = {
        **CLOSED,
        "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]},
        "else": {"not": {"required": ["x"]}},
    }
    check(schema, [{"kind": "a", "x": 1}, {"kind": "b"}], [{"kind": "a"}, {"kind": "b", "x": 1}])


def test_alternatives_told_apart_by_a_tag_in_what_the_parent_leaves() -> None:
    a = {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}}
    b = {"properties": {"kind": {"const": "b"}, "y": {"type": "integer"}}}
    good = [{"kind": "a", "x": 1}, {"kind": "b", "y": 2}]
    bad = [{"kind": "a", "y": 1}, {"kind": "b", "x": 1}, {"kind": "a"}, {"x": 1}]
    tag = {"kind": {"enum": ["a", "b"]}}
    ones = [{**a, "required": ["kind", "x"]}, {**b, "required": ["kind", "y"]}]
    check({"type": "object", "properties": tag, "oneOf": ones}, good, bad)
    ones = [{**a, "required": ["x"]}, {**b, "required": ["y"]}]
    check({"type": "object", "properties": tag, "required": ["kind"], "oneOf": ones}, good, bad)


@pytest.mark.parametrize("strict", [True, False])
def test_references_in_a_circle_beside_an_alternative_that_takes_everything(strict: bool) -> None:
    schema = {"anyOf": [{"$ref": "#/definitions/a"}, {}], "definitions": {"a": {"$ref": "#"}}, "type": "object"}
    lowered = lower(schema, strict=strict)
    assert lowered.unenforced == ()
    assert check_grammar(f"%llguidance {{}}\nstart: %json {json.dumps(lowered.schema)}\n") == ""


def test_what_is_too_large_together_is_named_by_the_users_own_keywords() -> None:
    ifs = [
        {"if": {"properties": {f"k{i}": {"const": True}}, "required": [f"k{i}"]}, "then": {"required": [f"v{i}"]}}
        for i in range(8)
    ]
    needs = {"type": "object", "dependentRequired": {f"k{i}": [f"v{i}"] for i in range(12)}}
    overlapping = {
        "type": "object",
        "allOf": [{"patternProperties": {name: {"minimum": least}}} for least, name in enumerate(("^a", "b$", "c"))],
    }
    for schema, keyword in (
        ({"type": "object", "allOf": ifs}, "allOf"),
        (needs, "dependentRequired"),
        (overlapping, "allOf"),
    ):
        lowered = lower(schema, strict=False, where="/w")
        assert {(item.pointer, item.keyword) for item in lowered.unenforced} == {(f"/w/{keyword}", keyword)}
        assert not any(word in item.why for item in lowered.unenforced for word in ("panic", "::", "regexes"))
        refused = error_of(schema, where="/w")
        assert (refused.pointer, refused.keyword) == (f"/w/{keyword}", keyword)
        assert "panic" not in refused.message
        assert check_grammar(f"%llguidance {{}}\nstart: %json {json.dumps(lowered.schema)}\n") == ""


# --- what is not enforced


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"pattern": "(?=x)"}, "pattern"),
        ({"minProperties": 2}, "minProperties"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"contains": {"type": "integer"}}, "contains"),
        ({"not": {"pattern": "x"}}, "not"),
        ({"patternProperties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, "patternProperties"),
        (
            {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
            "unevaluatedProperties",
        ),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
    ],
)
def test_strict_refuses_and_lenient_lists(schema: dict[str, Any], keyword: str) -> None:
    nested = {"type": "object", "properties": {"p": schema}}
    error = error_of(nested, where="/w")
    assert (error.pointer, error.keyword) == (f"/w/properties/p/{keyword}", keyword)
    lowered = lower(nested, strict=False, where="/w")
    assert [(item.pointer, item.keyword) for item in lowered.unenforced] == [(f"/w/properties/p/{keyword}", keyword)]
    assert all(item.why for item in lowered.unenforced)


def test_the_rest_of_a_lenient_schema_is_held() -> None:
    schema = {**CLOSED, "properties": {"a": {"type": "string", "pattern": "(?!x)", "maxLength": 2}}, "required": ["a"]}
    judge = Judge(schema, strict=False)
    assert judge.accepts({"a": "xy"})
    assert not judge.accepts({"a": "xyz"})
    assert not judge.accepts({})


def test_nothing_false_follows_from_what_is_not_held() -> None:
    # the complement of a condition that is held in part would be too narrow
    schema = {"type": "object", "if": {"properties": {"a": {"uniqueItems": True}}}, "then": {"required": ["b"]}}
    judge = Judge(schema, strict=False)
    assert judge.accepts({"a": [1, 1]})
    assert {item.keyword for item in judge.unenforced} == {"uniqueItems", "if"}


def test_a_lowered_schema_is_plain_json() -> None:
    lowered = lower({"not": {"const": 1}, "oneOf": [{"type": "integer"}, {"type": "string"}]}, strict=True)
    assert json.loads(json.dumps(lowered.schema)) == lowered.schema


def test_a_part_that_stays_refused_when_all_of_it_is_dropped() -> None:
    # a reference with siblings to itself: the engine refuses it whatever is taken out beside it
    schema = {
        "type": "array",
        "anyOf": [{"$ref": "#"}, {"type": "number", "anyOf": [True, {"minimum": 3, "oneOf": [{}, {}]}]}],
        "dependentRequired": {"a": ["a"]},
        "properties": {"b": {"allOf": [{"type": "object", "minItems": 3}], "required": ["c", "b"]}},
    }
    (named,) = [item for item in lower(schema, strict=False).unenforced if item.keyword == "schema"]
    assert named.why == "the grammar engine cannot hold it"
