"""Scripted answers: reading the file, choosing a line, and following it token by token."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.engine.faults import Faults
from pooled_mlx.engine.replay_assets import TAGS, replay_template, replay_tokenizer_json
from pooled_mlx.engine.replay_script import ReplayScript, ScriptedAnswers, ScriptError, ScriptLine, parse_script
from pooled_mlx.engine.tokens import TokenizerError, Tokens
from tests.small_tokenizer import byte_level, byte_level_tokens

TOKENS = byte_level_tokens()
EOS = TOKENS.added["<|im_end|>"]
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
    cursor.consume(EOS)
    assert cursor.next_token() is None


@pytest.mark.parametrize("seed", range(30))
def test_other_tokens_for_the_same_text_are_followed_byte_by_byte(seed: int) -> None:
    rng = random.Random(seed)
    scripted = answers()
    answer = scripted.encode(ScriptLine(1, RAW, split=rng.choice(["token", "byte"])))
    cursor = answer.cursor()
    whole = TOKENS.bytes_for(answer.ids[:-1])
    ordinary = [index for index, text in enumerate(TOKENS.bytes_of) if text and index not in TOKENS.control_ids]
    said = b""
    for _ in range(len(whole) + 1):
        token = cursor.next_token()
        if token == EOS:
            break
        if rng.random() < 0.5:
            fitting = [index for index in ordinary if whole.startswith(TOKENS.bytes_of[index], len(said))]
            token = rng.choice(fitting) if fitting else token
        assert token is not None
        cursor.consume(token)
        said += TOKENS.bytes_of[token]
    assert said == whole
    cursor.consume(TOKENS.bytes_of.index(b"z"))
    assert cursor.next_token() == EOS


def test_after_another_text_it_goes_on_at_the_next_place() -> None:
    answer = answers().encode(ScriptLine(1, "abcdef", split="byte"))
    other = TOKENS.bytes_of.index(b"z")
    cursor = answer.cursor()
    cursor.consume(answer.ids[0])
    cursor.consume(other)
    assert cursor.next_token() == answer.ids[2]
    assert cursor.next_token(1) == answer.ids[3]
    wordy = answers().encode(ScriptLine(1, "the user asks"))
    cursor = wordy.cursor()
    first = TOKENS.bytes_of[wordy.ids[0]]
    assert len(first) > 2
    cursor.consume(TOKENS.bytes_of.index(first[:1]))
    assert TOKENS.bytes_of[cursor.next_token() or 0] != first
    cursor.consume(other)
    assert cursor.next_token() == wordy.ids[1]


def test_an_early_end_ends_the_script() -> None:
    cursor = answers().encode(ScriptLine(1, "abc")).cursor()
    cursor.consume(EOS)
    assert cursor.next_token() is None


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
