"""GLM calls: `<tool_call>name`, then `<arg_key>`/`<arg_value>` pairs (GLM-4.5 to 4.7).

Format: the chat templates published with GLM-4.5 and GLM-4.6; mlx-lm's glm47 parser reads the same tags without newlines.
"""

from __future__ import annotations

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.arguments import ArgumentsWriter
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.parameters import ParameterRules
from pooled_mlx.chat_formats.raw_values import without
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Step, TaggedParser
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"

INNER_TAGS = (KEY, END_KEY, VALUE, END_VALUE)

_LONGEST_NAME = 256
_NEVER_FIRST = ("{", "[", "`")


class GlmReader:
    """Reads one call. Its tags count as tokens where the model has them, else by their spelling; a value then ends at the
    first closing tag, whatever follows.
    """

    def __init__(self, setup: ParserSetup, calls: Calls) -> None:
        self._writer = setup.writer
        self._constrained = setup.constrained
        self._calls = calls
        self._spelled = tuple(tag for tag in INNER_TAGS if tag not in setup.token_tags)
        self._raw: list[str] = []
        self._held = ""
        self._name = ""
        self._mode = "name"
        self._arguments: ArgumentsWriter | None = None

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._arguments is not None

    @property
    def in_value(self) -> bool:
        """True inside a value."""
        return self._mode == "value"

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """A closing tag inside a value is content if the value goes on."""
        if self._mode != "value" or (token and self._constrained):
            return "yes"
        return "maybe" if token else "no"

    def refutes(self, text: str) -> bool:
        """The end of the value after the tag shows that the tag was content."""
        return END_VALUE in text

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if self._arguments is None:
            self._raw.append(text)
        text, self._held = self._held + text, ""
        while text and self._mode != "rejected":
            at, tag = self._spelled_tag(text)
            self._text(text[:at])
            if self._mode != "rejected" and tag:
                self._tag(tag)
            elif not tag:
                self._held = text[at:]
                break
            text = text[at + len(tag) :]
        return self._step()

    def tag(self, name: str) -> Step:
        """A tag as a token of its own."""
        if self._arguments is None:
            self._raw.append(name)
        held, self._held = self._held, ""
        self._text(held)
        if self._mode != "rejected":
            self._tag(name)
        return self._step()

    def close(self) -> Step:
        """Complete the call with what there is."""
        held, self._held = self._held, ""
        self._text(held)
        if self._mode == "name":
            self._commit()
        if self._arguments is None:
            return "rejected", "".join(self._raw)
        if self._mode == "value":
            self._arguments.end()
        self._arguments.finish()
        self._writer.call_end()
        return "done", ""

    def _step(self) -> Step:
        return ("rejected", "".join(self._raw)) if self._mode == "rejected" else ("open", "")

    def _spelled_tag(self, text: str) -> tuple[int, str]:
        """Where the first tag stands in `text` and which; "" where one may only begin."""
        at = text.find("<")
        while at >= 0:
            for tag in self._spelled:
                if (self._mode != "value" or tag == END_VALUE) and tag.startswith(text[at : at + len(tag)]):
                    return at, tag if len(text) - at >= len(tag) else ""
            at = text.find("<", at + 1)
        return len(text), ""

    def _text(self, text: str) -> None:
        """Text between two tags."""
        if self._mode == "value":
            assert self._arguments is not None
            self._arguments.add(text)
        elif self._mode in ("name", "key"):
            self._name += text
            name = self._name.lstrip(SPACE)
            if self._mode == "name" and "\n" in name:
                self._commit()
            elif self._mode == "name" and (len(name) > _LONGEST_NAME or name[:1] in _NEVER_FIRST):
                self._mode = "rejected"

    def _tag(self, tag: str) -> None:
        if self._mode == "name":
            self._commit()
        if self._arguments is None:
            return
        if self._mode == "value" and tag != END_VALUE:
            self._arguments.add(tag)
        elif self._mode == "value":
            self._arguments.end()
            self._mode = "between"
        elif tag == KEY:
            self._name, self._mode = "", "key"
        elif tag == VALUE and self._mode in ("key", "after key"):
            self._arguments.begin(self._name.strip(SPACE))
            self._mode = "value"
        else:
            self._mode = "after key" if tag == END_KEY else "between"

    def _commit(self) -> None:
        name = self._name.lstrip(SPACE).partition("\n")[0].strip(SPACE)
        tool = self._calls.find(name) if name else None
        if tool is None:
            self._mode = "rejected"
            return
        self._writer.call_start(tool)
        self._arguments = ArgumentsWriter(self._writer, tool, self._constrained)
        self._raw.clear()
        self._mode = "between"


class _Parameters(ParameterRules):
    """Pairs of key and value, with or without newlines between the tags."""

    def __init__(self, spec: AnswerSpec, lark: GrammarBuilder) -> None:
        self._by_token = END_VALUE in spec.markers
        super().__init__(
            spec,
            lark,
            end=rules.tag(spec, lark, END_CALL),
            close=f'{rules.tag(spec, lark, END_VALUE)} "\\n"?',
            tag="" if self._by_token else END_VALUE,
        )

    def _opened(self, name: str) -> str:
        key, end_key, value, _ = (rules.tag(self.spec, self.lark, tag) for tag in INNER_TAGS)
        return f'{key} {name} {end_key} "\\n"? {value}'

    def head(self, name: str) -> str:
        """The key, and what opens its value."""
        return self._opened(self.lark.text(name))

    def any_head(self) -> str:
        """Any key, and what opens its value."""
        return self._opened("/[^<\\n]{1,128}/")

    def bounded(self, expressions: list[str]) -> str:
        """A text under rules."""
        held = expressions if self._by_token else [*expressions, without(END_VALUE)]
        text = self.lark.terminal("TEXT", " & ".join([*held, rules.ANY_TEXT]))
        if self._by_token:
            return f"{text} {self.close}"
        return f'{rules.until(self.lark, self.lark.text(END_VALUE), text)} "\\n"?'

    def raw(self, but: str) -> str:
        """Any text."""
        text = self.lark.terminal("RAW", rules.text_but(but)) if but else rules.ANY_TEXT
        return f"{text} {self.close}" if self._by_token else f'{rules.until(self.lark, self.lark.text(END_VALUE), text)} "\\n"?'


class Glm:
    """Calls as key and value tags between `<tool_call>` tags, thinking between `<think>` tags."""

    tags = frozenset({THINK, END_THINK, CALL, END_CALL, *INNER_TAGS})
    end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write `<arg_key>`."""
        return 3 if KEY in template_text and VALUE in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return GlmReader(setup, calls)

        return TaggedParser(setup, call_tags=(CALL, END_CALL), calls=calls, reader=reader, inner_tags=frozenset(INNER_TAGS))

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Arguments in any order, each once, the required ones always."""
        body = ""
        if spec.tools and spec.request.call_limit:
            parameters = _Parameters(spec, lark)
            calls = [f'{lark.text(tool.name)} "\\n"? {parameters.of(tool)}' for tool in spec.tools]
            body = lark.rule("body", "\n    | ".join(calls))
        return lark.build(rules.answer(spec, lark, open_tag=CALL, call_body=body, gap="\n"))


FORMAT = Glm()
