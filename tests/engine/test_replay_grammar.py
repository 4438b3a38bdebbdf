"""Scripted calls under a request's grammar, in a running room: the arguments are the script's, or the request is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import CallArguments, CallStart, Finished
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.request import Request, Tool, Turn
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.replay.assets import replay_template
from pooled_mlx.replay.engine import REPLAY_CARD, Replay, load_replay_model
from pooled_mlx.replay.script import ReplayScript, ScriptLine, Split
from pooled_mlx.replay.tiny_model import tiny_hybrid_config
from pooled_mlx.runner.start import MlxSource
from tests.engine.test_room import MIB, WAIT_SECONDS, answers
from tests.small_tokenizer import byte_level, write_folder

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = (Tool("read_file", "Reads.", PATH), Tool("list_files", "Lists.", PATH))
CALL = "<tool_call>\n<function={}>\n<parameter=path>\n{}\n</parameter>\n</function>\n</tool_call>"


class Scripted:
    """A running room, whose script can be changed."""

    def __init__(self, folder: Path) -> None:
        settings = EngineSettings(context_tokens=2048, pool_bytes=8 * MIB, prefill_step=512, seed=7)
        self.room = LocalEngine(REPLAY_CARD, folder, settings, MlxSource(load_replay_model), rehearsal=Replay(ReplayScript([])))
        self.room.start()
        assert self.room.wait_ready(WAIT_SECONDS)

    def calls(self, *texts: str, split: Split = "token") -> list[tuple[str, dict[str, str]]]:
        """The calls with which a request is answered."""
        script: Any = self.room._admission._scripts
        script.script = ReplayScript([ScriptLine(number, text, split=split) for number, text in enumerate(texts, 1)])
        return self.again()

    def again(self) -> list[tuple[str, dict[str, str]]]:
        (events,) = answers(self.room, [Request("r", (Turn("user", "Read it."),), tools=TOOLS, max_output_tokens=200)])
        assert isinstance(events[-1], Finished)
        found = [event for event in events if isinstance(event, CallStart)]
        written = ["".join(e.text for e in events if isinstance(e, CallArguments) and e.index == c.index) for c in found]
        return [(start.name, json.loads(text)) for start, text in zip(found, written, strict=True)]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    tokenizer = byte_level()
    config = tiny_hybrid_config(-(-tokenizer.get_vocab_size() // 64) * 64)
    settings = {"eos_token": "<|im_end|>", "chat_template": replay_template()}
    made = Scripted(write_folder(tmp_path_factory.mktemp("model"), tokenizer, tokenizer_config=settings, config=config))
    yield made
    made.room.stop(WAIT_SECONDS)


@pytest.mark.parametrize("split", ["token", "byte", "all"])
@pytest.mark.parametrize("lost", ["", "\n<function", "\nNOTES", "\n</parameter"])
def test_a_line_break_that_the_grammar_adds_costs_no_argument(scripted: Scripted, split: Split, lost: str) -> None:
    text = CALL.format("read_file", "NOTES.md").replace(lost, lost[1:])
    assert scripted.calls(text, split=split) == [("read_file", {"path": "NOTES.md"})]


@pytest.mark.parametrize("split", ["token", "byte", "all"])
@pytest.mark.parametrize(
    ("text", "count"),
    [
        (CALL.format("read_dir", "x"), len("<tool_call>\n<function=read_")),
        (CALL.format("write_file", "x"), len("<tool_call>\n<function=")),
        (CALL.format("read_file", "x").replace("=path", "=file"), len("<tool_call>\n<function=read_file>\n<parameter=")),
        (CALL.format("read_file", "x").removesuffix("</tool_call>"), len(CALL.format("read_file", "x")) - len("</tool_call>")),
        # What does not stand on lines of its own is part of the value, which then has no end.
        (CALL.format("read_file", "x").replace("\n</function", "</function"), len(CALL.format("read_file", "x")) - 1),
    ],
)
def test_a_call_that_the_request_has_no_tool_for_is_refused_and_never_another_one(
    scripted: Scripted, split: Split, text: str, count: int
) -> None:
    good = CALL.format("list_files", "other")
    with pytest.raises(ApiError, match=f"line 1 .*'Read it.': after {count} characters") as refused:
        scripted.calls(text, good, split=split)
    assert refused.value.kind.status == 400
    with pytest.raises(ApiError, match="line 1"):  # a client that tries again is not answered from the next line
        scripted.again()
