"""Whether a model's own calls are read is told by what its template writes, not by marks alone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pooled_mlx.cli import main
from pooled_mlx.cli.doctor import examine
from pooled_mlx.cli.running import Server
from pooled_mlx.config import Settings
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import DeviceFacts
from pooled_mlx.core.request import ToolCall, Turn
from pooled_mlx.prompt.call_form import GENERIC, CallForm, call_form, folder_call_form
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.tiny_model import tiny_hybrid_config
from pooled_mlx.server.settings import ServerSettings
from pooled_mlx.store import Ready
from pooled_mlx.store.derive import derive_card
from tests.answers import says
from tests.prompt_builders import FAMILIES, READ, builder, request, text_of, user
from tests.small_tokenizer import CHATML, QWEN_TAGS, byte_level, byte_level_tokens, write_folder

PARAMETERS = "{% for key, value in call.function.arguments | items %}"
FOREIGN = {
    "minimax m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{{ call.function.name }}">'
        + PARAMETERS
        + "]<]minimax[>[<{{ key }}>{{ value }}]<]minimax[>[</{{ key }}>{% endfor %}]<]minimax[>[</invoke>\n"
        "]<]minimax[>[</tool_call>",
        ("]<]minimax[>[", "<tool_call>", "</tool_call>"),
    ),
    "phi": (
        '<|tool_call|>[{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}]'
        "<|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "tagged list": (
        '<tool_calls>[{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}]</tool_calls>'
        "{# it tells of <tool_call> too #}",
        ("<tool_calls>", "</tool_calls>"),
    ),
}


NATIVE = {
    "lfm2": (
        "<|tool_call_start|>[{{ call.function.name }}(" + PARAMETERS + '{{ key }}="{{ value }}"{% endfor %})]<|tool_call_end|>',
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "lfm2 ": (  # strings as they are, in apostrophes
        "<|tool_call_start|>[{{ call.function.name }}(" + PARAMETERS + "{{ key }}='{{ value }}'{% endfor %})]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "lfm2  ": (
        '<|tool_call_start|>[{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}]'
        "<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": (
        "<function_calls>{{ call.function.name }}(" + PARAMETERS + '{{ key }}="{{ value }}"{% endfor %})</function_calls>',
        (),
    ),
    "pythonic": (
        "[{{ call.function.name }}(" + PARAMETERS + '{{ key }}="{{ value }}"{% endfor %})]'
        "{# tools are called as [func_name1(params_name1=params_value1)] #}",
        (),
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="{{ call.function.name }}">\n'
        + PARAMETERS
        + '<parameter name="{{ key }}">{{ value }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ call.function.name }}">\n'
        + PARAMETERS
        + '<｜DSML｜parameter name="{{ key }}" string="true">{{ value }}</｜DSML｜parameter>\n'
        "{% endfor %}"
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("｜DSML｜",),
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ call.function.name }}">\n'
        + PARAMETERS
        + '<｜DSML｜parameter name="{{ key }}" string="{{ (value is string) | lower }}">{{ value }}</｜DSML｜parameter>\n'
        "{% endfor %}"
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ("｜DSML｜",),
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function={{ call.function.name }}>\n"
        + PARAMETERS
        + "<parameter={{ key }}>{{ value }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",  # the id tells the name
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek": (
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # its arguments must be text
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek ": (
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
        "{{ call.function.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
}
"""Families whose calls are read, by the name of their format (blanks tell several templates of one apart)."""


def source(call: str, listing: str = "{{ tools | tojson }}") -> str:
    return (
        "{% if tools %}{{ '<|im_start|>system\n' }}"
        + listing
        + "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{% for call in m.tool_calls or [] %}"
        + call
        + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def tokens_with(*tags: str) -> Tokens:
    return byte_level_tokens(CHATML, tags, eos=("<|im_end|>",))


@pytest.mark.parametrize("name", FOREIGN)
def test_calls_of_families_without_a_format_are_told_and_taken_by_no_other(name: str):
    call, tags = FOREIGN[name]
    tokens, template = tokens_with(*tags), ChatTemplate(source(call))
    form = call_form(template, tokens)
    assert (form.format, form.native) == (GENERIC, False)
    assert form.foreign.startswith(call[: call.index(">") + 1])
    assert f"own way of calling tools ({form.foreign}) is not known here" in form.notice
    build = PromptBuilder(tokens, template, ModelCard("t", "T"))
    assert build.call_form == form
    assert not build.traits.native_tools
    # The tools are explained in the form that is read.
    assert '<tool_call>\n{"name": ' in text_of(build.build(request(user("q"), tools=(READ,))), tokens)


@pytest.mark.parametrize("name", NATIVE)
def test_calls_of_families_with_a_format_are_read_and_written_back(name: str):
    call, tags = NATIVE[name]
    tokens, template = tokens_with(*tags), ChatTemplate(source(call))
    assert call_form(template, tokens) == CallForm(name.strip(), True)
    build = PromptBuilder(tokens, template, ModelCard("t", "T"))
    assert build.traits.native_tools
    said = Turn("assistant", "", tool_calls=(ToolCall("call_1", "read_file", '{"path": "a b"}'),))
    text = text_of(build.build(request(user("q"), said, Turn("tool", "found", tool_call_id="call_1"), tools=(READ,))), tokens)
    assert "found" in text
    turn = text.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert says(turn, name.strip(), (READ,), tags=tags).calls == [("read_file", {"path": "a b"})]


def test_a_template_that_lists_tools_but_writes_no_calls_gets_the_general_way():
    form = call_form(ChatTemplate(source("{# <|tool_call_start|> #}")), tokens_with("<|tool_call_start|>"))
    assert (form.format, form.native) == (GENERIC, False)
    assert "does not write its past calls" in form.notice


def test_kimis_ids_tell_the_tool_and_its_number_in_the_conversation():
    call, tags = NATIVE["kimi"]
    template = ChatTemplate(source(call).replace("(m.content or '')", "(m.tool_call_id or '') + (m.content or '')"))
    build = PromptBuilder(tokens_with(*tags), template, ModelCard("t", "T"))
    turns = [user("q")]
    for number, name in enumerate(("read_file", "zz", "read_file")):
        turns.append(Turn("assistant", "", tool_calls=(ToolCall("same" if number else "first", name, "{}"),)))
        turns.append(Turn("tool", " found", tool_call_id="same" if number else "first"))
    text = text_of(build.build(request(*turns, tools=(READ,))), build.tokens)
    for number, name in enumerate(("read_file", "zz", "read_file")):
        assert f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{{}}" in text
        assert f"functions.{name}:{number} found" in text


@pytest.mark.parametrize("name", ["kimi", "deepseek", "deepseek "])
def test_a_template_that_writes_calls_but_lists_no_tools_gets_the_general_way(name: str):
    call, tags = NATIVE[name]
    form = call_form(ChatTemplate(source(call, "")), tokens_with(*tags))
    assert (form.format, form.native) == (GENERIC, False)
    assert "does not tell the model of its tools" in form.notice


@pytest.mark.parametrize(
    ("tags", "listing", "foreign"),
    [
        (("<|tool_call_begin|>", "<|tool_call_end|>"), "{{ tools | tojson }}", "<|tool_call_begin|>"),
        (("<|tool_call|>",), "", "<|tool_call|>"),
        ((), "{{ tools | tojson }}", "its template lists tools, and does not tell how it calls them"),
        ((), "", ""),
        (("<tool_call>", "</tool_call>"), "", ""),
    ],
)
def test_a_template_that_writes_no_calls(tags: tuple[str, ...], listing: str, foreign: str):
    assert call_form(ChatTemplate(source("", listing)), tokens_with(*tags)) == CallForm(GENERIC, False, foreign)


@pytest.mark.parametrize("name", ["chatml", "chatml drops", "qwen3", "replay", "llama", "mistral", "gemma", "glm"])
def test_what_is_read_or_needs_no_reading_gives_no_notice(name: str):
    form = builder(name).call_form
    assert form.foreign == form.notice == ""
    assert form.native == (name not in ("chatml", "gemma"))  # these know no tools


def test_a_card_is_taken_at_its_word():
    call, tags = FOREIGN["phi"]
    assert call_form(ChatTemplate(source(call)), tokens_with(*tags), "qwen3_coder") == CallForm("qwen3_coder", True)


def test_harmony_calls_are_read():
    call = (
        "{{ ' to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}"
        "{{ call.function.arguments | tojson }}<|call|>"
    )
    text = (
        "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{# <|channel|>analysis #}"
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.tool_calls %}{% set call = m.tool_calls[0] %}"
        + call
        + "{% else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    _, special, tags, eos = FAMILIES["harmony"]
    assert call_form(ChatTemplate(text), byte_level_tokens(special, tags, eos=eos)) == CallForm("harmony", True)


def test_a_folder_is_read_as_the_server_reads_it(tmp_path: Path):
    call, tags = FOREIGN["phi"]
    tokenizer = byte_level(CHATML, (*QWEN_TAGS, *tags))
    folder = write_folder(tmp_path, tokenizer, tokenizer_config={"chat_template": source(call), "eos_token": "<|im_end|>"})
    assert "tool_call|" in folder_call_form(folder).foreign


@pytest.fixture
def foreign_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model folder of a family that is not read, with weights that say nothing."""
    for name in ("CONFIG", "CACHE", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    call, tags = FOREIGN["phi"]
    tokenizer = byte_level(CHATML, (*QWEN_TAGS, *tags))
    folder = write_folder(
        tmp_path / "mini",
        tokenizer,
        tokenizer_config={"chat_template": source(call), "eos_token": "<|im_end|>"},
        config=tiny_hybrid_config(-(-tokenizer.get_vocab_size() // 64) * 64),
    )
    header = b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return folder


NOTICE = 'own way of calling tools (<|tool_call|>[{"name": "NAME", "arguments": {"KEY": ") is not known here'


def test_models_show_and_doctor_say_so(foreign_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["models", "show", str(foreign_folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tool calls")]
    assert NOTICE in line
    found = {finding.what: finding for finding in examine({"model": str(foreign_folder), "port": "0"})}
    assert found["tool calls"].state == "note"
    assert NOTICE in found["tool calls"].text


def test_models_show_says_how_known_calls_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pooled_mlx.store.hub.cached_repo", lambda *_: None)
    for model, text in (("qwen3-1.7b", "hermes, the model's own form"), ("some/other-model", "known after a download")):
        assert main(["models", "show", model]) == 0
        assert f"tool calls    {text}" in capsys.readouterr().out


def test_serve_warns_at_its_start(foreign_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    card = derive_card(foreign_folder)
    server = Server(Settings(), ServerSettings(), card, DeviceFacts("x", 8 << 30))
    monkeypatch.setattr("pooled_mlx.engine.engine.LocalEngine.start", lambda room: None)  # its weights say nothing
    server._make_room(Ready(card, foreign_folder), lambda reason: None)
    (record,) = [record for record in caplog.records if "calling tools" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert NOTICE in record.getMessage()
