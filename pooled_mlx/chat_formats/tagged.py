"""The parser shared by formats that put thinking and calls between tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol

from pooled_mlx.core.request import MAX_CALLS, Tool
from pooled_mlx.text.answer_stream import ParserSetup
from pooled_mlx.text.event_writer import SPACE

THINK, END_THINK = "<think>", "</think>"

Step = tuple[Literal["open", "rejected", "done"], str]
"""What a reader made of a piece: it wants more; or what it read is no call, with all of that text; or the call is
complete, with the text after it."""

Closing = Literal["yes", "maybe", "no"]


class CallReader(Protocol):
    """Reads the body of one call. Until `committed` nothing of it has become an event."""

    @property
    def committed(self) -> bool:
        """True once the call has begun for the client: from here on it is completed, never taken back."""
        ...

    def feed(self, text: str) -> Step:
        """The next piece of the body."""
        ...

    def close(self) -> Step:
        """The closing tag or the end of the answer: complete the call or reject it. Never "open"."""
        ...

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """How a closing tag is to be taken here: as a token of its own or spelled with ordinary text, perhaps on a new line.

        "maybe" is for a value that is still open: the tag counts unless what follows `refutes` it.
        """
        ...

    @property
    def in_value(self) -> bool:
        """True inside a value whose end has not been seen: an opening tag that comes as a token is content there."""
        ...

    def tag(self, name: str) -> Step:
        """One of the format's tags that stand inside a call arrived as a token of its own."""
        ...

    def refutes(self, text: str) -> bool:
        """True when `text`, which follows a closing tag that was a "maybe", shows that the value went on."""
        ...


class Calls:
    """The calls one answer may still make: as many as the request allows, at `most` what the format can express."""

    def __init__(self, setup: ParserSetup, most: int = MAX_CALLS) -> None:
        self._writer = setup.writer
        self._limit = min(setup.request.call_limit, most)
        self._tools = {tool.name: tool for tool in setup.request.callable_tools}

    @property
    def possible(self) -> bool:
        """True while one more call may begin."""
        return bool(self._tools) and self._writer.started_calls < self._limit

    def find(self, name: str) -> Tool | None:
        """The callable tool of that name."""
        tool = self._tools.get(name) or self._tools.get(unquoted(name))
        if tool is None:
            self._writer.note(f"a call of {name!r}, which is not a callable tool, was left as text")
        return tool


def unquoted(name: str) -> str:
    """A name without the quotes that some models put around it, or on one side of it."""
    return name.strip(SPACE).strip("\"'")


class Examples:
    """Whole pairs of a format's tags inside one value, the opening tag spelled in text: whether one is open."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._tail = ""
        self._count = 0

    @property
    def open(self) -> bool:
        """True while more opening than closing tags were content."""
        return self._count > 0

    def add(self, text: str) -> None:
        """The next piece of the value."""
        text = self._tail + text
        for tag, step in ((self._opening, 1), (self._closing, -1)):
            # what the last piece ended with is seen again, and is shorter than either tag
            self._count += step * text.count(tag)
        self._count = max(0, self._count)
        self._tail = _tail_of(text, (self._opening, self._closing))


def _tail_of(text: str, tags: tuple[str, ...]) -> str:
    """The longest end of `text` with which one of `tags` may begin."""
    longest = max(map(len, tags)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return text[-size:]
    return ""


class TaggedParser:
    """Thinking tags, a call tag pair, and text around them.

    Tags count by token where the model has them as tokens, else by their spelling. An answer has at most one thought, and none
    where thinking is off: any other thinking tag is text, in its place (an empty thought at the very start is nothing: some
    models write one where they were asked not to think). A call inside thinking is a call, and the thinking
    goes on after it. What turns out to be no call is text (or thinking), tags included. A whole pair of call tags inside a
    value is content.
    """

    def __init__(
        self,
        setup: ParserSetup,
        *,
        call_tags: tuple[str, str] | None,
        calls: Calls,
        reader: Callable[[bool], CallReader] | None = None,
        bare: str | None = None,
        again: tuple[str, ...] = (),
        first: str | None = None,
        inner_tags: frozenset[str] = frozenset(),
        think_tags: tuple[str, str] = (THINK, END_THINK),
        think_header: str = "",
    ) -> None:
        """`call_tags` enclose a call, None where the format has none; the closing one may be "". `reader(bare)` makes a reader
        for a call's body.

        `bare` begins a call that lacks its tags, at the start of a line. `again` is what another call inside the same pair of
        tags may begin with; a token among them begins one anywhere. `first` is the character that begins a call at the very
        start of the answer.
        `inner_tags` are the reader's. `think_header` is what a thought begins with that is not part of it.
        """
        self._writer = setup.writer
        self._calls = calls
        self._open_tag, self._close_tag = call_tags or ("", "")
        self._think, self._end_think = think_tags
        self._inner = inner_tags
        self._think_header = think_header
        self._header_left = ""
        self._empty: str | None = None
        self._first = first if self._calls.possible else None
        self._new_reader = reader
        self._bare = bare if call_tags and self._calls.possible else None
        self._again = again
        self._thinking = setup.reasoning_open
        self._may_think = setup.request.thinking.on and not setup.reasoning_open
        self._reader: CallReader | None = None
        self._opening = ""
        self._inside_pair = False
        self._junk = ""
        self._held = ""
        self._maybe: str | None = None
        self._nested = 0
        self._last = "\n"
        self._just_called = False
        spelled: list[str] = []
        if setup.reasoning_open or setup.request.thinking.on:
            spelled += [tag for tag in think_tags if tag not in setup.token_tags]
        if self._calls.possible and call_tags:
            spelled += [tag for tag in call_tags if tag and tag not in setup.token_tags]
        self._spelled_pair = tuple(tag for tag in spelled if tag in (self._open_tag, self._close_tag))
        self._triggers = tuple(spelled) + ((self._bare,) if self._bare else ())
        self._trigger = re.compile("|".join(map(re.escape, self._triggers))) if self._triggers else None
        self._prefixes = frozenset(mark[:n] for mark in self._triggers for n in range(1, len(mark)))
        self._beginnings = frozenset(mark[0] for mark in self._triggers)
        self._longest = max(map(len, self._triggers), default=1) - 1

    @property
    def in_reasoning(self) -> bool:
        """True while what comes next is thinking: not in a call, nor right after one that was made while thinking."""
        return self._thinking and not self._just_called and (self._reader is None or not self._reader.committed)

    def text(self, text: str) -> None:
        """Ordinary text."""
        if self._empty is not None:
            text, self._empty = self._empty + text, None
            if self._is_empty_thought(text):
                self._empty = text
                return
        if self._trigger is None and self._reader is None and not self._inside_pair and self._first is None:
            self._put(text)
            return
        if self._maybe is not None:
            assert self._reader is not None
            self._maybe += text
            if self._reader.refutes(self._maybe):
                self._refute()
            return
        self._go(self._held + text)

    def tag(self, name: str) -> None:
        """A tag that came as a token of its own."""
        if self._empty is not None:
            text, self._empty = self._empty, None
            if name == self._end_think:
                self._writer.close_reasoning()
                return
            self._put(text)
        if name in self._inner and self._maybe is not None:
            self._refute()
        self._settle()
        if self._reader is not None and self._held:
            self._go(self._result(self._reader.feed(self._take_held())))
        if self._reader is not None:
            if name in self._inner:
                self._go(self._result(self._reader.tag(name)))
                return
            if name == self._close_tag and not self._nested:
                closing = self._reader.closing(token=True, after_newline=self._last == "\n")
                if closing == "no":
                    self._last = ">"
                    self._go(self._result(self._reader.feed(name)))
                elif closing == "maybe":
                    self._maybe = ""
                else:
                    self._end_call(True)
                return
            if self._reader.committed and (name != self._open_tag or self._reader.in_value):
                self._nested += (name == self._open_tag) - (name == self._close_tag)
                self._last = ">"
                self._go(self._result(self._reader.feed(name)))
                return
            self._end_call(False)
        self._put(self._take_held())
        self._outer_tag(name, token=True)

    def finish(self, cut: bool) -> None:
        """The answer is over."""
        if self._empty is not None:
            self._put(self._empty)
        self._settle()
        if self._reader is not None and self._held:
            self._go(self._result(self._reader.feed(self._take_held())))
        if self._reader is None:
            self._put(self._take_held())
            if self._thinking and not cut and not self._just_called:
                self._writer.note("the turn ended inside a thought")
        elif not cut:
            if self._reader.committed:
                self._writer.note("the turn ended inside a call")
            self._end_call(False)
        elif not self._reader.committed:
            self._writer.note("the limit cut off a call before its name")
            self._writer.end_text()

    def _refute(self) -> None:
        """A closing tag that was a "maybe" was content: what came after it belongs inside the call."""
        assert self._maybe is not None
        assert self._reader is not None
        text, self._maybe = self._maybe, None
        self._go(self._result(self._reader.feed(self._close_tag)) + text)

    def _settle(self) -> None:
        """A closing tag that was a "maybe" counts: nothing spoke against it."""
        if self._maybe is not None:
            text, self._maybe = self._maybe, None
            self._end_call(True)
            self._go(text)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _go(self, text: str) -> None:
        self._held = ""
        while text:
            text = self._step(text) if self._reader is None else self._read(text)

    def _outer_tag(self, name: str, *, token: bool = False) -> None:
        if name == self._think and self._may_think:
            self._thinking, self._may_think = True, False
            self._header_left = self._think_header
            self._writer.open_reasoning()
        elif name == self._think and self._thinking and not self._writer.reasoning_text:
            return  # the prompt has opened the thought, and the model repeats that
        elif name == self._think and token and not self._said and not self._thinking:
            self._empty = name
        elif name == self._end_think and self._thinking:
            self._thinking, self._header_left = False, ""
            self._writer.close_reasoning()
        elif name == self._open_tag and self._calls.possible:
            self._begin(name)
        elif name == self._close_tag and self._inside_pair:
            self._inside_pair, self._junk = False, ""
        elif token and name in self._again and self._calls.possible:
            self._begin("")
            self._go(self._result(self._reader.tag(name)) if self._reader else "")
        else:
            self._put(name)

    @property
    def _said(self) -> bool:
        return bool(self._writer.answer_text or self._writer.reasoning_text or self._writer.started_calls)

    def _is_empty_thought(self, text: str) -> bool:
        """Whether `text`, a tag that opens a thought and what follows, has no word of a thought yet."""
        inside = text.removeprefix(self._think)
        return self._think_header.startswith(inside) or not inside.removeprefix(self._think_header).strip(SPACE)

    def _begin(self, opening: str) -> None:
        assert self._new_reader is not None
        self._inside_pair, self._junk = False, ""
        self._nested = 0
        self._reader = self._new_reader(opening == self._bare)
        self._opening = opening

    def _step(self, text: str) -> str:
        """Outside of calls: deal with the front of `text`, return the rest."""
        if self._inside_pair:
            rest = text.lstrip(SPACE + ",;}]")
            self._junk += text[: len(text) - len(rest)]
            if not rest:
                return ""
            if self._again and self._calls.possible:
                if rest.startswith(self._again):
                    self._begin("")
                    return rest
                if any(mark.startswith(rest) for mark in self._again):
                    self._held = rest
                    return ""
            self._inside_pair = any(rest.startswith(tag) or tag.startswith(rest) for tag in self._spelled_pair)
            text = rest
        if self._first is not None and not self._thinking:
            body = text.lstrip(SPACE)
            if not body:
                self._put(text)
                return ""
            first, self._first = self._first, None
            if body[0] == first and self._calls.possible:
                self._put(text[: len(text) - len(body)])
                self._begin("")
                return body
        match = self._trigger.search(text) if self._trigger else None
        if match is None:
            self._put(text[: len(text) - self._hold(text)])
            return ""
        name = match.group()
        self._put(text[: match.start()])
        if name == self._bare:
            if self._thinking or self._last != "\n" or self._in_code() or not self._calls.possible:
                self._put(name)
            else:
                self._begin(name)
        else:
            self._outer_tag(name)
        return text[match.end() :]

    def _hold(self, text: str) -> int:
        nearest = len(text)
        for char in self._beginnings:
            at = text.find(char, max(0, len(text) - self._longest))
            while 0 <= at < nearest and text[at:] not in self._prefixes:
                at = text.find(char, at + 1)
            nearest = at if 0 <= at < nearest else nearest
        self._held = text[nearest:]
        return len(text) - nearest

    def _in_code(self) -> bool:
        return self._writer.answer_text.count("```") % 2 == 1

    def _read(self, text: str) -> str:
        """Inside a call: deal with the front of `text`, return the rest."""
        assert self._reader is not None
        close = self._close_tag if self._close_tag in self._spelled_pair else ""
        if close and text.startswith(close):
            back = text[len(close) :]
            if self._reader.closing(token=False, after_newline=self._last == "\n") == "yes":
                self._end_call(True)
                return back
            self._last = close[-1]
            return self._result(self._reader.feed(close)) + back
        end = len(text)
        if close:
            end = next((at for at in _positions(text, close[0]) if _may_begin(text, at, close)), end)
        if end:
            self._last = text[end - 1]
            step = self._reader.feed(text[:end])
            if step[0] != "open":
                return self._result(step) + text[end:]
        if len(text) - end >= len(close):
            return text[end:]
        self._held = text[end:]
        return ""

    def _result(self, step: Step) -> str:
        state, rest = step
        if state == "rejected":
            self._reader = None
            self._put(self._opening)
        elif state == "done":
            self._reader = None
            self._inside_pair = self._just_called = True
            self._last = "\n"
        return rest

    def _end_call(self, closed: bool) -> None:
        """A tag or the end of the answer ends the call being read."""
        while self._reader is not None:
            step = self._reader.close()
            self._go(self._result(step))
            if step[0] == "done":
                self._inside_pair, self._junk = False, ""
                return
        self._put(self._take_held() + (self._close_tag if closed else ""))

    def _put(self, text: str) -> None:
        if not text:
            return
        text, self._junk = self._junk + text, ""
        self._last = text[-1]
        self._just_called = self._just_called and not text.strip(SPACE)
        if self._thinking:
            while self._header_left and text:
                same = text[0] == self._header_left[0]
                self._header_left = self._header_left[1:] if same else ""
                text = text[1:] if same else text
            self._writer.reasoning(text)
        else:
            self._writer.text(text)


def first_tag(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Where the first of `tags` stands in `text`, and which; "" where one may only begin, at the end of the text."""
    found = len(text), ""
    for tag in tags:
        at = next((at for at in _positions(text, tag[0]) if _may_begin(text, at, tag)), len(text))
        if at < found[0]:
            found = at, tag if text.startswith(tag, at) else ""
    return found


def _positions(text: str, char: str) -> Iterator[int]:
    at = text.find(char)
    while at >= 0:
        yield at
        at = text.find(char, at + 1)


def _may_begin(text: str, at: int, mark: str) -> bool:
    """Whether `mark` stands at `at`, or may do so once more text came."""
    return text.startswith(mark, at) or (len(text) - at < len(mark) and mark.startswith(text[at:]))
