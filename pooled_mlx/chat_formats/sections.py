"""Calls of DeepSeek and Kimi: a section of calls, each a name and a JSON object between tokens of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.hermes import HermesReader
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Step, TaggedParser, first_tag
from pooled_mlx.core.request import Tool
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

_LONGEST_NAME = 256
_FENCE, _END_FENCE = "```json", "```"


@dataclass(frozen=True, slots=True)
class Marks:
    """How a format writes a section: its tags, the head of a call and back.

    `name_of` takes the text before the arguments to the tool's name; `head` is the grammar of that text. `fenced` is a head
    behind which the name comes, and then the arguments in a fence of JSON ("" where there is no such form).
    """

    section: str
    end_section: str
    call: str
    end_call: str
    arguments: str
    name_of: Callable[[str], str]
    head: Callable[[GrammarBuilder, Tool], str]
    fenced: str = ""

    @property
    def inner(self) -> tuple[str, ...]:
        """The tags that stand inside a section."""
        return self.call, self.arguments, self.end_call


class SectionReader:
    """Reads one call of a section."""

    def __init__(self, setup: ParserSetup, calls: Calls, marks: Marks, bare: bool) -> None:
        self._json = HermesReader(setup, calls, frozenset(), frozenset())
        self._marks = marks
        self._spelled = tuple(tag for tag in marks.inner if tag not in setup.token_tags)
        self._raw: list[str] = []
        self._held = ""
        self._text = ""
        self._mode = "name" if bare else "start"
        """"start", "name", "fence" (a name in front of a fence), "json", "after" (the arguments are complete)."""

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._json.committed

    @property
    def in_value(self) -> bool:
        """True inside a JSON string."""
        return self._mode == "json" and self._json.in_value

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """Inside a JSON string the end of the section is content."""
        return self._json.closing(token=token, after_newline=after_newline) if self._mode == "json" else "yes"

    def refutes(self, text: str) -> bool:
        """Any text after the tag shows that the string went on."""
        return self._json.refutes(text)

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        self._note(text)
        text, self._held = self._held + text, ""
        while text:
            at, tag = first_tag(text, self._spelled)
            step = self._on_text(text[:at])
            if step[0] == "open" and tag:
                step = self._on_tag(tag)
            elif step[0] == "open":
                self._held = text[at:]
                return step
            if step[0] != "open":
                return step if step[0] == "rejected" else (step[0], step[1] + text[at + len(tag) :])
            text = text[at + len(tag) :]
        return "open", ""

    def tag(self, name: str) -> Step:
        """One of the section's tags as a token of its own."""
        self._note(name)
        held, self._held = self._held, ""
        step = self._on_text(held)
        return self._on_tag(name) if step[0] == "open" else step

    def close(self) -> Step:
        """Complete the call with what there is."""
        held, self._held = self._held, ""
        if self._on_text(held)[0] == "rejected" or not self.committed:
            return self._rejected()
        if self._mode != "after":
            self._json.close()
        return "done", self._behind()

    def _note(self, text: str) -> None:
        if not self.committed:
            self._raw.append(text)

    def _rejected(self) -> Step:
        return "rejected", "".join(self._raw)

    def _on_text(self, text: str) -> Step:
        if not text:
            return "open", ""
        if self._mode == "json":
            state, rest = self._json.feed(text)
            if state == "done":
                self._mode, self._text = "after", rest
            return "open", ""
        if self._mode == "start":
            body = text.lstrip(SPACE)
            if not body.startswith(self._marks.call):
                return ("open", "") if not body else self._rejected()
            self._mode = "name"
            return self._on_text(body[len(self._marks.call) :])
        self._text += text
        if self._mode == "name":
            too_long = len(self._text.strip(SPACE)) > _LONGEST_NAME
            return self._rejected() if too_long or "\n" in self._text.strip(SPACE) else ("open", "")
        return self._fence() if self._mode == "fence" else ("open", "")

    def _on_tag(self, tag: str) -> Step:
        marks = self._marks
        if self._mode == "start" and tag == marks.call:
            self._mode = "name"
        elif self._mode == "name" and tag == marks.arguments:
            name = marks.name_of(self._text.strip(SPACE))
            if name == marks.fenced:
                self._mode, self._text = "fence", ""
            elif not self._begin(name):
                return self._rejected()
        elif self._mode == "json" and self._json.in_value:
            self._json.feed(tag)
        elif self._mode in ("json", "after"):
            if self._mode == "json":
                self._json.close()
            return "done", self._behind() + ("" if tag == marks.end_call else tag)
        else:
            return self._rejected()
        return "open", ""

    def _fence(self) -> Step:
        """A name on a line of its own, then the fence; or the arguments at once, of a tool that is called like the head."""
        text = self._text.lstrip(SPACE)
        name, fence, rest = text.partition(_FENCE)
        if text.startswith("{"):
            name, rest = self._marks.fenced, text
        elif not fence:
            return ("open", "") if len(text) <= _LONGEST_NAME else self._rejected()
        if not self._begin(name.strip(SPACE)):
            return self._rejected()
        return self._on_text(rest)

    def _begin(self, name: str) -> bool:
        self._mode, self._text = "json", ""
        if not name or not self._json.begin(name):
            return False
        self._raw.clear()
        return True

    def _behind(self) -> str:
        """What stands behind the arguments: brackets too many and the end of a fence are dropped, words are text."""
        return self._text.strip(SPACE + "}`")


class Sections:
    """A chat format of sections, thinking between `<think>` tags."""

    end_of_thought = END_THINK

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.tags = frozenset({THINK, END_THINK, marks.section, marks.end_section, *marks.inner})

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write the tags of a call."""
        return 3 if all(tag in template_text for tag in (self._marks.call, self._marks.arguments)) else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls, marks = Calls(setup), self._marks

        def reader(bare: bool) -> CallReader:
            return SectionReader(setup, calls, marks, bare)

        return TaggedParser(
            setup,
            call_tags=(marks.section, marks.end_section),
            calls=calls,
            reader=reader,
            bare=None if marks.call in setup.token_tags else marks.call,
            again=(marks.call,),
            inner_tags=frozenset(marks.inner),
        )

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """A section of as many calls as the request allows."""
        body, marks = "", self._marks
        if spec.tools and spec.request.call_limit:
            call, between, end, end_section = (
                rules.tag(spec, lark, tag) for tag in (marks.call, marks.arguments, marks.end_call, marks.end_section)
            )
            heads = [(marks.head(lark, tool), rules.json_arguments(spec, lark, tool)) for tool in spec.tools]
            one = lark.rule("tools", "\n    | ".join(f"{head} {between} {arguments}" for head, arguments in heads))
            body = f"({call} {one} {end}){{1,{spec.request.call_limit}}} {end_section}"
        return lark.build(rules.answer(spec, lark, open_tag=marks.section, call_body=body, separator="", most=1, gap=""))
