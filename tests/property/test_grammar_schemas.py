"""Random schemas against random values: the grammar and jsonschema agree, whatever keywords come together."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.keywords import KEYWORDS
from pooled_mlx.grammar.match import Constraint
from pooled_mlx.grammar.patterns import PatternError, none_of, translate
from pooled_mlx.grammar.schema import lower
from tests.data.tool_sets import agent_sets, tool_set
from tests.shared_data import shared_path
from tests.unit.grammar_judge import TOKENIZER, Judge, build

NAMES = ("a", "b", 'c"', "é")
STRINGS = ("", "a", "b", "ab", "abc", 'a"', "\\", "a\nb", 'é"b', "xyz", "1")
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, 2, 3, 5, -1, 10, 2.5, 0.5, *STRINGS)
TYPES: tuple[Any, ...] = (
    *("string", "integer", "number", "boolean", "null", "array", "array", "object", "object"),
    *(["string", "null"], ["integer", "string"], ["object", "array"]),
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SINGLE = ("items", "not", "unevaluatedProperties", "unevaluatedItems", "additionalProperties", "contains")


class Schemas:
    """A source of random schemas and values."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.makers: dict[str, Callable[[int], dict[str, Any]]] = {
            "enum": lambda _: {"enum": [self.value(1) for _ in range(self.rnd.randrange(1, 5))]},
            "const": lambda _: {"const": self.value(1)},
            "count": lambda _: {self.rnd.choice(COUNTS): self.rnd.randrange(4)},
            "bound": lambda _: {self.rnd.choice(BOUNDS): self.rnd.choice([-1, 0, 1, 2, 3, 2.5, 0.5, 10])},
            "multipleOf": lambda _: {"multipleOf": self.rnd.choice([1, 2, 0.5, 3])},
            "pattern": lambda _: {"pattern": self.rnd.choice(["^a", "b$", "^[a-b]*$", '^[^"]*$', r"[^\\]$", "^.{2}$"])},
            "required": lambda _: {"required": self.names()},
            "closed": lambda _: {"additionalProperties": False},
            "properties": lambda depth: {"properties": {name: self.sub(depth) for name in self.names()}},
            "more properties": lambda depth: {"properties": {name: self.sub(depth) for name in self.names()}},
            "patternProperties": lambda depth: {"patternProperties": {self.rnd.choice(["^a", "b$"]): self.sub(depth)}},
            "single": lambda depth: {self.rnd.choice(SINGLE): self.sub(depth)},
            "prefixItems": lambda depth: {"prefixItems": [self.sub(depth) for _ in range(self.rnd.randrange(1, 3))]},
            "unique": lambda _: {"uniqueItems": True},
            "group": lambda depth: {self.rnd.choice(["allOf", "anyOf", "oneOf"]): self.subs(depth)},
            "if": lambda depth: {"if": self.sub(depth), "then": self.sub(depth), "else": self.sub(depth)},
            "$ref": lambda _: {"$ref": self.rnd.choice(["#/$defs/A", "#/$defs/B", "#"])},
            "dependentRequired": lambda _: {"dependentRequired": {self.rnd.choice(NAMES): self.names()}},
            "dependentSchemas": lambda depth: {"dependentSchemas": {self.rnd.choice(NAMES): self.sub(depth)}},
            "propertyNames": lambda _: {
                "propertyNames": self.rnd.choice([{"pattern": "^a"}, {"maxLength": 1}, {"enum": ["a", "b"]}])
            },
        }

    def names(self) -> list[str]:
        return [name for name in NAMES if self.rnd.random() < 0.45]

    def subs(self, depth: int) -> list[Any]:
        return [self.sub(depth) for _ in range(self.rnd.randrange(1, 4))]

    def sub(self, depth: int) -> Any:
        return self.rnd.random() < 0.5 if self.rnd.random() < 0.07 else self.schema(depth + 1)

    def schema(self, depth: int = 0) -> dict[str, Any]:
        made: dict[str, Any] = {"type": self.rnd.choice(TYPES)} if self.rnd.random() < 0.6 else {}
        for _ in range(self.rnd.choice([0, 1, 1, 2, 2, 3]) if depth < 3 else 0):
            made |= self.makers[self.rnd.choice(list(self.makers))](depth)
        if depth == 0 and "$ref" in json.dumps(made):
            made["$defs"] = {"A": self.schema(2), "B": self.schema(2)}
        return made

    def value(self, depth: int = 0) -> Any:
        kind = self.rnd.random()
        if depth > 2 or kind < 0.65:
            return self.rnd.choice(SCALARS)
        if kind < 0.8:
            return [self.value(depth + 1) for _ in range(self.rnd.randrange(4))]
        return {name: self.value(depth + 1) for name in self.names()}

    def near(self, value: Any) -> Any:
        """The value with one thing changed."""
        if isinstance(value, dict) and value and self.rnd.random() < 0.8:
            name = self.rnd.choice(list(value))
            if self.rnd.random() < 0.3:
                return {key: item for key, item in value.items() if key != name}
            return {**value, self.rnd.choice([name, *NAMES]): self.near(value[name])}
        if isinstance(value, list) and value and self.rnd.random() < 0.8:
            index = self.rnd.randrange(len(value))
            return [*value[:index], *([self.near(value[index])] * self.rnd.randrange(3)), *value[index + 1 :]]
        return self.value(1)


def walk(held: Constraint, rnd: random.Random) -> str | None:
    """A random text that the grammar calls complete; None where the walk gets too long."""
    mask = np.zeros(TOKENIZER.mask_words, dtype=np.uint32)
    out = bytearray()
    while len(out) < 300:
        held.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask[:8].view(np.uint8), bitorder="little")).tolist()
        if held.may_end() and (not allowed or rnd.random() < 0.3):
            return out.decode()
        likely = [byte for byte in allowed if byte in b'"}],:ab01{[\\n']
        byte = rnd.choice(likely if likely and rnd.random() < 0.9 else allowed)
        held.consume(byte)
        out.append(byte)
    return None


def walks(judge: Judge, rnd: random.Random, count: int) -> Iterator[Any]:
    for _ in range(count):
        text = walk(judge.grammar.matcher(), rnd)
        if text is not None and "Infinity" not in json.dumps(json.loads(text)):
            yield json.loads(text)


def is_valid(validator: jsonschema.Draft202012Validator, value: Any) -> bool | None:
    """None where jsonschema itself does not come to an end (a schema that refers to itself at once)."""
    try:
        return validator.is_valid(value)
    except BaseException as error:
        if "Recursion" in repr(error):
            return None
        raise


def few_names(value: Any) -> bool:
    """True where all orders of the keys can be tried."""
    if isinstance(value, dict):
        return len(value) <= 4 and all(map(few_names, value.values()))
    return not isinstance(value, list) or all(map(few_names, value))


@pytest.mark.parametrize("seed", range(6))
def test_grammar_and_validator_agree(seed: int) -> None:
    source = Schemas(seed)
    held = 0
    for _ in range(60):
        schema = source.schema()
        try:
            judge = Judge(schema)
        except SchemaError:
            continue
        held += 1
        validator = jsonschema.Draft202012Validator(schema)
        found = list(walks(judge, source.rnd, 3))
        values = [source.value() for _ in range(6)] + found + [source.near(value) for value in found]
        for value in values:
            valid = is_valid(validator, value)
            if valid is None:
                break
            if judge.accepts(value):
                assert valid, (schema, value)
            elif valid and few_names(value) and not re.search(r"[0-9]e-|\\u007f", json.dumps(value)):
                assert judge.accepts_somehow(value), (schema, value)
    assert held > 30


@pytest.mark.parametrize("seed", range(3))
def test_what_is_dropped_never_refuses_a_valid_value(seed: int) -> None:
    source = Schemas(1000 + seed)
    looked_at = 0
    for _ in range(150):
        schema = source.schema()
        try:
            judge = Judge(schema, strict=False)
        except SchemaError:
            continue
        if not judge.unenforced:
            continue
        looked_at += 1
        validator = jsonschema.Draft202012Validator(schema)
        for value in [source.value() for _ in range(10)]:
            if is_valid(validator, value) and few_names(value):
                assert judge.accepts_somehow(value), (schema, value)
    assert looked_at > 5


GARBAGE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, float("inf"), float("nan"), 10**30, "", "x", "#", "#/a/b", "(", [], [1], [[]], [{}], {}),
    *({"a": 1}, {"$ref": "#"}, {"type": []}, {"": {}}, ["a", 1]),
]


def damaged(rnd: random.Random, schema: Any) -> Any:
    """The schema with some parts replaced by things that do not belong there."""
    if rnd.random() < 0.15:
        return rnd.choice(GARBAGE)
    if isinstance(schema, dict):
        result = {key: damaged(rnd, value) if rnd.random() < 0.4 else value for key, value in schema.items()}
        if rnd.random() < 0.3:
            result[rnd.choice([*KEYWORDS, "$defs", "$id", "$anchor", "$schema", "then", "maxContains"])] = rnd.choice(GARBAGE)
        return result
    return [damaged(rnd, item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("seed", range(4))
def test_damaged_schemas_are_lowered_or_refused_and_nothing_else(seed: int) -> None:
    source = Schemas(2000 + seed)
    refused = 0
    for _ in range(250):
        schema = damaged(source.rnd, source.schema())
        for options in ({"strict": True}, {"strict": False}, {"strict": False, "tool": True}):
            try:
                lower(schema, **options)
            except SchemaError:
                refused += 1
    assert 100 < refused < 750


PIECES = [
    "a",
    "b",
    '"',
    r"\\",
    r"\x1f",
    r"\n",
    ".",
    r"\d",
    r"\w",
    r"[^a]",
    "[[a]",
    "[a&&b]",
    "[a-c]",
    r"[\w-]",
    "é",
    "{",
    "}",
    "/",
]
INSIDE = ["a", '"', r"\\", r"\x00-\x1f", r"\n", r"\s", r"\S", r"\D", "0-9", "é", "/", "!-~", r"\]", "-", "["]


def expression(rnd: random.Random, depth: int = 0) -> str:
    kind = rnd.random()
    if depth > 2 or kind < 0.45:
        if rnd.random() < 0.5:
            return rnd.choice(PIECES)
        return "[" + rnd.choice(["", "^"]) + "".join(rnd.choice(INSIDE) for _ in range(rnd.randrange(1, 4))) + "]"
    if kind < 0.65:
        return expression(rnd, depth + 1) + expression(rnd, depth + 1)
    if kind < 0.85:
        return f"(?:{expression(rnd, depth + 1)}|{expression(rnd, depth + 1)})"
    return f"({expression(rnd, depth + 1)}){rnd.choice(['*', '+', '?', '{2}', '{1,3}', '*?'])}"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("seed", range(4))
def test_patterns_match_what_python_matches(seed: int) -> None:
    rnd = random.Random(seed)
    compared = 0
    for _ in range(150):
        pattern = rnd.choice(["", "^"]) + expression(rnd) + rnd.choice(["", "$"])
        try:
            expected = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
            judge = Judge({"type": "string", "pattern": pattern})
        except (re.error, SchemaError):
            continue
        for _ in range(20):
            # the spare character and the carriage return are treated on purpose in another way
            text = "".join(rnd.choice('"\\ab0\n\t é/-c{}[]&') for _ in range(rnd.randrange(5)))
            assert judge.accepts(text) == bool(expected.search(text)), (pattern, text)
            compared += 1
    assert compared > 500


@pytest.mark.parametrize("seed", range(3))
def test_a_complement_is_one(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(15):
        texts = ["".join(rnd.choice('ab"\\é') for _ in range(rnd.randrange(4))) for _ in range(rnd.randrange(1, 5))]
        schema = json.dumps({"type": "string", "pattern": none_of(texts)})
        grammar = build(TOKENIZER, f"%llguidance {{}}\nstart: %json {schema}\n")
        judge = Judge({})
        judge.grammar = grammar
        for _ in range(25):
            text = "".join(rnd.choice('ab"\\é\n') for _ in range(rnd.randrange(5)))
            assert judge.accepts(text) == (text not in texts), (texts, text)


@pytest.mark.parametrize("seed", range(3))
def test_translate_never_raises_anything_else(seed: int) -> None:
    rnd = random.Random(seed)
    refused = 0
    for _ in range(2000):
        pattern = "".join(rnd.choice(r"ab()[]{}*+?|^$\.,-:=!<>dwpLuxk0123é") for _ in range(rnd.randrange(12)))
        try:
            translate(pattern)
        except PatternError as error:
            refused += bool(error.why)
    assert 100 < refused < 2000


def _tool_schemas() -> Iterator[tuple[str, Any]]:
    for client, tools in agent_sets(shared_path("traces")).items():
        for tool in tools:
            yield f"{client}/{tool.name}", tool.parameters


def test_every_schema_of_real_agents_is_held_whole() -> None:
    rnd = random.Random(7)
    complete = 0
    for name, schema in {json.dumps(schema): (name, schema) for name, schema in _tool_schemas()}.values():
        lowered = lower(schema, strict=False, tool=True, verify=True)
        assert lowered.unenforced == (), name
        grammar = build(TOKENIZER, f"%llguidance {{}}\nstart: %json {json.dumps(lowered.schema)}\n")
        validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema).replace('"oneOf"', '"anyOf"')))
        for _ in range(2):
            text = walk(grammar.matcher(), rnd)
            if text is not None:
                complete += 1
                assert validator.is_valid(json.loads(text)), (name, text)
    assert complete > 60


@pytest.mark.parametrize("name", ["ten", "hundred"])
def test_made_tool_sets_are_held_whole(name: str) -> None:
    rnd = random.Random(7)
    for tool in tool_set(name):
        assert isinstance(tool.parameters, dict)
        judge = Judge(tool.parameters)
        validator = jsonschema.Draft7Validator(tool.parameters)
        assert all(validator.is_valid(value) for value in walks(judge, rnd, 1))
