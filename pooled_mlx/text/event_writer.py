"""Turns what a format's parser recognises into events: frames, stop strings, call numbers and ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from pooled_mlx.core.request import Tool, ToolCall
from pooled_mlx.text.stop_strings import StopStrings

SPACE = " \t\r\n"
"""The characters that chat templates trim around reasoning, text and calls."""


class EventWriter:
    """Collects the events of one answer.

    What belongs to the frame of the chat format, not to the answer: newlines directly after a thinking tag, whitespace
    before a closing thinking tag, before a call and after a call. Stop strings see answer text only, frame excluded. After
    a stop string was met (`stop`) everything is ignored.
    """

    def __init__(self, stops: Iterable[str], new_call_id: Callable[[], str]) -> None:
        self.stop: str | None = None
        self.calls: list[ToolCall] = []
        self.notes: list[str] = []
        """What was repaired or refused, for the log."""
        self.stand_ins: dict[str, str] = {}
        """Characters in what is written that stand for tokens, and what these are spelled like."""
        self._stops = StopStrings(stops) if any(stops) else None
        self._new_call_id = new_call_id
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._skip = ""
        self._space: list[str] = []
        self._thought_skip = "\n"
        self._thought_space: list[str] = []
        self._call: tuple[Tool, str] | None = None
        self._arguments: list[str] = []
        self._started = 0

    @property
    def answer_text(self) -> str:
        """All answer text so far."""
        return "".join(self._texts)

    @property
    def reasoning_text(self) -> str:
        """All reasoning so far."""
        return "".join(self._thoughts)

    @property
    def started_calls(self) -> int:
        """Calls begun so far, the open one included."""
        return self._started

    def take(self) -> list[Event]:
        """The events since the last `take`."""
        events, self._events = self._events, []
        return events

    def note(self, what: str) -> None:
        """Remember a repair or a refusal."""
        what = self._shown(what)
        if self.stop is None and what not in self.notes:
            self.notes.append(what)

    def text(self, text: str) -> None:
        """Answer text."""
        if self.stop is not None:
            return
        text = self._shown(text)
        if self._skip:
            text = text.lstrip(self._skip)
            if not text:
                return
            self._skip = ""
        if self._stops is None:
            self._put_text(text)
            return
        text, stop = self._stops.add(text)
        self._put_text(text)
        if stop is not None:
            self._release_space()
            self.stop = stop

    def reasoning(self, text: str) -> None:
        """Thinking."""
        if self.stop is not None:
            return
        text = self._shown(text)
        if self._thought_skip:
            text = text.lstrip(self._thought_skip)
            if not text:
                return
            self._thought_skip = ""
        body = text.rstrip(SPACE)
        space = text[len(body) :]
        if body:
            if self._thought_space:
                body = "".join((*self._thought_space, body))
                self._thought_space.clear()
            self._thoughts.append(body)
            self._events.append(Reasoning(body))
        if space:
            self._thought_space.append(space)

    def open_reasoning(self) -> None:
        """A thinking block begins."""
        self.end_text()
        self._thought_skip = "\n"

    def close_reasoning(self) -> None:
        """The thinking block ends; the newlines after it belong to the frame."""
        self._thought_space.clear()
        self._skip = "\n"

    def call_start(self, tool: Tool) -> None:
        """A call of `tool` begins. Whitespace before it belongs to the frame."""
        self.end_text()
        if self.stop is not None:
            return
        self._thought_space.clear()
        self._call = (tool, self._new_call_id())
        self._arguments = []
        self._events.append(CallStart(self._started, self._call[1], tool.name))
        self._started += 1

    def call_arguments(self, text: str) -> None:
        """The next fragment of the open call's arguments."""
        if self._call is not None and text:
            text = self._shown(text)
            self._arguments.append(text)
            self._events.append(CallArguments(self._started - 1, text))

    def call_end(self) -> None:
        """The open call is complete. Whitespace after it belongs to the frame."""
        if self._call is None:
            return
        tool, call_id = self._call
        self._call = None
        self.calls.append(ToolCall(call_id, tool.name, "".join(self._arguments), tool.custom, tool.namespace))
        self._events.append(CallEnd(self._started - 1))
        self._skip = SPACE

    def finish(self) -> None:
        """The answer is over: what was held back goes out. An open call stays open."""
        if self._call is None and self.stop is None:
            if self._stops is not None:
                self._put_text(self._stops.end())
            self._release_space()

    def end_text(self) -> None:
        """What comes next is no text: whitespace at its end belongs to the frame."""
        if self._stops is not None and self.stop is None:
            self._put_text(self._stops.end())
        self._space.clear()

    def _shown(self, text: str) -> str:
        for character, spelling in self.stand_ins.items():
            text = text.replace(character, spelling)
        return text

    def _put_text(self, text: str) -> None:
        body = text.rstrip(SPACE)
        space = text[len(body) :]
        if body:
            if self._space:
                body = "".join((*self._space, body))
                self._space.clear()
            self._texts.append(body)
            self._events.append(Text(body))
        if space:
            self._space.append(space)

    def _release_space(self) -> None:
        if self._space:
            space = "".join(self._space)
            self._space.clear()
            self._texts.append(space)
            self._events.append(Text(space))
