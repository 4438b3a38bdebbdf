from __future__ import annotations

import pytest

from pooled_mlx.core.request import Tool
from tests.answers import (
    GEMMA_TAGS,
    GLM_TAGS,
    HARMONY_TAGS,
    LLAMA_TAGS,
    MISTRAL_TAGS,
    PATCH,
    READ,
    TAGS,
    WRITE,
    Outcome,
    PieceTable,
    says,
)

BOTH = (READ, WRITE)
NOTHING: tuple[str, ...] = ()


def glm(name: str, newline: str = "\n", /, **arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{newline}<arg_value>{value}</arg_value>{newline}" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{newline}{pairs}</tool_call>"


@pytest.mark.parametrize("tags", [GLM_TAGS, TAGS, NOTHING])
@pytest.mark.parametrize("newline", ["\n", ""])
def test_glm_calls(tags: tuple[str, ...], newline: str) -> None:
    outcome = says(f"Look:\n{glm('read_file', newline, path='a')}\n{glm('read_file', newline, path='b')}", "glm", tags=tags)
    assert outcome.text == "Look:"
    assert outcome.calls == [("read_file", {"path": "a"}), ("read_file", {"path": "b"})]


def test_glm_thinking_and_types() -> None:
    tool = Tool("typed", parameters={"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    outcome = says("\n<think>hm</think>\n" + glm("typed", n="5", s="5"), "glm", (tool,), tags=GLM_TAGS, may_think=True)
    assert (outcome.reasoning, outcome.text, outcome.calls) == ("hm", "", [("typed", {"n": 5, "s": "5"})])


@pytest.mark.parametrize("tags", [GLM_TAGS, TAGS])
def test_glm_tags_inside_a_value_arrive_unchanged(tags: tuple[str, ...]) -> None:
    content = "x</tool_call> <b>\n<arg_key>y</arg_key>\n"
    outcome = says(glm("write_file", path="p", content=content) + "\n" + glm("read_file", path="z"), "glm", BOTH, tags=tags)
    assert outcome.calls == [("write_file", {"path": "p", "content": content}), ("read_file", {"path": "z"})]
    assert outcome.text == ""


@pytest.mark.parametrize("tags", [GLM_TAGS, NOTHING])
@pytest.mark.parametrize("said", ["The `<tool_call>` tag", "<tool_call>nope\n</tool_call>", "<tool_call>\n</tool_call>"])
def test_glm_no_calls(tags: tuple[str, ...], said: str) -> None:
    assert (says(said, "glm", tags=tags).text, says(said, "glm", tags=tags).calls) == (said, [])


def test_glm_call_without_arguments_and_cut_call() -> None:
    assert says("<tool_call>noop</tool_call>", "glm", (Tool("noop"),), tags=GLM_TAGS).raw_calls == [("noop", "{}")]
    cut = "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>ab"
    assert says(cut, "glm", tags=GLM_TAGS).calls == [("read_file", {"path": "ab"})]
    assert says(cut, "glm", tags=GLM_TAGS, ends="length").calls == []


@pytest.mark.parametrize("tags", [MISTRAL_TAGS, MISTRAL_TAGS[:3], NOTHING])
@pytest.mark.parametrize(
    "said",
    [
        'Ok.\n[TOOL_CALLS]read_file[ARGS]{"path": "a"}[TOOL_CALLS]read_file[ARGS]{"path": "b [ARGS]"}',
        'Ok.[TOOL_CALLS]read_file[CALL_ID]abcdefghi[ARGS]{"path": "a"}[TOOL_CALLS]read_file[ARGS]{"path": "b [ARGS]"}',
        'Ok.[TOOL_CALLS] [{"name": "read_file", "arguments": {"path": "a"}, "id": "abcdefghi"}, '
        '{"name": "read_file", "arguments": {"path": "b [ARGS]"}}]',
    ],
)
def test_mistral_calls(tags: tuple[str, ...], said: str) -> None:
    outcome = says(said, "mistral", tags=tags)
    assert (outcome.text, outcome.calls) == ("Ok.", [("read_file", {"path": "a"}), ("read_file", {"path": "b [ARGS]"})])
    assert outcome.reason == "tool_calls"


@pytest.mark.parametrize("tags", [MISTRAL_TAGS, NOTHING])
@pytest.mark.parametrize(
    "said", ["The [TOOL_CALLS] tag is old.", '[TOOL_CALLS]nope[ARGS]{"path": "a"} x', "[TOOL_CALLS]", "[TOOL_CALLS][]"]
)
def test_mistral_no_calls(tags: tuple[str, ...], said: str) -> None:
    assert (says(said, "mistral", tags=tags).text, says(said, "mistral", tags=tags).calls) == (said, [])


def test_mistral_thinking() -> None:
    outcome = says("[THINK]hm[/THINK]Hi", "mistral", tags=MISTRAL_TAGS, may_think=True)
    assert (outcome.reasoning, outcome.text) == ("hm", "Hi")


def llama(said: str, **more: object) -> Outcome:
    outcome = says(said, "llama3", BOTH, tags=LLAMA_TAGS, **more)
    assert outcome.events == says(said, "llama3", BOTH, tags=(), **more).events
    return outcome


@pytest.mark.parametrize("opening", ["", "<|python_tag|>", "\n"])
def test_llama_calls(opening: str) -> None:
    outcome = llama(opening + '{"name": "read_file", "parameters": {"path": "a"}}')
    assert (outcome.calls, outcome.text, outcome.reason) == ([("read_file", {"path": "a"})], "", "tool_calls")


def test_llama_two_calls_in_a_row() -> None:
    one = '{"name": "read_file", "parameters": {"path": "a"}}'
    assert len(llama(f"{one}; {one}").calls) == 2


@pytest.mark.parametrize(
    "said",
    [
        '{"city": "Paris"}',
        '{"name": "nope", "parameters": {}}',
        'So: {"name": "read_file", "parameters": {"path": "a"}}',
        "{",
        "{}",
        '<|python_tag|>read_file.call(path="a")',
    ],
)
def test_llama_no_calls(said: str) -> None:
    assert llama(said).text == said


def gemma(said: str, **more: object) -> Outcome:
    outcome = says(said, "gemma", (*BOTH, PATCH), tags=GEMMA_TAGS, **more)
    assert outcome.calls == says(said, "gemma", (*BOTH, PATCH), tags=GEMMA_TAGS[:4], **more).calls
    return outcome


def test_gemma_calls() -> None:
    q = '<|"|>'
    said = f'Ok<|tool_call>call:read_file{{path:{q}a "b" \\ {{}}, \n{q},n:[1,{{x:true,y:{q}é🙂{q}}}],z:null}}<tool_call|>'
    outcome = gemma(said)
    assert outcome.text == "Ok"
    assert outcome.calls == [("read_file", {"path": 'a "b" \\ {}, \n', "n": [1, {"x": True, "y": "é🙂"}], "z": None})]
    assert gemma(f"<|tool_call>call:apply_patch{{input:{q}a\nb{q}}}<tool_call|>").raw_calls == [("apply_patch", "a\nb")]


def test_gemma_call_tags_inside_a_string() -> None:
    said = '<|tool_call>call:read_file{path:<|"|>a<|tool_call> b <tool_call|> c <tool_call|> d<|"|>}<tool_call|>'
    assert gemma(said).calls == [("read_file", {"path": "a<|tool_call> b <tool_call|> c <tool_call|> d"})]


@pytest.mark.parametrize("said", ["The <|tool_call> tag", '<|tool_call>call:nope{path:<|"|>a<|"|>}<tool_call|>'])
def test_gemma_no_calls(said: str) -> None:
    assert gemma(said).text == said


def test_gemma_thinking() -> None:
    outcome = says("<|channel>thought\nhm\n<channel|>Hi", "gemma", tags=GEMMA_TAGS, may_think=True)
    assert (outcome.reasoning, outcome.text) == ("hm", "Hi")
    assert says("<|channel>thought\n<channel|>Hi", "gemma", tags=GEMMA_TAGS).reasoning == ""


THOUGHT = "<|channel|>analysis<|message|>Need the file.<|end|><|start|>assistant"


def harmony(said: str, **more: object) -> Outcome:
    outcome = says(said, "harmony", BOTH, tags=HARMONY_TAGS, **more)
    assert outcome.events == says(said, "harmony", BOTH, tags=(), **more).events
    return outcome


def test_harmony_thought_and_answer() -> None:
    outcome = harmony(f"{THOUGHT}<|channel|>final<|message|>2 + 2 = 4.<|return|>")
    assert (outcome.reasoning, outcome.text, outcome.reason) == ("Need the file.", "2 + 2 = 4.", "stop")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.read_file<|constrain|>json<|message|>",
        " to=functions.read_file<|channel|>commentary json<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "", "<|end|>"])
def test_harmony_calls(header: str, end: str) -> None:
    outcome = harmony(f'{THOUGHT}{header}{{"path": "a"}}{end}')
    assert (outcome.reasoning, outcome.text) == ("Need the file.", "")
    assert (outcome.calls, outcome.reason) == ([("read_file", {"path": "a"})], "tool_calls")


def test_harmony_preamble_is_answer_text() -> None:
    call = '<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"path": "a"}<|call|>'
    outcome = harmony(f"<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant{call}")
    assert (outcome.text, len(outcome.calls)) == ("I will look.", 1)


def test_harmony_call_of_an_unknown_function_is_text() -> None:
    said = '<|channel|>commentary to=functions.nope <|constrain|>json<|message|>{"path": "a"}'
    outcome = harmony(said + "<|call|>")
    assert (outcome.text, outcome.calls) == (said, [])


def test_harmony_text_without_a_header_and_cut_answers() -> None:
    assert harmony("Just text").text == "Just text"
    assert harmony("<|channel|>analysis<|message|>hm", ends="length").reasoning == "hm"
    assert harmony(THOUGHT, ends="length").text == ""
    cut = harmony(THOUGHT + '<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"pa', ends="length")
    assert cut.calls == []


def test_harmony_what_is_no_header_is_given_back() -> None:
    for said in (
        "<|channel|>The answer is 4.",
        "<|channel|>Yes",
        "<|channel|>final answer: 4",
        "<|channel|>final answer",
        "<|start|>user",
        "The answer is 4.",
        "to be",
        " ",
    ):
        for ended in (said, f"{said}<|return|>", f"{said}<|end|>"):
            for tools in (BOTH, ()):
                outcome = says(ended, "harmony", tools, tags=HARMONY_TAGS)
                assert (outcome.text, outcome.calls, outcome.reason) == (said, [], "stop")
        assert harmony(THOUGHT.removesuffix("<|start|>assistant") + said).text == said.lstrip("\n")
    assert harmony("<|channel|>The<|message|>4<|return|>").text == "<|channel|>The<|message|>4"


@pytest.mark.parametrize(
    "header", ["<|channel|>", "<|channel|>final", "<|channel|>final<|constrain|>json", "<|start|>assistant"]
)
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_harmony_a_header_without_a_message_says_nothing(header: str, ends: str) -> None:
    assert harmony(header, ends=ends).events == []
    assert harmony("<|channel|>analysis<|message|>hm<|end|>" + header, ends=ends).text == ""
    assert harmony("<|channel|>fin", ends="length").text == ""


def test_harmony_tags_in_a_message_are_text() -> None:
    said = "Use <|start|>assistant<|channel|>analysis<|message|>hm<|constrain|> for thoughts."
    outcome = harmony(f"{THOUGHT}<|channel|>final<|message|>{said}<|return|>")
    assert (outcome.reasoning, outcome.text) == ("Need the file.", said)
    thought = "The <|channel|> token, then the name"
    outcome = harmony(f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>4")
    assert (outcome.reasoning, outcome.text) == (thought, "4")


def test_harmony_a_header_may_come_without_the_end_before_it() -> None:
    outcome = harmony("<|channel|>analysis<|message|>hm<|channel|>final<|message|>4<|return|>")
    assert (outcome.reasoning, outcome.text) == ("hm", "4")


def test_harmony_tags_in_a_string_of_a_call() -> None:
    content = "a <|end|> b <|start|>assistant<|channel|>final<|message|>c"
    call = "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>"
    assert harmony(f'{call}{{"path": "{content}"}}<|call|>').calls == [("read_file", {"path": content})]


@pytest.mark.parametrize("tags", [GLM_TAGS, TAGS, ()])
def test_glm_a_closing_tag_ends_a_value_only_before_the_next_key_or_the_end(tags: tuple[str, ...]) -> None:
    content = "a </arg_value> b</arg_value></arg_value> c\n</arg_value>\n<b>"
    said = glm("write_file", path="p", content=content)
    assert says(said, "glm", BOTH, tags=tags).calls == [("write_file", {"path": "p", "content": content})]
    said = glm("write_file", content=content, path="p")
    assert says(said, "glm", BOTH, tags=tags).calls == [("write_file", {"content": content, "path": "p"})]


def test_gemma_a_quote_ends_a_string_only_before_what_follows_a_value() -> None:
    quote = '<|"|>'
    code = f"r = q({quote}{quote}{quote} SELECT 1 {quote}{quote}{quote})"
    said = f"<|tool_call>call:write_file{{content:{quote}{code}{quote},path:{quote}p{quote}}}<tool_call|>"
    for constrained in (False, True):
        assert gemma(said, constrained=constrained).calls == [("write_file", {"content": code, "path": "p"})]


@pytest.mark.parametrize("name", ['"read_file"', "'read_file'", '"read_file', "read_file'"])
def test_quotes_around_names_are_dropped(name: str) -> None:
    want = [("read_file", {"path": '"a"'})]
    for key in ("path", '"path"', "'path'", 'path"'):
        call = f'<tool_call>\n<function={name}>\n<parameter={key}>\n"a"\n</parameter>\n</function>\n</tool_call>'
        assert says(call, "qwen3_coder").calls == want
        call = f'<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>"a"</arg_value>\n</tool_call>'
        assert says(call, "glm", BOTH, tags=GLM_TAGS).calls == want
    assert gemma(f'<|tool_call>call:{name}{{path:<|"|>"a"<|"|>}}<tool_call|>').calls == want
    assert harmony(f'<|channel|>commentary to=functions.{name} json<|message|>{{"path": "\\"a\\""}}<|call|>').calls == want
    assert says(f'[TOOL_CALLS]{name}[ARGS]{{"path": "\\"a\\""}}', "mistral", tags=MISTRAL_TAGS).calls == want


def test_mistral_a_name_with_blanks_is_refused_alike_however_it_arrives() -> None:
    said = '[TOOL_CALLS]f[TOOL_CALLS][{"name": "f", "arguments": {[TOOL_CALLS]f[ARGS]{"a": "'
    pieces = PieceTable(MISTRAL_TAGS[:2])
    whole = says([pieces.token(said.encode())], "mistral", BOTH, tags=MISTRAL_TAGS[:2], table=pieces.table)
    by_byte = says(said, "mistral", BOTH, tags=MISTRAL_TAGS[:2])
    assert (whole.events, whole.notes) == (by_byte.events, by_byte.notes)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it is'", "it is"),
        ("'it\\'s'", "it's"),
        ("'it's'", "it's"),
        ("'print('a', 'b')\n'", "print('a', 'b')\n"),
        ('"say "hi", ok"', 'say "hi", ok'),
        ('"""a "b"\n\'\'\' c"""', "a \"b\"\n''' c"),
        ("'''it's'''", "it's"),
        ('"C:\\\\new\\tx"', "C:\\new\tx"),
        ('"<b>)]</b>"', "<b>)]</b>"),
        ("''", ""),
        ('""', ""),
        ("True", True),
        ("None", None),
        ("true", True),
        ("-2.5e3", -2500.0),
        ("['a', (1), {'k': [True, None]}]", ["a", "(1)", {"k": [True, None]}]),
        ("{'k': 'it\\'s'}", {"k": "it's"}),
        ("word", "word"),
    ],
)
@pytest.mark.parametrize("tags", [("<|tool_call_start|>", "<|tool_call_end|>"), NOTHING])
def test_python_values(written: str, value: object, tags: tuple[str, ...]) -> None:
    for said in (
        f"<|tool_call_start|>[write_file(path={written}, content = 'x')]<|tool_call_end|>",
        f"<|tool_call_start|>[write_file(content='x', path={written},), read_file()]<|tool_call_end|> bye",
    ):
        outcome = says(said, "lfm2", BOTH, tags=tags)
        name, arguments = outcome.calls[0]
        assert (name, arguments["path"], arguments["content"]) == ("write_file", value, "x")
        assert outcome.text == ("bye" if said.endswith("bye") else "")
        assert len(outcome.calls) == (2 if "read_file" in said else 1)


def test_a_bare_list_of_python_calls() -> None:
    said = '[read_file(path="a"), write_file(path="b", content=[1]), nope()]'
    outcome = says(said, "pythonic", BOTH, tags=())
    assert outcome.calls == [("read_file", {"path": "a"}), ("write_file", {"path": "b", "content": [1]})]
    assert "nope()" in outcome.text
    for said in (
        "[1, 2]",
        "[x](http://read_file(path)",
        "[read_file](a)",
        "[",
        "[read_file",
        "[read_file(x",
        "[read_file(x == 1)]",
    ):
        assert (says(said, "pythonic", BOTH, tags=()).text, says(said, "pythonic", BOTH, tags=()).calls) == (said, [])
    assert says('So: [read_file(path="a")]', "pythonic", BOTH, tags=()).calls == []


def test_an_argument_given_twice_and_what_stands_between_arguments() -> None:
    outcome = says("<function_calls>read_file(path=1, 'b', path=2, mode='w')</function_calls>", "olmo3", BOTH, tags=())
    assert outcome.calls == [("read_file", {"path": 1, "mode": "w"})]
    assert len(outcome.notes) == 2
