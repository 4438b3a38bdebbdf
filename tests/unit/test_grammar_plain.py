"""The quick look at a schema never says that there is nothing to say when there is."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.grammar.plain import stripped
from pooled_mlx.grammar.schema import lower
from tests.data.tool_sets import SIZES, agent_sets, tool_set
from tests.property.test_grammar_schemas import Schemas
from tests.shared_data import shared_path


def _is_plain(schema: Any) -> bool:
    return stripped(schema) is not None


def test_everyday_tools_are_plain() -> None:
    assert all(_is_plain(tool.parameters) for name in SIZES for tool in tool_set(name))


def test_most_tools_of_real_agents_are_plain() -> None:
    looks = [_is_plain(tool.parameters) for tools in agent_sets(shared_path("traces")).values() for tool in tools]
    assert sum(looks) > 0.8 * len(looks)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        {"type": "objekt"},
        {"type": ["string"]},
        {"properties": []},
        {"properties": {"a": None}},
        {"items": [{}]},
        {"required": True},
        {"enum": []},
        {"enum": [2**60]},
        {"minimum": 0.5},
        {"maximum": True},
        {"minLength": -1},
        {"pattern": "x"},
        {"format": "date"},
        {"$ref": "#"},
        {"oneOf": [{}]},
        {"properties": {f"p{i}": {} for i in range(300)}},
    ],
)
def test_anything_unusual_is_not_plain(schema: Any) -> None:
    assert not _is_plain(schema)
    assert not _is_plain({"type": "object", "properties": {"deep": {"items": schema}}})


def test_deep_schemas_are_not_plain() -> None:
    schema: Any = {}
    for _ in range(40):
        schema = {"items": schema}
    assert not _is_plain(schema)


def test_what_is_plain_lowers_without_a_word() -> None:
    source = Schemas(5)
    plain = 0
    for _ in range(400):
        schema = source.schema()
        found = stripped(schema)
        if found is not None and not {"minLength", "minItems"} & set(str(schema).split("'")):
            plain += 1
            thorough = lower(schema, strict=False, verify=True)
            assert thorough.unenforced == ()
            assert thorough.schema == ({} if found is True else found)
    assert plain > 30


def test_annotations_are_gone_and_names_are_kept() -> None:
    noisy = {"type": "object", "title": "T", "properties": {"title": {"description": "d", "type": "string"}}, "required": []}
    assert stripped(noisy) == {"type": "object", "properties": {"title": {"type": "string"}}}
    assert stripped({"description": "anything"}) is True
