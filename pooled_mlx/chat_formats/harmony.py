"""Harmony (gpt-oss): messages on the channels analysis, commentary and final; a call is a message to `functions.name`.

Format: the description published with OpenAI's harmony renderer, and the chat template published with gpt-oss-120b. One call a
turn: the token behind it, `<|call|>`, ends the turn.
"""

from __future__ import annotations

import re

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.hermes import HermesReader
from pooled_mlx.chat_formats.tagged import Calls
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN, CALL, RETURN = "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_TAGS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)


class HarmonyParser:
    """Reads messages. The answer begins inside the header of the first one.

    analysis is reasoning; final, and commentary to nobody, are answer text; a message to a callable function is a call. A
    message to anyone else is text, its header included.
    """

    def __init__(self, setup: ParserSetup) -> None:
        self._writer = setup.writer
        self._setup = setup
        self._calls = Calls(setup, 1)
        self._spelled = tuple(tag for tag in _TAGS if tag not in setup.token_tags) if not setup.token_tags else ()
        self._header = ""
        self._body = ""
        self._behind = ""
        self._reader: HermesReader | None = None
        self._first = True
        """No tag was seen: what came is text that lacks its header."""
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """True inside a message on the analysis channel."""
        return self._body == "analysis"

    def text(self, text: str) -> None:
        """Ordinary text."""
        text, self._held = self._held + text, ""
        while text and self._spelled:
            at = min((found for tag in self._spelled if (found := _place(text, tag)) >= 0), default=-1)
            if at < 0:
                break
            self._plain(text[:at])
            tag = next((tag for tag in self._spelled if text.startswith(tag, at)), "")
            if not tag:
                self._held = text[at:]
                return
            self._tag(tag)
            text = text[at + len(tag) :]
        self._plain(text)

    def tag(self, name: str) -> None:
        """A tag as a token of its own."""
        held, self._held = self._held, ""
        self._plain(held)
        self._tag(name)

    def finish(self, cut: bool) -> None:
        """The answer is over."""
        held, self._held = self._held, ""
        self._plain(held)
        if self._body == "call" and cut:
            return
        if self._first:
            self._writer.text(self._header)
        elif self._body == "" and not cut:
            self._writer.text(_words_of(self._header))
        self._end_message()

    def _plain(self, text: str) -> None:
        if not text:
            return
        if self._body == "":
            self._header += text
        elif self._body == "analysis":
            self._writer.reasoning(text)
        elif self._body == "call":
            assert self._reader is not None
            state, rest = self._reader.feed(text)
            if state == "done":
                self._reader = None
                self._body = "called"
                self._plain(rest)
        elif self._body == "called":
            self._behind += text
        else:
            self._writer.text(text)

    def _tag(self, name: str) -> None:
        self._first = False
        if name in (START, END, CALL, RETURN):
            if self._body == "":
                header, self._header = self._header, ""
                self._writer.text(_words_of(header))
                return
            self._end_message()
        elif self._body == "" and name == MESSAGE:
            self._begin_message()
        elif self._body == "":
            self._header += name
        elif name == CHANNEL:
            # a header without the end of the message before it
            self._end_message()
            self._header = name
        else:
            self._plain(name)

    def _begin_message(self) -> None:
        header, self._header = self._header, ""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        kind = channel[1] if channel else "final"
        if recipient is not None and recipient[1] != "assistant":
            if self._calls.possible:
                reader = HermesReader(self._setup, self._calls, frozenset({"name"}), frozenset({"arguments"}))
                if reader.begin(recipient[1].removeprefix(FUNCTIONS)):
                    self._reader, self._body = reader, "call"
                    return
            self._body = "text"
            self._writer.text(header + MESSAGE)
        elif kind == "analysis":
            self._writer.open_reasoning()
            self._body = "analysis"
        else:
            self._body = "text"

    def _end_message(self) -> None:
        if self._body == "analysis":
            self._writer.close_reasoning()
        elif self._body == "called":
            # what stands behind the arguments is a mistake: brackets too many are dropped, words are text
            behind, self._behind = self._behind.strip(SPACE + "}"), ""
            self._writer.text(behind)
        elif self._reader is not None:
            self._reader.close()
            self._reader = None
        self._body = ""


def _words_of(header: str) -> str:
    """What a header that no message follows says besides role and channel: words that the model put in the wrong place."""
    words = header.removeprefix("assistant").removeprefix(CHANNEL)
    return "" if words.strip() in ("", "analysis", "commentary", "final") or _RECIPIENT.search(words) else words


def _place(text: str, tag: str) -> int:
    """Where `tag` stands in `text`, or may begin at its end; -1 if nowhere."""
    at = text.find(tag[0])
    while at >= 0:
        if tag.startswith(text[at : at + len(tag)]):
            return at
        at = text.find(tag[0], at + 1)
    return -1


class Harmony:
    """Messages on channels."""

    tags = frozenset(_TAGS)
    end_of_thought = None

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write `<|channel|>analysis`."""
        return 3 if CHANNEL + "analysis" in template_text and MESSAGE in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        return HarmonyParser(setup)

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Any number of thoughts, then one call or the final message; a call that is not forced may have a preamble."""
        channel, message, end = (rules.tag(spec, lark, name) for name in (CHANNEL, MESSAGE, END))
        again = f'{end} {rules.tag(spec, lark, START)} "assistant"'
        thought = lark.rule("thought", f'{channel} "analysis" {message} {rules.ANY_TEXT} {again}')
        preamble = lark.rule("preamble", f'{channel} "commentary" {message} {rules.ANY_TEXT} {again}')
        calls: list[str] = []
        if spec.request.call_limit:
            as_json = f'({rules.tag(spec, lark, CONSTRAIN)} "json" | "json")'
            for tool in spec.tools:
                to = f"to={FUNCTIONS}{tool.name}"
                behind = f"{lark.text(f'commentary {to} ')} {as_json}"
                before = f'{lark.text(f" {to}")} {channel} "commentary " {as_json}'
                arguments = rules.json_arguments(spec, lark, tool)
                calls.append(f"({channel} {behind} | {before}) {message} {arguments}")
        if spec.request.tool_choice.mode in ("required", "named") and calls:
            return lark.build(f"{thought}* {lark.rule('calls', ' | '.join(calls))}")
        value = rules.ANY_TEXT if spec.json_schema is None else lark.json(spec.json_schema, "")
        final = lark.rule("final", f'{channel} "final" {message} {value}')
        if not calls:
            return lark.build(f"{thought}* {final}")
        return lark.build(f"{thought}* ({final} | {preamble}? {lark.rule('calls', ' | '.join(calls))})")


FORMAT = Harmony()
