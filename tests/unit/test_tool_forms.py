"""The same tool set is rendered as it was seen first; another one is another one."""

import random
from dataclasses import replace

import numpy as np
import pytest

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.request import CustomGrammar, Request, Tool, Turn
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tool_forms import ToolForms
from pooled_mlx.replay.assets import replay_template
from tests.small_tokenizer import byte_level_tokens


def schema(*names: str) -> dict:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "enum": ["b", "a"], "description": name} for name in names},
        "required": list(names),
    }


READ = Tool("read", "Reads.", schema("path", "lines"))
WRITE = Tool("write", "Writes.", schema("path", "text"))
BASH = Tool("bash", "Runs.", schema("command"))


def reordered(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: reordered(item, rng) for key, item in items}
    return [reordered(item, rng) for item in value] if isinstance(value, list) else value


def forms(budget_bytes: int = 1 << 20) -> ToolForms:
    return ToolForms(lambda text: "<" not in text, lambda name: name != "odd", budget_bytes)


@pytest.mark.parametrize("seed", range(8))
def test_order_of_tools_and_keys_has_no_influence(seed: int) -> None:
    known = forms()
    first = known.form([READ, WRITE, BASH])
    assert [tool.name for tool in first.tools] == ["read", "write", "bash"]
    rng = random.Random(seed)
    shuffled = [replace(tool, parameters=reordered(tool.parameters, rng)) for tool in (READ, WRITE, BASH)]
    rng.shuffle(shuffled)
    again = known.form(shuffled)
    assert [tool.name for tool in again.tools] == ["read", "write", "bash"]
    assert [list(tool.parameters["properties"]) for tool in again.tools] == [["path", "lines"], ["path", "text"], ["command"]]
    assert str(again.listing) == str(first.listing)


def test_property_order_is_the_clients_own_where_the_set_is_new() -> None:
    tool = Tool("t", "", {"properties": {"z": {}, "a": {}}, "type": "object"})
    assert list(forms().form([tool]).tools[0].parameters["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    "other",
    [
        [READ, WRITE],
        [READ, WRITE, replace(BASH, description="Runs it.")],
        [READ, WRITE, replace(BASH, name="sh")],
        [READ, WRITE, replace(BASH, parameters=schema("command", "x"))],
        [READ, WRITE, replace(BASH, parameters={**schema("command"), "required": []})],
        [READ, WRITE, replace(BASH, parameters=None)],
        [READ, WRITE, replace(BASH, namespace="n")],
        [READ, WRITE, replace(BASH, custom=True, parameters=None, grammar=CustomGrammar("regex", "a"))],
        [replace(READ, parameters={**READ.parameters, "required": ["lines", "path"]}), WRITE, BASH],
    ],
)
def test_a_changed_set_is_another_set(other: list[Tool]) -> None:
    known = forms()
    known.form([BASH, WRITE, READ])
    form = known.form(other)
    assert form.tools == tuple(other)


def test_strict_is_that_of_the_request() -> None:
    known = forms()
    known.form([replace(READ, strict=True), WRITE])
    assert [(tool.name, tool.strict) for tool in known.form([WRITE, READ]).tools] == [("read", None), ("write", None)]


def test_the_memory_is_bounded_and_forgets_the_oldest_use() -> None:
    known = forms(budget_bytes=20_000)
    known.form([READ, WRITE])
    for number in range(50):
        known.form([Tool(f"t{number}", "x" * 300)])
        known.form([WRITE, READ])
        assert known.bytes <= 20_000
    assert [tool.name for tool in known.form([WRITE, READ]).tools] == ["read", "write"]
    small = forms(budget_bytes=10)
    small.form([READ, WRITE])
    assert [tool.name for tool in small.form([WRITE, READ]).tools] == ["write", "read"]
    assert small.bytes == 0


def test_clean_says_whether_a_text_needs_hiding() -> None:
    assert forms().form([READ]).clean
    assert not forms().form([replace(READ, description="<x>")]).clean
    assert not forms().form([replace(READ, name="odd")]).clean
    assert not forms().form([replace(READ, parameters={"properties": {"a": {"items": {"properties": {"odd": {}}}}}})]).clean
    assert forms().form([]).listing == ()


def test_prompt_and_grammar_see_the_same_order() -> None:
    card = ModelCard("t", "T", thinking=ThinkingRule(supported=True))
    build = PromptBuilder(byte_level_tokens(), ChatTemplate(replay_template()), card)
    turns = (Turn("user", "q"),)
    first = build.build(Request("r", turns, tools=(READ, WRITE, BASH)))
    second = build.build(Request("r", turns, tools=(BASH, WRITE, READ)))
    assert np.array_equal(first.ids, second.ids)
    assert first.tools == second.tools == (READ, WRITE, BASH)
    assert not np.array_equal(first.ids, build.build(Request("r", turns, tools=(READ, WRITE))).ids)
