"""Hostile schemas: bounded time, a clear refusal, and a process that lives on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pooled_mlx.grammar import isolated, lint
from pooled_mlx.grammar.errors import SchemaError
from pooled_mlx.grammar.isolated import Isolated
from pooled_mlx.grammar.memo import Memo
from pooled_mlx.grammar.schema import lower


def nested(levels: int, wrap: Any, inner: Any) -> Any:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def deep(levels: int) -> Any:
    return nested(levels, lambda item: {"type": "array", "items": item}, {"type": "string"})


def refusal(schema: Any, **options: Any) -> str:
    with pytest.raises(SchemaError) as error:
        lower(schema, **{"strict": False, **options})
    return error.value.message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(50_000)}}, "10000 nodes (limit 10000)"),
        ({"enum": [f"v{i}" for i in range(100_000)]}, "enum has 100000 entries (limit 1000)"),
        ({"anyOf": [{"const": i} for i in range(65)]}, "anyOf has 65 entries (limit 64)"),
        ({"oneOf": [{"const": i} for i in range(65)]}, "oneOf has 65 entries (limit 64)"),
        ({"allOf": [{"minLength": i} for i in range(65)]}, "allOf has 65 entries (limit 64)"),
        ({"patternProperties": {f"^a{i}$": {} for i in range(65)}}, "patternProperties has 65 entries (limit 64)"),
        (deep(33), "33 levels deep here (limit 32)"),
        (deep(5000), "33 levels deep here (limit 32)"),
        (nested(6, lambda item: {"oneOf": [item] * 6}, {"type": "integer"}), "10000 nodes (limit 10000)"),
        ({"type": "integer", "multipleOf": 999983}, "999983 (limit 10000)"),
        ({"type": "number", "multipleOf": 0.123456789}, "123456789 (limit 10000)"),
        ({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83)]}, "716539 (limit 10000)"),
        (
            {"$defs": {"m": {"multipleOf": 101}}, "$ref": "#/$defs/m", "type": "integer", "multipleOf": 103},
            "10403 (limit 10000)",
        ),
        ({"type": "string", "pattern": "(" * 60_000}, "60000 characters (limit 4000)"),
        ({"type": "string", "pattern": "(a{0,500}){0,500}(b{0,500}){0,500}"}, "250000 (limit 100000)"),
    ],
)
def test_caps_are_in_the_message(schema: Any, message: str) -> None:
    for strict in (True, False):
        assert message in refusal(schema, strict=strict)


@pytest.mark.parametrize(
    "schema",
    [
        deep(31),
        {"enum": list(range(1000))},
        {"anyOf": [{"const": i} for i in range(64)]},
        {"type": "integer", "multipleOf": 10_000},
        {"type": "number", "multipleOf": 1e-9},
        {"type": "string", "maxLength": 65_536},
        {"type": "string", "pattern": "^(x+x+)+y$"},
        {"type": "string", "pattern": "^[ab]*a[ab]{20}c$"},
        {"type": "string", "pattern": "^\\p{L}{1,5000}$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "object", "properties": {}},
        {"default": deep(3000), "type": "string"},
    ],
)
def test_large_but_harmless_schemas_are_held(schema: Any) -> None:
    assert lower(schema, strict=True).unenforced == ()


def test_a_cap_of_a_pattern_costs_a_tool_the_pattern_only() -> None:
    lowered = lower({"type": "string", "pattern": "a{1,999999}", "maxLength": 3}, strict=False, tool=True)
    assert lowered.schema == {"type": "string", "maxLength": 3}
    assert [item.keyword for item in lowered.unenforced] == ["pattern"]


def test_intersections_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = Isolated(deadline_seconds=0.2)
    monkeypatch.setattr(isolated, "shared", lambda: impatient)
    monkeypatch.setattr(isolated, "answers", Memo(100, 10_000))
    try:
        schema = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}
        assert "compiling takes longer than 0.2 seconds" in refusal(schema, strict=True)
        (named,) = lower(schema, strict=False).unenforced
        assert (named.keyword, named.why) == ("schema", "compiling takes longer than 0.2 seconds")
        # the child was replaced
        assert lower({"type": "string", "pattern": "^a", "minLength": 2}, strict=True).unenforced == ()
    finally:
        impatient.close()


def test_a_chain_of_references_that_would_overflow_the_stack_is_refused() -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    schema = {"$defs": {**chain, "d4000": {"type": "string"}}, "$ref": "#/$defs/d0"}
    assert "gave up on it" in refusal(schema, strict=True)
    assert lower({"type": "string", "pattern": "^b", "minLength": 2}, strict=True).unenforced == ()


def test_the_child_says_what_the_engine_says() -> None:
    child = Isolated()
    try:
        assert child.check('%llguidance {}\nstart: "a"\n') == ""
        assert "missing" in child.check("%llguidance {}\nstart: missing\n")
        assert child.check('%llguidance {}\nstart: %json {"type": "string", "pattern": "é"}\n') == ""
    finally:
        child.close()


def test_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Child:
        def check(self, text: str) -> str:
            asked.append(text)
            return "no"

    monkeypatch.setattr(isolated, "shared", Child)
    monkeypatch.setattr(isolated, "answers", Memo(100, 10_000))
    assert [isolated.check(text) for text in ("a", "b", "a")] == ["no"] * 3
    assert asked == ["a", "b"]


def test_a_child_that_died_is_replaced() -> None:
    child = Isolated()
    try:
        assert child.check('%llguidance {}\nstart: "a"\n') == ""
        process = child._child
        assert process is not None
        process.kill()
        process.wait()
        assert child.check('%llguidance {}\nstart: "b"\n') == ""
        assert child._child is not process
    finally:
        child.close()


def test_a_child_that_cannot_start_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "gave up" in Isolated().check('%llguidance {}\nstart: "a"\n')


def test_closing_ends_the_child() -> None:
    child = Isolated()
    child.check('%llguidance {}\nstart: "a"\n')
    process = child._child
    assert isinstance(process, subprocess.Popen)
    child.close()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("multiple", "digits"), [(5, 5), (0.25, 25), (0.01, 1), (1e-9, 1), (2.0, 2), (12.5, 125), (100, 100), (1e22, 10**22)]
)
def test_coefficients(multiple: float, digits: int) -> None:
    assert lint.coefficient(multiple) == digits
