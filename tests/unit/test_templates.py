"""Chat templates: rendered as transformers renders them, in a sandbox, with limits and clear errors."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pooled_mlx.prompt.templates import ChatTemplate, Dates, TemplateFailed
from pooled_mlx.prompt.tokens import TokenizerError
from pooled_mlx.replay.assets import replay_template
from tests import template_families as families
from tests.shared_data import shared_path

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads “any” <file> & more",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}},
    },
}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "read_file", "arguments": {"path": "ä/b", "depth": 2}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Look at é.  "},
    {"role": "assistant", "content": "Sure.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "text", "tool_call_id": "abcdefgh1"},
]
OPTIONS = [{}, {"enable_thinking": False}, {"enable_thinking": True, "preserve_thinking": True}]
SOURCES = {
    "chatml": families.CHATML,
    "chatml drops": families.CHATML_DROPS,
    "llama": families.LLAMA,
    "glm": families.GLM,
    "replay": replay_template(),
    "harmony": families.HARMONY,
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}"
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "own dict": "{{ dict(a=1, b='é') | tojson }}{{ dict.fromkeys('ab', 1) | tojson }}{% set n = namespace(x=1) %}{{ n.x }}",
    "formats": "{{ '%s and %d' % ('a', 3) }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ '%.2f' | format(1.5) }}",
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [*SOURCES, "qwen3.6"])
def test_text_equals_that_of_transformers(name: str, options: dict) -> None:
    source = shared_path("templates/qwen3.6.jinja").read_text() if name == "qwen3.6" else SOURCES[name]
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages in (CONVERSATION[1:2], CONVERSATION[:2], CONVERSATION):
        for tools in (None, [TOOL]):
            expected, _ = render_jinja_template(
                [messages], tools=tools, chat_template=source, add_generation_prompt=True, **named, **options
            )
            assert ChatTemplate(source, named).render(messages, tools=tools, options=options) == expected[0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "more than 1000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end|more than 1000 steps"),
        ("{% set n = namespace(x=0) %}{% for i in range(9999) %}{% set n.x = n.x + 1 %}{% endfor %}", "more than 1000 steps"),
        ("{{ 'x' * 999999999 }}", "repeats a text"),
        ("{{ 999999999 * [1] }}", "repeats a text"),
        ("{{ 10 ** 10 ** 10 }}", "power in it is too large"),
        ("{{ '%999999999d' % 1 }}", "width in its format"),
        ("{{ '%*d' % (999999999, 1) }}", "width in its format"),
        ("{{ range(999999999) | list }}", "(?i)range"),
        ("{{ messages.append(1) }}", "(?i)unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}x{{ messages.__class__() }}", "(?i)unsafe|access to attribute"),
        ("{{ namespace(__class__=1) }}", "private name"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "private name"),
        ("{{ raise_exception('No user query found.') }}", "No user query found"),
        ("{{ messages[0].content.missing.deeper }}", "(?i)undefined|no attribute"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 'text' | items | list }}", "mapping"),
    ],
)
def test_hostile_and_broken_templates_fail_with_a_text(source: str, says: str) -> None:
    template = ChatTemplate(source, step_limit=1000)
    with pytest.raises(TemplateFailed, match=says) as failed:
        template.render([{"role": "user", "content": "hi"}])
    refusal = failed.value.refusal()
    assert refusal.kind.status == 400
    assert refusal.message.startswith("The model's chat template refuses this conversation: ")
    assert "Traceback" not in refusal.message


def test_time_is_limited_as_well() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}", seconds_limit=0.0)
    with pytest.raises(TemplateFailed, match="more than 0 seconds"):
        template.render([])


def test_a_failed_rendering_leaves_nothing_behind() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", step_limit=50)
    with pytest.raises(TemplateFailed):
        template.render([{"content": "x"}] * 60)
    for _ in range(3):
        assert template.render([{"content": "x"}] * 40) == "x" * 40


def test_broken_source_is_refused_at_load() -> None:
    with pytest.raises(TokenizerError, match="cannot be compiled"):
        ChatTemplate("{% for %}")


def test_where_the_template_of_a_folder_stands(tmp_path: Path) -> None:
    def load() -> str:
        return ChatTemplate.load(tmp_path, {}).render([])

    with pytest.raises(TokenizerError, match="no chat template"):
        load()
    named = [{"name": "default", "template": "default"}, {"name": "rag", "template": "rag"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load() == "default"
    named.append({"name": "tool_use", "template": "tools"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load() == "tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert load() == "one"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load() == "json"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load() == "file"


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 11, 28, 23, 50)

    def __call__(self) -> datetime:
        return self.now


def test_a_conversation_keeps_the_date_it_began_with() -> None:
    clock = Clock()
    dates = Dates(clock)
    began = dates.moment(b"prefix", b"talk")
    clock.now += timedelta(minutes=5)
    assert dates.moment(b"prefix", b"other talk of the day") == began
    clock.now += timedelta(minutes=30)
    assert dates.moment(b"prefix", b"talk") == began
    assert dates.moment(b"prefix", b"talk of the next day").date() > began.date()
    assert dates.moment(b"prefix", b"talk") == began
    assert dates.moment(b"prefix", b"second talk of the next day") == dates.moment(b"prefix", b"talk of the next day")


def test_the_template_sees_the_date_it_is_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.uses_date
    assert template.render([], now=datetime(2024, 2, 29)) == "29 Feb 2024"
    assert not ChatTemplate("static").uses_date
