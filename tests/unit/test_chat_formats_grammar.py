"""What the grammars of whole answers accept and refuse, over a vocabulary of bytes and tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pooled_mlx import chat_formats
from pooled_mlx.chat_formats.base import AnswerSpec
from pooled_mlx.chat_formats.raw_values import whole_match, without
from pooled_mlx.core.request import CustomGrammar, Request, Tool, ToolChoice
from pooled_mlx.grammar.lark import LarkBuilder, SchemaError
from pooled_mlx.grammar.match import Constraint, GrammarTokenizer, build
from tests.answers import GLM_TAGS, HARMONY_TAGS, LLAMA_TAGS, MISTRAL_TAGS, TAGS, json_call, parts, xml_call

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "x"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 1},
        },
        "required": ["city"],
    },
)
NOOP = Tool("noop")
TOOLS = (WEATHER, NOOP)


class Grammar:
    """One compiled answer grammar."""

    def __init__(
        self,
        chat_format: str,
        tools: Sequence[Tool] = TOOLS,
        tags: Sequence[str] = TAGS,
        *,
        thinking: bool = False,
        may_think: bool = False,
        schema: Any = None,
        **request: Any,
    ) -> None:
        self.tags = tags
        tokenizer = GrammarTokenizer.of_bytes(tags)
        asked = Request("r", (), tools=tuple(tools), **request)
        self.lark = LarkBuilder(tokenizer.added)
        self.spec = AnswerSpec(asked, asked.callable_tools, thinking, may_think, schema, frozenset(tags))
        self.compiled = build(tokenizer, chat_formats.get(chat_format).grammar(self.spec, self.lark))

    def start(self, text: str) -> Constraint | None:
        """The state after `text`, None where it is refused."""
        constraint = self.compiled.matcher()
        for part in parts(text, self.tags):
            for token in [257 + self.tags.index(part)] if part in self.tags else part.encode():
                if not constraint.allows(token):
                    return None
                constraint.consume(token)
        return constraint

    def takes(self, text: str) -> bool:
        """True when `text` is a complete answer."""
        constraint = self.start(text)
        return constraint is not None and constraint.may_end()


CALLS = {
    "hermes": (json_call("get_weather", city="x"), json_call("noop")),
    "qwen3_coder": (xml_call("get_weather", city="x"), xml_call("noop")),
}


@pytest.mark.parametrize("chat_format", sorted(CALLS))
def test_auto_allows_text_calls_and_nothing_after_them(chat_format: str) -> None:
    grammar, (weather, noop) = Grammar(chat_format), CALLS[chat_format]
    assert all(map(grammar.takes, ["", "hello", weather, f"look\n\n{weather}", f"{weather}\n{noop}", weather + "\n"]))
    assert not any(map(grammar.takes, [weather + " done", weather[: -len("</tool_call>")], f"{weather}\n\n\n{noop}"]))
    assert grammar.takes("\n".join([noop] * 16))
    assert not grammar.takes("\n".join([noop] * 17))


@pytest.mark.parametrize("chat_format", sorted(CALLS))
def test_the_choice_of_tools(chat_format: str) -> None:
    weather, noop = CALLS[chat_format]
    required = Grammar(chat_format, tool_choice=ToolChoice("required"))
    assert (required.takes(weather), required.takes("hello"), required.takes("")) == (True, False, False)
    named = Grammar(chat_format, tool_choice=ToolChoice("named", "noop"))
    assert (named.takes(noop), named.takes(weather), named.takes(f"{noop}\n{noop}")) == (True, False, False)
    none = Grammar(chat_format, tool_choice=ToolChoice("none"))
    assert (none.takes("hello"), none.takes(noop)) == (True, False)
    allowed = Grammar(chat_format, tool_choice=ToolChoice("auto", None, ("noop",)))
    assert (allowed.takes(noop), allowed.takes(weather)) == (True, False)
    single = Grammar(chat_format, parallel_tool_calls=False)
    assert (single.takes(noop), single.takes(f"{noop}\n{noop}")) == (True, False)


@pytest.mark.parametrize("chat_format", sorted(CALLS))
def test_json_answers_with_thinking_and_with_tools(chat_format: str) -> None:
    weather, _ = CALLS[chat_format]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    plain = Grammar(chat_format, (), schema=schema)
    assert (plain.takes('{"a": 1}'), plain.takes("hello"), plain.takes('{"a": "x"}')) == (True, False, False)
    both = Grammar(chat_format, schema=schema, thinking=True)
    assert both.takes('hm\n</think>\n\n{"a": 1}')
    assert both.takes(f"hm\n</think>\n\n{weather}")
    assert not both.takes("hm\n</think>\n\nhello")
    assert not both.takes("only a thought")
    may = Grammar(chat_format, schema=schema, may_think=True)
    assert (may.takes('<think>\nhm\n</think>\n\n{"a": 1}'), may.takes('{"a": 1}')) == (True, True)


def test_a_schema_of_the_answer_that_is_broken_is_an_error() -> None:
    with pytest.raises(SchemaError):
        Grammar("hermes", (), schema={"type": "objekt"})


def test_hermes_with_tags_that_are_no_tokens() -> None:
    grammar, (weather, noop) = Grammar("hermes", tags=()), CALLS["hermes"]
    assert all(map(grammar.takes, ["hello", f"hi {weather}\n{noop}", "a < b"]))
    assert not any(map(grammar.takes, [f"{weather} x", "<tool_call>hello", "\n".join([noop] * 17)]))


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (xml_call("get_weather", days="3", city="x"), True),
        (xml_call("get_weather", city="São\nPaulo", unit="c"), True),
        (xml_call("get_weather", city="x", unit="k"), False),
        (xml_call("get_weather", city="x", days="0"), False),
        (xml_call("get_weather", unit="c"), False),
        (xml_call("get_weather", days="1", zzz="1", city="x"), False),
        (xml_call("get_weather", city="x", zzz="1"), True),  # not declared: content of the city
        (xml_call("noop", a="1"), False),
        (xml_call("get_weather", city="a</parameter> b\n</function>\n</parameter>\n<parameter=city>\n"), True),
        (xml_call("get_weather", city="a</parameter>\n<parameter=unit>\nb"), False),
        (xml_call("get_weather", unit="c", city="a</parameter>\n<parameter=unit>\nb"), True),
        (xml_call("get_weather", city="a</parameter>\n</function>\n b"), True),
        (xml_call("get_weather", city="a") + "x", False),
    ],
)
def test_qwen_xml(said: str, taken: bool) -> None:
    assert Grammar("qwen3_coder").takes(said) is taken


def test_a_parameter_comes_once_but_its_tag_may_be_content() -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
    grammar = Grammar("qwen3_coder", (tool,))
    twice = (
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert grammar.takes(xml_call("f", n="1"))
    assert not grammar.takes(twice)


def test_in_a_large_set_a_value_may_hold_fewer_tags() -> None:
    many = [Tool(f"tool{number}", parameters=WEATHER.parameters) for number in range(70)]
    grammar = Grammar("qwen3_coder", many)
    assert grammar.takes(xml_call("tool3", city="a</parameter> b </function> <parameter=city>", unit="c"))
    assert not grammar.takes(xml_call("tool3", city="a</parameter>\n<parameter=city>\nb"))
    assert not grammar.takes(xml_call("tool3", unit="c"))


def test_unions_with_a_string() -> None:
    tool = Tool(
        "f",
        parameters={
            "type": "object",
            "properties": {
                "a": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
                "e": {"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]},
            },
        },
    )
    grammar = Grammar("qwen3_coder", (tool,))
    assert all(
        map(grammar.takes, [xml_call("f", a="text"), xml_call("f", a="[1, 2]"), xml_call("f", e="auto"), xml_call("f", e="5")])
    )
    assert not any(map(grammar.takes, [xml_call("f", a='["x"]'), xml_call("f", e="manual")]))


def test_bounded_strings_and_what_bare_text_cannot_be_held_to() -> None:
    properties = {
        "s": {"type": "string", "minLength": 2, "maxLength": 3},
        "p": {"type": "string", "pattern": "^[a-z]+$"},
        "q": {"type": "string", "pattern": "b"},
        "d": {"type": "string", "format": "date"},
        "look": {"type": "string", "pattern": "(?=x)"},
        "long": {"type": "string", "maxLength": 100_000},
    }
    grammar = Grammar("qwen3_coder", (Tool("f", parameters={"type": "object", "properties": properties}),))
    good = {"s": "ab", "p": "abc", "q": "a b", "d": "2026-01-31", "look": "anything", "long": "a </parameter> b"}
    assert grammar.takes(xml_call("f", **good))
    for name, bad in {"s": "abcd", "p": "A", "q": "ac", "d": "2026-02-30"}.items():
        assert not grammar.takes(xml_call("f", **{name: bad}))
    assert sorted(item.pointer for item in grammar.lark.unenforced) == [
        "/tools/f/properties/long/maxLength",
        "/tools/f/properties/look/pattern",
    ]


def test_either_of_two_parameters() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    for chat_format, call in (("qwen3_coder", xml_call), ("hermes", json_call)):
        one = {"a": "1"} if chat_format == "qwen3_coder" else {"a": 1}
        grammar = Grammar(chat_format, (Tool("f", parameters=schema),))
        assert (grammar.takes(call("f", **one)), grammar.takes(call("f"))) == (True, False)


def test_references_into_the_whole_schema() -> None:
    schema = {
        "type": "object",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
        "properties": {"t": {"$ref": "#/$defs/n"}, "u": {"$ref": "#/properties/t"}},
    }
    grammar = Grammar("qwen3_coder", (Tool("f", parameters=schema),))
    value = '{"v": "a", "kids": [{"v": "b", "kids": []}]}'
    assert grammar.takes(xml_call("f", t=value, u=value))
    assert not grammar.takes(xml_call("f", u='{"v": 1, "kids": []}'))


def test_more_parameters_than_can_be_counted_come_in_order() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(70)}
    grammar = Grammar("qwen3_coder", (Tool("f", parameters={"type": "object", "properties": properties, "required": ["p0"]}),))
    assert grammar.takes(xml_call("f", p0="1", p69="2"))
    assert not any(map(grammar.takes, [xml_call("f", p69="2", p0="1"), xml_call("f", p69="2")]))


def test_a_tool_that_declares_nothing_and_allows_more() -> None:
    tool = Tool("f", parameters={"type": "object", "additionalProperties": {"type": "integer"}})
    grammar = Grammar("qwen3_coder", (tool,))
    assert all(map(grammar.takes, [xml_call("f"), xml_call("f", a="1", b="2")]))
    assert not grammar.takes(xml_call("f", a="x"))


@pytest.mark.parametrize("chat_format", [name for name in chat_formats.names() if name != "plain"])
def test_a_broken_schema_degrades_its_tool_alone(chat_format: str) -> None:
    broken = Tool("broken", parameters={"type": "object", "properties": {"a": {"type": "objekt", "minimum": "x"}}})
    tags = sorted(chat_formats.get(chat_format).tags)
    grammar = Grammar(chat_format, (broken, WEATHER), tags)
    assert set(grammar.spec.degraded) <= {"broken"}
    assert grammar.spec.degraded or chat_format == "gemma"


def test_a_degraded_tool_keeps_name_and_shape() -> None:
    properties = {
        "a": {"type": "objekt", "minimum": 1},
        "s": {"type": "string", "maxLength": 1},
        "n": {"type": "integer", "maximum": 3},
    }
    broken = Tool("broken", parameters={"type": "object", "properties": properties, "required": ["s"]})
    grammar = Grammar("qwen3_coder", (broken,))
    assert grammar.takes(xml_call("broken", s="long", n="9"))
    assert not any(map(grammar.takes, [xml_call("broken", n="9"), xml_call("broken", s="x", n="y"), xml_call("other", s="x")]))


LARK = 'start: begin line+\nbegin: "*** Begin" LF\nline: /[+-](.*)/ LF\n%import common.LF\n'


def test_custom_tools_and_their_grammars() -> None:
    patch = Tool("patch", custom=True, grammar=CustomGrammar("lark", LARK))
    letters = Tool("letters", custom=True, grammar=CustomGrammar("regex", "[a-c]+"))
    xml = Grammar("qwen3_coder", (patch, letters))
    assert all(map(xml.takes, [xml_call("patch", input="*** Begin\n+a\n-b\n"), xml_call("letters", input="abc")]))
    assert not any(
        map(xml.takes, [xml_call("patch", input="*** Begin\nx\n"), xml_call("letters", input="abd"), xml_call("letters")])
    )
    as_json = Grammar("hermes", (patch, letters))
    assert all(map(as_json.takes, [json_call("patch", input="anything"), json_call("letters", input="abc")]))
    assert not any(map(as_json.takes, [json_call("letters", input="abd"), json_call("patch", other="x")]))
    assert list(as_json.spec.degraded) == ["patch"]


def test_json_calls_take_no_arguments_that_nobody_declared() -> None:
    grammar = Grammar("hermes", (WEATHER, NOOP, Tool("free", parameters={"type": "object"})))
    assert not any(map(grammar.takes, [json_call("noop", a=1), json_call("get_weather", city="x", zzz=1)]))
    assert grammar.takes(json_call("free", a=1))


def test_glm_grammar() -> None:
    grammar = Grammar("glm", tags=GLM_TAGS, may_think=True)
    call = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a </tool_ b</arg_value>\n</tool_call>"
    assert all(
        map(grammar.takes, [call, f"\n<think>hm</think>\nLook:\n{call}", call.replace("\n", ""), "<tool_call>noop</tool_call>"])
    )
    assert not any(map(grammar.takes, [call.replace("city", "town"), "<tool_call>get_weather\n</tool_call>", call + "x"]))


def test_a_mistral_list_of_at_most_one_call() -> None:
    call = '[TOOL_CALLS][{"name": "noop", "arguments": {}}]'
    for more in ({"parallel_tool_calls": False}, {"tool_choice": ToolChoice("named", "noop")}):
        assert Grammar("mistral", tags=MISTRAL_TAGS[:3], **more).takes(call)
        assert not Grammar("mistral", tags=MISTRAL_TAGS[:3], **more).takes(call[:-1] + ", " + call[len("[TOOL_CALLS][") :])


def test_pythonic_grammar() -> None:
    grammar = Grammar("pythonic", tags=())
    call = '[get_weather(city="x", days=3), noop()]'
    assert all(map(grammar.takes, [call, "hello [x]", "", '[get_weather(days=3, city="")]']))
    assert not any(map(grammar.takes, ["[1]", "[get_weather()]", "[nope()]", call + " x", "[noop(a=1)]"]))
    required = Grammar("pythonic", tags=(), tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    assert (required.takes("[noop()]"), required.takes(call), required.takes("hello")) == (True, False, False)
    formed = Grammar("pythonic", tags=(), schema={"type": "array", "items": {"type": "integer"}})
    assert (formed.takes("[1, 2]"), formed.takes("[noop()]"), formed.takes("[x]")) == (True, True, False)
    assert Grammar("pythonic", (), tags=()).takes("[ hello")


def test_python_arguments_that_no_rule_can_hold() -> None:
    odd = Tool("odd", parameters={"type": "object", "properties": {"a b": {"type": "integer"}}})
    many = Tool("many", parameters={"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(70)}})
    free = Tool("free", parameters={"type": "object", "additionalProperties": {"type": "integer"}})
    grammar = Grammar("lfm2", (odd, many, free), ("<|tool_call_start|>", "<|tool_call_end|>"))
    assert set(grammar.spec.degraded) == {"odd", "many"}
    for call, taken in {
        'odd(x=[None], y="z")': False,
        'odd(x=[null], y="z")': True,
        "free(a=1, b=2)": True,
        "free(a=x)": False,
    }.items():
        assert grammar.takes(f"<|tool_call_start|>[{call}]<|tool_call_end|>") is taken


def test_llama_grammar() -> None:
    grammar = Grammar("llama3", tags=LLAMA_TAGS)
    call = '{"name": "get_weather", "parameters": {"city": "x"}}'
    assert all(map(grammar.takes, [call, f"<|python_tag|>{call}", "hello { }", ""]))
    assert not any(map(grammar.takes, ["{ hello", '{"name": "nope", "parameters": {}}', call + " and"]))
    assert not Grammar("llama3", tags=LLAMA_TAGS, tool_choice=ToolChoice("required")).takes("hello")
    assert Grammar("llama3", (), tags=LLAMA_TAGS).takes("{ hello")


def test_harmony_grammar() -> None:
    grammar = Grammar("harmony", tags=HARMONY_TAGS)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "x"}'
    final = "<|channel|>final<|message|>hello"
    assert all(
        map(
            grammar.takes,
            [final, thought + final, thought + call, f"<|channel|>commentary<|message|>p<|end|><|start|>assistant{call}"],
        )
    )
    assert not any(
        map(grammar.takes, ["hello", thought, call.replace("get_weather", "nope"), call + final, f"{thought}{call}{call}"])
    )
    required = Grammar("harmony", tags=HARMONY_TAGS, tool_choice=ToolChoice("required"))
    assert (required.takes(thought + call), required.takes(final)) == (True, False)


def matches(regex: str, text: str) -> bool:
    constraint = build(GrammarTokenizer.of_bytes(()), f"%llguidance {{}}\nstart: X\nX: {regex}\n").matcher()
    for byte in text.encode():
        if not constraint.allows(byte):
            return False
        constraint.consume(byte)
    return constraint.may_end()


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^[a-z]+$", ["abc"], ["a1", "xA", ""]),
        ("b", ["b", "abc", "\nb"], ["", "ac"]),
        ("^a|c$", ["ab", "bc", "a"], ["b", "ba"]),
        ("^(?:a|b)$", ["a", "b"], ["ab", ""]),
        ("a/b", ["a/b"], ["ab"]),
    ],
)
def test_a_pattern_as_a_match_of_the_whole_text(pattern: str, good: list[str], bad: list[str]) -> None:
    regex = whole_match(pattern)
    assert all(matches(regex, text) for text in good)
    assert not any(matches(regex, text) for text in bad)


def test_an_anchor_inside_a_pattern_cannot_be_held() -> None:
    assert whole_match("(^a|b)c") == ""
    assert whole_match("[^a]$") != ""


@pytest.mark.parametrize("text", ["", "<", "<<", "a <b> </parameter", "</parametex>", "<</parameter", "é🙂", "\n</par\n"])
def test_texts_without_a_tag(text: str) -> None:
    assert matches(without("</parameter>"), text)
    assert not matches(without("</parameter>"), text + "</parameter>")
    assert not matches(without("</parameter>"), "</parameter>" + text)
