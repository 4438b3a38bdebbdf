"""Gemma 4 calls: `<|tool_call>call:name{key:value,…}<tool_call|>`, strings between `<|"|>` tokens.

Format: the chat template published with Gemma 4; mlx-lm's gemma4 parser reads the same. Thoughts stand in
`<|channel>thought … <channel|>`.
"""

from __future__ import annotations

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.gemma_values import ValueRules
from pooled_mlx.chat_formats.hermes import HermesReader
from pooled_mlx.chat_formats.tagged import CallReader, Calls, Closing, Step, TaggedParser
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE
from pooled_mlx.text.json_stream import quote_inner

CALL, END_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THINK, END_THINK, THOUGHT = "<|channel>", "<channel|>", "thought\n"

_HEAD = "call:"
_LONGEST_NAME = 256


class GemmaReader:
    """Reads one call and hands it on as JSON: keys are bare words, strings stand between quote tokens.

    A quote ends a string only before `,`, `}`, `]` or the end of the call; before anything else it is content.
    """

    def __init__(self, setup: ParserSetup, calls: Calls) -> None:
        self._json = HermesReader(setup, calls, frozenset({"name"}), frozenset({"arguments"}))
        self._constrained = setup.constrained
        self._spelled = QUOTE not in setup.token_tags
        self._raw: list[str] = []
        self._head = ""
        self._held = ""
        self._reading = False
        self._quoted = False
        self._ending = False
        """A quote came inside a string: it ended the string, if what follows says so."""

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._json.committed

    @property
    def in_value(self) -> bool:
        """True inside a string."""
        return self._quoted and not self._ending

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """A closing tag inside a string is content if the string goes on."""
        if not self._quoted or self._ending or (token and self._constrained):
            return "yes"
        return "maybe" if token else "no"

    def refutes(self, text: str) -> bool:
        """The end of the string after the tag shows that the tag was content."""
        return QUOTE in text

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if not self.committed:
            self._raw.append(text)
        if not self._reading:
            self._head += text
            name, found, text = self._head.lstrip(SPACE).partition("{")
            if not found:
                possible = name.startswith(_HEAD) or _HEAD.startswith(name)
                return ("open", "") if possible and len(name) <= _LONGEST_NAME else self._rejected()
            self._reading = True
            if not name.startswith(_HEAD) or not self._json.begin(name.removeprefix(_HEAD).strip(SPACE)):
                return self._rejected()
            text = "{" + text
        text, self._held = self._held + text, ""
        step: Step = ("open", "")
        while text and step[0] == "open" and self._spelled:
            at = _place(text)
            step = self._pass(text[:at])
            if step[0] != "open":
                return step[0], step[1] + text[at:]
            if not text.startswith(QUOTE, at):
                self._held = text[at:]
                return step
            step, text = self._quote(), text[at + len(QUOTE) :]
        return self._pass(text) if text else step

    def tag(self, name: str) -> Step:
        """The quote as a token of its own."""
        if not self._reading:
            self._raw.append(name)
            return self._rejected()
        return self._quote()

    def close(self) -> Step:
        """Complete the call with what there is."""
        if not self.committed:
            return self._rejected()
        if self._held:
            self._pass(self._held)
        if self._ending:
            self._quoted = self._ending = False
            self._json.feed('"')
        return self._json.close()

    def _pass(self, text: str) -> Step:
        if self._ending and text:
            self._ending = False
            if text[0] in ",}]":
                self._quoted = False
                text = '"' + text
            else:
                text = QUOTE + text
        return self._json.feed(quote_inner(text) if self._quoted else text)

    def _quote(self) -> Step:
        if not self._quoted:
            self._quoted = True
            return self._json.feed('"')
        before, self._ending = self._ending, True
        return self._json.feed(quote_inner(QUOTE)) if before else ("open", "")

    def _rejected(self) -> Step:
        return "rejected", "".join(self._raw)


def _place(text: str) -> int:
    """Where a quote stands in `text`, or may begin at its end; its length if nowhere."""
    at = text.find("<")
    while at >= 0:
        if QUOTE.startswith(text[at : at + len(QUOTE)]):
            return at
        at = text.find("<", at + 1)
    return len(text)


class Gemma:
    """Calls in Gemma's own notation, thinking on a channel."""

    tags = frozenset({THINK, END_THINK, CALL, END_CALL, QUOTE})
    end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write `<|tool_call>call:`."""
        return 3 if CALL + _HEAD in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return GemmaReader(setup, calls)

        return TaggedParser(
            setup,
            call_tags=(CALL, END_CALL),
            calls=calls,
            reader=reader,
            inner_tags=frozenset({QUOTE}),
            think_tags=(THINK, END_THINK),
            think_header=THOUGHT,
        )

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Arguments in any order, each once, the required ones always, at any depth."""
        body = ""
        if spec.tools and spec.request.call_limit:
            values = ValueRules(spec, lark, rules.tag(spec, lark, QUOTE), spelled=QUOTE not in spec.markers)
            calls = [f"{lark.text(_HEAD + tool.name)} {values.of(tool)}" for tool in spec.tools]
            one = lark.rule("tools", "\n    | ".join(calls))
            body = lark.rule("body", f"{one} {rules.tag(spec, lark, END_CALL)}")
        tags = (THINK, END_THINK)
        return lark.build(rules.answer(spec, lark, open_tag=CALL, call_body=body, separator="", gap="", think_tags=tags))


FORMAT = Gemma()
