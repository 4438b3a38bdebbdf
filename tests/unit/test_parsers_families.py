"""What holds for the calls of every family: read whole, spelled, cut, broken, and held by a grammar."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.core.request import Tool, ToolChoice
from tests.answers import PATCH, READ, WRITE, Outcome, says
from tests.unit.test_chat_formats_grammar import NOOP, TOOLS, Grammar
from tests.written_calls import FAMILIES, Family

ALL = (READ, WRITE, PATCH, NOOP)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TYPED = Tool(
    "typed",
    parameters={
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "f": {"type": "number"},
            "b": {"type": "boolean"},
            "z": {"type": ["string", "null"]},
            "l": {"type": "array", "items": {"type": "string"}},
            "o": {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "integer"}}}},
        },
    },
)
TYPES = {"s": "5", "n": 5, "f": 2.5, "b": True, "z": None, "l": ["a, b", 'c"d'], "o": {"k": [1, 2]}}

families = pytest.mark.parametrize("name", sorted(FAMILIES))
spelled_too = pytest.mark.parametrize("spelled", [False, True])


def read(name: str, said: str, spelled: bool = False, **more: Any) -> Outcome:
    return says(said, name, more.pop("tools", ALL), tags=() if spelled else FAMILIES[name].tags, **more)


@families
@spelled_too
def test_calls_beside_text_and_thoughts(name: str, spelled: bool) -> None:
    family = FAMILIES[name]
    calls = [("read_file", {"path": "a"}), ("noop", {}), ("write_file", {"path": "b", "content": "é🙂\n\n x"})]
    opening, closing = family.think
    for said, thought, text in [
        (family.write(calls), "", ""),
        (f"Look:\n\n{family.write(calls)}", "", "Look:"),
        (f"{opening}hm{closing}\n\nLook:\n{family.write(calls)}\n", "hm", "Look:"),
        (f"{opening}\nhm{closing}{family.write(calls)}", "hm", ""),
    ]:
        outcome = read(name, said, spelled, may_think=True)
        assert outcome.calls == calls
        assert (outcome.reasoning, outcome.text, outcome.reason) == (thought, text, "tool_calls")
    assert read(name, f"hm{closing}\n{family.write(calls)}", spelled, thinking=True).reasoning == "hm"


@families
@spelled_too
@pytest.mark.parametrize("constrained", [False, True])
def test_values_keep_their_types(name: str, spelled: bool, constrained: bool) -> None:
    said = FAMILIES[name].one("typed", **TYPES)
    assert read(name, said, spelled, tools=(TYPED,), constrained=constrained).calls == [("typed", TYPES)]


@families
def test_a_custom_tools_text_arrives_raw(name: str) -> None:
    said = FAMILIES[name].one("apply_patch", input='*** Begin\n+"a" \\n\n')
    assert read(name, said).raw_calls == [("apply_patch", '*** Begin\n+"a" \\n\n')]


@families
@spelled_too
def test_what_is_no_call_is_text_whole(name: str, spelled: bool) -> None:
    family = FAMILIES[name]
    call = family.one("nope", path="a")
    beginning = family.one("read_file", path="a").partition("read_file")[0]
    for said in (call, f"See {call} there", beginning, f"{beginning} is how", beginning + "\n\n", f"a {beginning}nope"):
        outcome = read(name, said, spelled)
        assert (outcome.text, outcome.calls, outcome.reason) == (said, [], "stop")


@families
@spelled_too
def test_calls_that_may_not_be_made_are_text(name: str, spelled: bool) -> None:
    said = FAMILIES[name].one("read_file", path="a")
    assert read(name, said, spelled, tools=()).text == said
    assert read(name, said, spelled, tool_choice=ToolChoice("none")).text == said
    two = FAMILIES[name].write([("read_file", {"path": "a"}), ("read_file", {"path": "b"})])
    outcome = read(name, two, spelled, parallel_tool_calls=False)
    assert outcome.calls == [("read_file", {"path": "a"})]
    assert "read_file" in outcome.text
    assert "b" in outcome.text


@families
@spelled_too
def test_a_row_goes_on_behind_an_unknown_name(name: str, spelled: bool) -> None:
    said = FAMILIES[name].write([("read_file", {"path": "a"}), ("nope", {"path": "b"})])
    outcome = read(name, said, spelled)
    assert outcome.calls == [("read_file", {"path": "a"})]
    assert "nope" in outcome.text
    assert "b" in outcome.text


@families
@spelled_too
def test_a_call_cut_off(name: str, spelled: bool) -> None:
    said = FAMILIES[name].one("read_file", path="ab")
    cut = said[: said.index("ab") + 2]
    assert read(name, cut, spelled).calls == [("read_file", {"path": "ab"})]
    assert read(name, cut, spelled, ends="length").calls == []
    for end in range(len(said)):
        outcome = read(name, said[:end], spelled)
        assert outcome.calls or outcome.text == said[:end]


@families
def test_the_choice_of_tools_is_held(name: str) -> None:
    family = FAMILIES[name]
    weather, noop = family.one("get_weather", city="x"), family.one("noop")
    two = family.write([("noop", {}), ("noop", {})])

    def grammar(**more: Any) -> Grammar:
        return Grammar(name, tags=family.tags, **more)

    auto = grammar()
    assert all(map(auto.takes, ["", "hello", weather, noop, two, f"look{weather}"]))
    assert not any(map(auto.takes, [weather[:-1], family.one("nope"), family.one("get_weather", town="x")]))
    assert auto.takes(family.write([("noop", {})] * 16))
    assert not auto.takes(family.write([("noop", {})] * 17))
    required = grammar(tool_choice=ToolChoice("required"))
    assert (required.takes(weather), required.takes("hello"), required.takes("")) == (True, False, False)
    named = grammar(tool_choice=ToolChoice("named", "noop"))
    assert (named.takes(noop), named.takes(weather), named.takes(two)) == (True, False, False)
    none = grammar(tool_choice=ToolChoice("none"))
    assert (none.takes("hello"), none.takes(noop)) == (True, False)
    allowed = grammar(tool_choice=ToolChoice("auto", None, ("noop",)))
    assert (allowed.takes(noop), allowed.takes(weather)) == (True, False)
    single = grammar(parallel_tool_calls=False)
    assert (single.takes(noop), single.takes(two)) == (True, False)


@families
def test_a_format_of_the_answer_beside_calls_and_thoughts(name: str) -> None:
    family = FAMILIES[name]
    (opening, closing), gap = family.think, family.gap
    weather = family.one("get_weather", city="x")
    plain = Grammar(name, (), family.tags, schema=SCHEMA)
    assert (plain.takes('{"a": 1}'), plain.takes("hello"), plain.takes('{"a": "x"}')) == (True, False, False)
    both = Grammar(name, TOOLS, family.tags, schema=SCHEMA, thinking=True)
    assert both.takes(f'hm{closing}{gap}{{"a": 1}}')
    assert both.takes(f"hm{closing}{gap}{weather}")
    assert not both.takes(f"hm{closing}{gap}hello")
    may = Grammar(name, TOOLS, family.tags, schema=SCHEMA, may_think=True)
    assert (may.takes(f'{opening}hm{closing}{gap}{{"a": 1}}'), may.takes('{"a": 1}'), may.takes(weather)) == (True,) * 3


@families
@spelled_too
def test_values_are_held_to_their_schema(name: str, spelled: bool) -> None:
    family: Family = FAMILIES[name]
    grammar = Grammar(name, (*TOOLS, TYPED, PATCH), () if spelled else family.tags)
    good: list[dict[str, Any]] = [{"city": "São\n\"P\"\\ 'x'"}, {"city": "x", "unit": "c"}, {"city": "", "days": 3}]
    bad: list[dict[str, Any]] = [
        {},
        {"unit": "c"},
        {"city": "x", "unit": "k"},
        {"city": "x", "days": 0},
        {"unit": "c", "z": "1", "city": "x"},
    ]
    for given in good:
        assert grammar.takes(family.one("get_weather", **given)), given
    for given in bad:
        assert not grammar.takes(family.one("get_weather", **given)), given
    assert grammar.takes(family.one("typed", **TYPES))
    assert not grammar.takes(family.one("typed", n="x"))
    assert grammar.takes(family.one("apply_patch", input="*** a\n"))
