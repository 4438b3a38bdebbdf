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

_TAGS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
_ENDS = (END, CALL, RETURN)
_CHANNELS = ("analysis", "commentary", "final")


def _beginning(word: str, more: str = "") -> str:
    """A regex for `word` and what it begins with; `more` may follow the whole word."""
    found = more
    for char in reversed(word):
        found = f"(?:{re.escape(char)}{found})?"
    return found


_HEADER = re.compile(
    rf"(?:{re.escape(START)}\s*assistant)?\s*(?:to=(?P<before>[^\s<]+))?\s*"
    rf"(?:{re.escape(CHANNEL)}\s*(?P<channel>{'|'.join(_CHANNELS)})\b\s*(?:to=(?P<after>[^\s<]+))?)?\s*"
    rf"(?:(?:{re.escape(CONSTRAIN)}\s*|(?<=\s))(?P<type>[\w-]*))?\s*"
)
_RECIPIENT = _beginning("to=", r"[^\s<]*")
_MAY_BE_HEADER = re.compile(
    rf"(?:{re.escape(START)}\s*{_beginning('assistant')})?\s*{_RECIPIENT}\s*"
    rf"(?:{re.escape(CHANNEL)}\s*(?:{'|'.join(map(_beginning, _CHANNELS))})(?:\s+{_RECIPIENT})?\s*)?"
    rf"(?:(?:{re.escape(CONSTRAIN)}\s*|(?<=\s))[\w-]*)?\s*"
)
"""Matches whatever a header may begin with, so that other text is told from one as soon as it differs."""


class HarmonyParser:
    """Reads messages. The answer begins inside the header of the first one.

    analysis is reasoning; final, and commentary to nobody, are answer text; a message to a callable function is a call. A
    message to anyone else is text, its header included, and so is what looks like a header and is none. In the final message
    a tag that does not end it is text; in the others a header may come without the end of the message before it.
    """

    def __init__(self, setup: ParserSetup) -> None:
        self._writer = setup.writer
        self._setup = setup
        self._calls = Calls(setup, 1)
        self._spelled = tuple(tag for tag in _TAGS if tag not in setup.token_tags)
        self._body = "none"
        """The message being read: "none", "analysis", "preamble", "final", "call", "called" (its arguments are complete)."""
        self._header: str | None = ""
        """The header that may follow the message, None where none began."""
        self._behind = ""
        self._reader: HermesReader | None = None
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """True inside a message on the analysis channel."""
        return self._body == "analysis" and self._header is None

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
        self._end_header(cut)
        self._end_message()

    def _plain(self, text: str) -> None:
        """Text of the header, as long as it may be one, or of the message."""
        if not text:
            return
        if self._header is None:
            self._content(text)
            return
        self._header += text
        if "<" in text or _MAY_BE_HEADER.fullmatch(self._header) is None:
            self._no_header()

    def _content(self, text: str) -> None:
        if self._body == "none":
            # text that lacks its header
            self._body = "preamble"
        if self._body == "analysis":
            self._writer.reasoning(text)
        elif self._body == "call":
            assert self._reader is not None
            state, rest = self._reader.feed(text)
            if state == "done":
                self._reader = None
                self._body = "called"
                self._behind = rest
        elif self._body == "called":
            self._behind += text
        else:
            self._writer.text(text)

    def _tag(self, name: str) -> None:
        if self._body == "call" and name not in (CALL, RETURN) and self._reader is not None and self._reader.in_value:
            self._content(name)
        elif name in _ENDS:
            self._end_header(False)
            self._end_message()
            self._header = ""
        elif self._header is None:
            if name in (START, CHANNEL) and self._body != "final":
                self._header = name
            else:
                self._content(name)
        elif name == MESSAGE:
            self._begin_message()
        else:
            self._header += name
            if _MAY_BE_HEADER.fullmatch(self._header) is None:
                self._no_header()

    def _no_header(self) -> None:
        """What began like a header is text of the message it stands in."""
        header, self._header = self._header or "", None
        self._content(header)

    def _end_header(self, cut: bool) -> None:
        """The message, or the answer, ends in a header. A whole header without a message says nothing; neither does the
        beginning of one that a limit cut off."""
        header = self._header or ""
        if not header:
            return
        found = _HEADER.fullmatch(header)
        whole = found is not None and (found["type"] in (None, "", "json") or CONSTRAIN in header)
        begun = header.removeprefix(START).strip() in ("", CHANNEL)
        if not ((whole or begun or cut) and header.startswith((START, CHANNEL))):
            self._no_header()
        self._header = None

    def _begin_message(self) -> None:
        header = self._header or ""
        found = _HEADER.fullmatch(header)
        if found is None:
            self._no_header()
            self._content(MESSAGE)
            return
        self._header = None
        self._end_message()
        recipient = found["before"] or found["after"] or "assistant"
        if recipient != "assistant":
            if self._calls.possible:
                reader = HermesReader(self._setup, self._calls, frozenset({"name"}), frozenset({"arguments"}))
                if reader.begin(recipient.removeprefix(FUNCTIONS)):
                    self._reader, self._body = reader, "call"
                    return
            self._body = "final"
            self._writer.text(header + MESSAGE)
        elif found["channel"] == "analysis":
            self._writer.open_reasoning()
            self._body = "analysis"
        else:
            self._body = "preamble" if found["channel"] == "commentary" else "final"

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
        self._body = "none"


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
