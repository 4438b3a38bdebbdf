"""Stand-ins: what is hidden, and that it comes back as the client wrote it."""

import json

import pytest

from pooled_mlx.core.card import ModelCard, ThinkingRule
from pooled_mlx.core.request import Request, Tool, ToolCall, Turn
from pooled_mlx.prompt.defuse import ControlText, Disguise
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from tests.small_tokenizer import byte_level_tokens

TOKENS = byte_level_tokens()
CONTROL = ControlText(TOKENS, "")


@pytest.mark.parametrize("text", ["", "plain", "a < b", "x |> y", "<b>bold</b>", "im_start", "think", "<|im_start"[:-5] + "x"])
def test_clean_text(text: str) -> None:
    assert CONTROL.is_clean(text)
    assert Disguise(CONTROL, [text]).hide(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<think>",
        "a</think>b",
        "ends with <",
        "ends with <|im_st \n",
        ">",
        "  think> begins",
        "|>",
        "_end|>x",
        "<<think>",
        "<think<think>>",
    ],
)
def test_dangerous_text_is_hidden_and_comes_back(text: str) -> None:
    assert not CONTROL.is_clean(text)
    disguise = Disguise(CONTROL, [text])
    hidden = disguise.hide(text)
    assert hidden != text
    assert CONTROL.is_clean(hidden)
    assert disguise.show(f"[{hidden}]") == f"[{text}]"


@pytest.mark.parametrize("name", ["think", "/think", "tool_call", "im_start", "im_end|", "read_file"])
def test_names_cannot_be_completed_on_both_sides(name: str) -> None:
    disguise = Disguise(CONTROL, [name])
    hidden = disguise.hide_name(name)
    assert CONTROL.is_clean_name(name) == (name == "read_file")
    for around in ("<{}>", "<|{}|>", "<|{}>", "</{}>"):
        assert CONTROL.pattern.search(around.format(hidden)) is None
    assert disguise.show(hidden) == name


def test_values_are_hidden_throughout() -> None:
    value = {"<think>": ["</think>", {"a": "x <"}, 1, None, True], "b": "fine"}
    disguise = Disguise(CONTROL, [])
    hidden = disguise.hide_value(value)
    written = json.dumps(hidden, ensure_ascii=False)
    assert CONTROL.pattern.search(written) is None
    assert json.loads(disguise.show(written)) == value


def test_stand_ins_also_come_back_from_json_escapes() -> None:
    disguise = Disguise(CONTROL, [])
    written = json.dumps({"k": disguise.hide("a<think>b")})
    assert "\\ue000" in written
    assert json.loads(disguise.show(written)) == {"k": "a<think>b"}


def test_characters_that_a_client_uses_are_no_stand_ins() -> None:
    texts = ["\ue000\ue001 and \\ue002 and \\uE003", "<think>"]
    disguise = Disguise(ControlText(TOKENS, "template with \ue004"), texts)
    assert disguise.hide("<think>") == "\ue005"
    assert disguise.tag("</think>") == "\ue006"
    assert disguise.show_tags("\ue006\ue005") == "</think>\ue005"
    assert disguise.show("\ue000\\ue002\ue005") == "\ue000\\ue002<think>"


def ask(source: str, *turns: Turn, **more) -> str:
    build = PromptBuilder(TOKENS, ChatTemplate(source), ModelCard("t", "T", chat_format="hermes", thinking=ThinkingRule()))
    prompt = build.build(Request("r", turns, **more))
    spelled = [
        f"⟦{TOKENS.text_of(i)}⟧" if i in TOKENS.control_ids else TOKENS.bytes_of[i].decode("latin-1")
        for i in prompt.ids.tolist()
    ]
    return "".join(spelled)


BRACKETS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{{ t.function.description }}{% set schema = t.function.parameters %}"
    "{% for k in schema.properties %}<{{ k }}{{ '>!' if k in schema.required else '>' }}{% endfor %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}={% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>"
    "{% endfor %}{% endfor %}|>{% endfor %}"
)


def test_a_template_that_puts_names_between_brackets() -> None:
    schema = {"type": "object", "properties": {"think": {}, "im_end": {}}, "required": ["think"]}
    tool = Tool("think", parameters=schema)
    call = ToolCall("c", "think", '{"tool_call": "<|im_end", "/think": "x"}')
    text = ask(BRACKETS, Turn("user", "q<|im_start"), Turn("assistant", tool_calls=(call,)), Turn("tool", "r"), tools=(tool,))
    assert "⟦" not in text
    assert text.startswith("<think><think>!<im_end>")
    assert "<think><tool_call><|im_end</tool_call></think>x<//think>|>" in text
    assert "q<|im_start|>" in text


def test_private_use_text_beside_our_own_tags() -> None:
    source = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    turns = (Turn("user", "\ue000 \ue001"), Turn("assistant", "\ue002", reasoning="why"), Turn("user", "\ue000"))
    text = ask(source, *turns)
    assert text.count("⟦<think>⟧") == text.count("⟦</think>⟧") == 1
    assert text.count("\ue000".encode().decode("latin-1")) == 2
