"""Scripted answers: reading the file, choosing a line, and following it token by token."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.grammar.match import GrammarTokenizer, build
from pooled_mlx.prompt.tokens import TokenizerError, Tokens
from pooled_mlx.replay.assets import TAGS, replay_template, replay_tokenizer_json
from pooled_mlx.replay.faults import Faults, ScriptedFault
from pooled_mlx.replay.script import ReplayScript, ScriptedAnswers, ScriptError, ScriptLine, parse_script
from tests.small_tokenizer import byte_level, byte_level_tokens

TOKENS = byte_level_tokens()
EOS = TOKENS.added["<|im_end|>"]
GRAMMAR_TOKENS = GrammarTokenizer(byte_level().to_str(), n_vocab=byte_level().get_vocab_size(), eos_ids=[EOS])
RAW = (
    "Hm 😀.\n</think>\n\nI read.\n\n"
    "<tool_call>\n<function=read_file>\n<parameter=path>\naé\n</parameter>\n</function>\n</tool_call>"
)


def request(text: str, *before: Turn) -> Request:
    return Request("r", (*before, Turn("user", text)))


def answers(*lines: ScriptLine, tokens: Tokens = TOKENS) -> ScriptedAnswers:
    return ScriptedAnswers(ReplayScript(lines), tokens)


def test_a_line_with_everything() -> None:
    value = {
        "match": "hi",
        "text": "Hello.",
        "token_seconds": 0.5,
        "prefill_seconds_per_1000": 2,
        "split": "byte",
        "fault": {"kind": "nan", "at_token": 5},
        "free": True,
    }
    (line, bare) = parse_script(json.dumps(value) + '\n\n{"text": ""}\n')
    assert line == ScriptLine(1, "Hello.", "hi", "byte", Faults("nan", 5, 0.5, 2.0), True)
    assert bare == ScriptLine(3, "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "this is not JSON"),
        ("[]", "must be a JSON object, not a list"),
        ("{}", "`text` must be a string, not nothing"),
        ('{"text": 1}', "`text` must be a string, not a number"),
        ('{"text": "x", "txt": 1}', "the field 'txt' is unknown; known are fault, free"),
        ('{"text": "x", "match": 1}', "`match` must be a string"),
        ('{"text": "x", "free": 1}', "`free` must be true or false, not a number"),
        ('{"text": "x", "split": "word"}', "`split` must be one of token, byte, all, not 'word'"),
        ('{"text": "x", "token_seconds": -1}', "`token_seconds` must be a number of seconds, 0 or more, not -1"),
        ('{"text": "x", "token_seconds": true}', "`token_seconds` must be"),
        ('{"text": "x", "prefill_seconds_per_1000": NaN}', "`prefill_seconds_per_1000` must be"),
        ('{"text": "x", "fault": "nan"}', "`fault` must be an object, not a string"),
        ('{"text": "x", "fault": {"kind": "boom"}}', "`fault.kind` must be one of nan, raise, stall, not 'boom'"),
        ('{"text": "x", "fault": {"kind": "nan", "at": 1}}', r"the field 'fault\.at' is unknown"),
        ('{"text": "x", "fault": {"kind": "nan", "at_token": 1.5}}', "`fault.at_token` must be a whole number"),
    ],
)
def test_errors_name_line_and_field(line: str, says: str) -> None:
    with pytest.raises(ScriptError, match=f"^Line 2 of the script: .*{says}"):
        parse_script('{"text": "fine"}\n' + line)


def test_empty_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="holds no answer"):
        parse_script("\n \n")
    with pytest.raises(ScriptError, match="cannot be read"):
        ReplayScript.load(tmp_path / "missing.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "é"}', encoding="utf-8")
    assert ReplayScript.load(tmp_path / "a.jsonl").lines[0].text == "é"


def test_lines_are_used_in_order_and_the_last_repeats() -> None:
    script = ReplayScript(
        [ScriptLine(1, "one"), ScriptLine(2, "title", "Title"), ScriptLine(3, "two"), ScriptLine(4, "three", "x")]
    )
    assert script.choose(request("hello")).text == "one"
    assert script.choose(request("Title please")).text == "title"
    assert script.choose(request("x")).text == "two"
    assert script.choose(request("x")).text == "three"
    assert script.choose(request("x")).text == "three"
    assert script.choose(request("hello")).text == "two"
    assert script.choose(request("Title again", Turn("user", "x"))).text == "two"


def test_a_request_that_nothing_fits() -> None:
    script = ReplayScript([ScriptLine(1, "one", "this"), ScriptLine(2, "two", "that")])
    with pytest.raises(ApiError, match=r"None of the 2 scripted answers fits.*begins 'other'") as refused:
        script.choose(request("other"))
    assert refused.value.kind.status == 400


def test_threads_never_share_a_line() -> None:
    script = ReplayScript([ScriptLine(number, str(number)) for number in range(1, 201)])
    chosen: list[int] = []

    def work() -> None:
        chosen.extend(script.choose(request("q")).number for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(chosen) == list(range(1, 201))


def test_tags_have_their_ids_and_the_answer_its_end() -> None:
    for split in ("token", "byte", "all"):
        answer = answers().encode(ScriptLine(1, RAW, split=split))
        assert answer.ids[-1] == EOS
        assert TOKENS.bytes_for(answer.ids[:-1]).decode() == RAW
        tags = [index for index in answer.ids if index in TOKENS.control_ids]
        assert [TOKENS.text_of(index) for index in tags] == ["</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
        assert answer.forced == (answer.ids if split == "all" else ())
    by_byte = answers().encode(ScriptLine(1, RAW, split="byte"))
    assert all(len(TOKENS.bytes_of[index]) == 1 for index in by_byte.ids if index not in TOKENS.control_ids)
    assert len(by_byte.ids) > len(answers().encode(ScriptLine(1, RAW)).ids)


def test_an_end_token_in_the_text_is_not_doubled() -> None:
    assert answers().encode(ScriptLine(1, "bye<|im_end|>")).ids.count(EOS) == 1
    assert answers().encode(ScriptLine(1, "")).ids == (EOS,)


@pytest.mark.parametrize("split", ["token", "byte", "all"])
def test_the_cursor_follows_its_own_tokens(split: str) -> None:
    answer = answers().encode(ScriptLine(1, RAW, split=split))
    cursor = answer.cursor()
    for place, token in enumerate(answer.ids):
        assert [cursor.next_token(ahead) for ahead in range(3)] == [*answer.ids[place : place + 3], None, None][:3]
        cursor.consume(token)
    assert cursor.next_token() is None


def test_a_row_that_says_something_else_fails() -> None:
    cursor = answers().encode(ScriptLine(1, "abc")).cursor()
    with pytest.raises(ScriptedFault, match="token 0 of the scripted answer"):
        cursor.consume(EOS)


CALL = 'start: "<call>\\n" ("read" | "write") "=\\n" /[^\\n]+/ "\\n</call>"'
"""A raw value between line breaks, as the call formats have it."""
FREE = "start: /(?s:.*)/"


def under(text: str, grammar: str, script: ReplayScript | None = None, **fields: Any) -> str:
    """What is said of a text under a grammar."""
    scripted = ScriptedAnswers(script or ReplayScript([]), TOKENS)
    answer = scripted.encode(ScriptLine(3, text, **fields)).under(request("please"), build(GRAMMAR_TOKENS, grammar).matcher())
    assert answer.ids[-1] == EOS
    assert answer.forced == (answer.ids if fields.get("split") == "all" else ())
    return TOKENS.bytes_for(answer.ids[:-1]).decode()


@pytest.mark.parametrize("split", ["token", "byte", "all"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<call>\nread=\nNOTES.md\n</call>", "<call>\nread=\nNOTES.md\n</call>"),
        ("<call>\nread=NOTES.md\n</call>", "<call>\nread=\nNOTES.md\n</call>"),
        ("<call>write=the user asks\n</call>", "<call>\nwrite=\nthe user asks\n</call>"),
        ("<call>\nread=\n  two words \n</call>", "<call>\nread=\n  two words \n</call>"),
    ],
)
def test_what_a_grammar_adds_takes_nothing_from_the_text(text: str, said: str, split: Any) -> None:
    assert under(text, CALL, split=split) == said
    assert under(text, FREE, split=split) == text


@pytest.mark.parametrize("split", ["token", "byte", "all"])
@pytest.mark.parametrize(
    ("text", "count", "follows"),
    [
        ("<call>\nwipe=\nx\n</call>", 8, "goes on with 'ipe=\\nx\\n</call>', where the grammar wants 'rite=\\n'"),
        ("hello", 0, "goes on with 'hello', where the grammar wants '<call>"),
        ("<call>\nread=\na\nb\n</call>", 15, "goes on with 'b\\n</call>', where the grammar wants '</c"),
        ("<call>\nread=\nabc", 16, "ends, which the grammar does not allow"),
        ("<call>\nread=\na\n</call>more", 22, "goes on with 'more', which the grammar does not allow"),
    ],
)
def test_a_text_that_the_grammar_does_not_take_is_refused_with_the_place(
    text: str, count: int, follows: str, split: Any
) -> None:
    with pytest.raises(ApiError) as refused:
        under(text, CALL, split=split)
    assert refused.value.kind.status == 400
    message = str(refused.value)
    assert message.startswith("The scripted answer in line 3 cannot be said to this request, whose last turn begins 'please': ")
    assert f"after {count} characters of its text" in message
    assert follows in message


def test_a_line_that_could_not_be_said_counts_as_not_used() -> None:
    script = ReplayScript([ScriptLine(3, "hello"), ScriptLine(4, "second")])
    for _ in range(2):
        assert script.choose(request("q")).number == 3
        with pytest.raises(ApiError, match="line 3"):
            under("hello", CALL, script)
    assert script.choose(request("q")).number == 3
    assert script.choose(request("q")).number == 4


def test_what_follows_an_end_token_in_the_text_is_no_part_of_the_answer() -> None:
    assert TOKENS.bytes_for(answers().encode(ScriptLine(1, "bye<|im_end|> more")).ids) == TOKENS.bytes_for(
        answers().encode(ScriptLine(1, "bye")).ids
    )


def test_a_vocabulary_without_all_bytes_keeps_its_tokens() -> None:
    tokenizer = byte_level()
    tokens = Tokens(tokenizer, eos_ids=[EOS])
    gap = tokens.bytes_of.index(b"q")
    tokens.bytes_of = tuple(b"" if index == gap else text for index, text in enumerate(tokens.bytes_of))
    scripted = answers(tokens=tokens)
    assert scripted.encode(ScriptLine(1, "q", split="byte")).ids == (*tokens.encode_plain("q").tolist(), EOS)
    assert len(scripted.encode(ScriptLine(1, "the", split="byte")).ids) == 4


def test_choosing_and_encoding_together() -> None:
    scripted = answers(ScriptLine(1, "one"), ScriptLine(2, "two"))
    assert [TOKENS.bytes_for(scripted.answer(request("q")).ids[:-1]) for _ in range(3)] == [b"one", b"two", b"two"]


def test_the_scripted_models_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"needs SmolLM2's tokenizer\.json"):
        replay_tokenizer_json(tmp_path)
    byte_level(tags=()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "chat_template": "old"}')
    tokenizer, config = replay_tokenizer_json(tmp_path)
    assert config == {"eos_token": "<|im_end|>", "chat_template": replay_template()}
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    size = max(tokenizer["model"]["vocab"].values()) + 1
    assert [added[tag]["id"] for tag in TAGS] == list(range(size + 3, size + 3 + len(TAGS)))
    assert not any(added[tag]["special"] for tag in TAGS)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokens = Tokens.load(tmp_path)
    assert set(TAGS) <= set(tokens.control)
