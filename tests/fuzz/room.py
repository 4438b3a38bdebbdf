"""A small room for the fuzzer: prompts, templates, grammars and the loop are the real ones.

It says scripted texts, calls among them, where a request lets it; under any other grammar its random weights babble.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pooled_mlx.core.card import SamplingDefaults
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.request import Request
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.engine import REPLAY_CARD, load_replay_model, write_replay_folder
from pooled_mlx.replay.script import ReplayScript, ScriptedAnswer, ScriptedAnswers, ScriptLine
from pooled_mlx.runner.start import MlxSource
from pooled_mlx.store import Ready
from tests.fuzz.cases import TOOL

_READY_SECONDS = 300.0
_CALL = "<tool_call>\n<function=read_file>\n<parameter=path>\n{}\n</parameter>\n</function>\n</tool_call>"
TEXTS = (
    "One, two, three, four, five.",
    "I think.\n</think>\n\nThe answer is 7.",
    "<think>\nagain</think> and more",
    "",
    "[1, 2",
    '"\\u00e4\\n" 👩‍👩‍👧 你好',
)
CALLS = (
    f"I will look.\n\n{_CALL.format('ä 🙂.md')}",
    f"{_CALL.format('a')}\n{_CALL.format('b.txt')}",
    _CALL.format("<b>\n</b>"),
)


class WhereItFits(ScriptedAnswers):
    """One text after the other, without end; no text for a request whose grammar it might leave unfinished."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(ReplayScript([]), tokens)
        self._count = itertools.count()

    def answer(self, request: Request) -> ScriptedAnswer | None:  # type: ignore[override]
        """The next text that fits, None where the model has to find its own."""
        number = next(self._count)
        texts = TEXTS
        if request.tools:
            plain = any(tool.name == TOOL["name"] and tool.parameters == TOOL["parameters"] for tool in request.callable_tools)
            if request.tool_choice.mode != "auto" or not plain or request.call_limit < 2 or request.thinking.on:
                return None
            texts = CALLS
        if request.response_format.kind != "text" or (not request.tools and any(turn.tool_calls for turn in request.turns)):
            return None
        return self.encode(ScriptLine(number, texts[number % len(texts)]))


@contextmanager
def small_room(embedded: Ready, folder: Path) -> Iterator[LocalEngine]:
    """A running room, its model folder in `folder`."""
    write_replay_folder(embedded.folder, folder)
    card = replace(REPLAY_CARD, sampling=SamplingDefaults(temperature=1.0))
    settings: dict[str, Any] = {"context_tokens": 8192, "pool_bytes": 64 << 20, "max_queue": 32, "prefill_step": 256, "seed": 7}
    room = LocalEngine(card, folder, EngineSettings(**settings), MlxSource(load_replay_model))
    room._admission._scripts = WhereItFits(room._tokens)
    room.start()
    try:
        if not room.wait_ready(_READY_SECONDS):
            raise RuntimeError(f"the room is not ready: {room.health()['reason']}")
        yield room
    finally:
        room.stop()
