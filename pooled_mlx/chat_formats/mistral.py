"""Mistral calls behind `[TOOL_CALLS]`: `name[ARGS]{…}` (Devstral, Small 3.2 and later), or a JSON list (up to Small 3.1).

Format: the chat templates published with Mistral-Small-3.1 and Mistral-Small-3.2; mlx-lm's mistral parser reads both.
"""

from __future__ import annotations

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.hermes import HermesReader
from pooled_mlx.chat_formats.tagged import CallReader, Calls, Closing, Step, TaggedParser
from pooled_mlx.core.request import MAX_CALLS
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE
from pooled_mlx.text.json_stream import quote

CALL, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THINK, END_THINK = "[THINK]", "[/THINK]"

INNER_TAGS = (ARGUMENTS, CALL_ID)
_LONGEST_NAME = 256
_ID = "/[0-9a-zA-Z]{9}/"


class MistralReader:
    """Reads one call: a JSON object (several in a list are several calls), or a name and its arguments."""

    def __init__(self, setup: ParserSetup, calls: Calls) -> None:
        self._json = HermesReader(setup, calls, frozenset({"name"}), frozenset({"arguments"}))
        self._spelled = tuple(tag for tag in INNER_TAGS if tag not in setup.token_tags)
        self._raw: list[str] = []
        self._name = ""
        self._called = ""
        self._mode = "start"

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._json.committed

    @property
    def in_value(self) -> bool:
        """True inside a JSON string."""
        return self._mode == "json" and self._json.in_value

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """The format has no closing tag."""
        return "no"

    def refutes(self, text: str) -> bool:
        """The format has no closing tag."""
        return False

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if not self.committed:
            self._raw.append(text)
        if self._mode == "start":
            text = text.lstrip(SPACE)
            if not text:
                return "open", ""
            self._mode = "json" if text[0] in "[{" else "name"
        if self._mode == "json":
            return self._checked(self._json.feed(text))
        self._name += text
        tag = next((tag for tag in self._spelled if tag in self._name), "")
        text = ""
        if tag:
            self._name, _, text = self._name.partition(tag)
        name = self._name.rstrip(SPACE)
        if self._mode == "name" and (len(name) > _LONGEST_NAME or any(space in name for space in SPACE)):
            return self._rejected()
        return self._on_tag(tag, text) if tag else ("open", "")

    def tag(self, name: str) -> Step:
        """A tag as a token of its own."""
        if not self.committed:
            self._raw.append(name)
        if self._mode == "json":
            return self._checked(self._json.feed(name))
        return self._rejected() if self._mode == "start" else self._on_tag(name, "")

    def close(self) -> Step:
        """Complete the call with what there is."""
        return self._checked(self._json.close())

    def _on_tag(self, tag: str, text: str) -> Step:
        """`tag` ended the name, or the id that may stand behind it; `text` follows."""
        if self._mode == "name":
            self._called = self._name.strip(SPACE)
        if tag == CALL_ID:
            self._mode, self._name = "id", ""
            return self._unread(text)
        self._mode = "json"
        if not self._json.begin(self._called):
            return self._rejected()
        return self._checked(self._json.feed(text)) if text else ("open", "")

    def _unread(self, text: str) -> Step:
        """Go on with text that stands in `_raw` already."""
        if not text:
            return "open", ""
        noted = self._raw.pop()
        step = self.feed(text)
        if not self.committed:
            self._raw[-1] = noted
        return step

    def _checked(self, step: Step) -> Step:
        return self._rejected() if step[0] == "rejected" else step

    def _rejected(self) -> Step:
        return "rejected", "".join(self._raw)


class Mistral:
    """Calls behind `[TOOL_CALLS]`, thinking between `[THINK]` tags."""

    tags = frozenset({THINK, END_THINK, CALL, *INNER_TAGS})
    end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write `[TOOL_CALLS]`."""
        return 3 if CALL in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return MistralReader(setup, calls)

        return TaggedParser(
            setup,
            call_tags=(CALL, ""),
            calls=calls,
            reader=reader,
            again=("{",),
            inner_tags=frozenset(INNER_TAGS),
            think_tags=(THINK, END_THINK),
        )

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Name and arguments where the model has a token for `[ARGS]`, else one JSON list of calls."""
        body, most = "", 1
        if spec.tools and spec.request.call_limit:
            if ARGUMENTS in spec.markers:
                between = lark.special(ARGUMENTS)
                if CALL_ID in spec.markers:
                    between = f"({lark.special(CALL_ID)} {_ID})? {between}"
                calls = [f"{lark.text(tool.name)} {between} {rules.json_arguments(spec, lark, tool)}" for tool in spec.tools]
                body, most = lark.rule("body", "\n    | ".join(calls)), MAX_CALLS
            else:
                body = self._list(spec, lark)
        return lark.build(
            rules.answer(
                spec, lark, open_tag=CALL, call_body=body, separator="", most=most, gap="", think_tags=(THINK, END_THINK)
            )
        )

    @staticmethod
    def _list(spec: AnswerSpec, lark: GrammarBuilder) -> str:
        calls: list[str] = []
        for tool in spec.tools:
            head = lark.text(f'{{"name": {quote(tool.name)}, "arguments": ')
            calls.append(f"{head} {rules.json_arguments(spec, lark, tool)}")
        one = lark.rule("tools", "\n    | ".join(calls))
        call_id = lark.text(', "id": "')
        one = lark.rule("item", f'{one} ({call_id} {_ID} "\\"")? "}}"')
        return lark.rule("list", f'/ ?/ "[" {rules.several(one, lark.text(", "), spec.request.call_limit)} "]"')


FORMAT = Mistral()
