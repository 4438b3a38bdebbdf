"""GLM calls: `<tool_call>name`, then `<arg_key>`/`<arg_value>` pairs (GLM-4.5 to 4.7).

Format: the chat templates published with GLM-4.5 and GLM-4.6; mlx-lm's glm47 parser reads the same tags without newlines.
"""

from __future__ import annotations

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.arguments import ArgumentsWriter
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.parameters import ParameterRules
from pooled_mlx.chat_formats.raw_values import without
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Examples, Step, TaggedParser, first_tag
from pooled_mlx.grammar.lark import SELF
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"

INNER_TAGS = (KEY, END_KEY, VALUE, END_VALUE)

_LONGEST_NAME = 256
_NEVER_FIRST = ("{", "[", "`")


class GlmReader:
    """Reads one call. Its tags count as tokens where the model has them, else by their spelling.

    A closing tag ends a value only before the next key or the end of the call; before anything else it is content.
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
        self._end: str | None = None
        """The closing tag of a value and the whitespace behind it, until what follows shows whether it was one."""
        self._arguments: ArgumentsWriter | None = None
        self._examples = Examples(CALL, END_CALL)

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._arguments is not None

    @property
    def in_value(self) -> bool:
        """True inside a value."""
        return self._mode == "value" and self._end is None

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """A closing tag inside a value is content if the value goes on."""
        if self._mode != "value":
            return "yes"
        if self._end is not None:  # the value may be over, unless the call that ends here is an example in it
            return "maybe" if token and self._examples.open else "yes"
        if token and self._constrained:
            return "no" if self._examples.open else "yes"
        return "maybe" if token else "no"

    def refutes(self, text: str) -> bool:
        """The end of the value after the tag shows that the tag was content; under a grammar any word does."""
        return bool(text.strip(SPACE)) if self._constrained else END_VALUE in text

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if self._arguments is None:
            self._raw.append(text)
        text, self._held = self._held + text, ""
        while text and self._mode != "rejected":
            at, tag = first_tag(text, (tag for tag in self._spelled if self._mode != "value" or tag in self._possible))
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
            self._end = None
            self._arguments.end()
        self._arguments.finish()
        self._writer.call_end()
        return "done", ""

    def _step(self) -> Step:
        return ("rejected", "".join(self._raw)) if self._mode == "rejected" else ("open", "")

    @property
    def _possible(self) -> tuple[str, ...]:
        """The tags that count inside a value."""
        return (END_VALUE,) if self._end is None else (END_VALUE, KEY)

    def _text(self, text: str) -> None:
        """Text between two tags."""
        if self._mode == "value" and self._end is not None:
            self._end += text
            if text.strip(SPACE):
                self._continue()
        elif self._mode == "value":
            self._content(text)
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
        if self._mode == "value" and self._end is not None and tag == KEY:
            self._end, self._mode = None, "between"
            self._arguments.end()
        elif self._mode == "value":
            self._continue()
            if tag == END_VALUE and not self._arguments.in_json_string:
                self._end = tag
            else:
                self._content(tag)
        if self._mode == "value":
            return
        if tag == KEY:
            self._name, self._mode = "", "key"
        elif tag == VALUE and self._mode in ("key", "after key"):
            self._arguments.begin(self._name.strip(SPACE))
            self._mode, self._end, self._examples = "value", None, Examples(CALL, END_CALL)
        else:
            self._mode = "after key" if tag == END_KEY else "between"

    def _continue(self) -> None:
        """The closing tag before was content."""
        text, self._end = self._end, None
        self._content(text or "")

    def _content(self, text: str) -> None:
        assert self._arguments is not None
        self._examples.add(text)
        self._arguments.add(text)

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
        end, close = rules.tag(spec, lark, END_CALL), rules.tag(spec, lark, END_VALUE)
        if self._by_token:
            close = f'{close} "\\n"?'
        else:  # the lexer does not go back: a newline that may be content belongs to the tag behind it
            end = f'"\\n"? {end}' if END_CALL in spec.markers else r"/\n?<\/tool_call>/"
        super().__init__(spec, lark, end=end, close=close, tag="" if self._by_token else END_VALUE)

    def _opened(self, name: str) -> str:
        key, end_key, value, _ = (rules.tag(self.spec, self.lark, tag) for tag in INNER_TAGS)
        if not self._by_token:
            key = r"/\n?<arg_key>/"
        return f'{key} {name} {end_key} "\\n"? {value}'

    def head(self, name: str, *, text: bool) -> str:
        """The key, and what opens its value."""
        return self._opened(self.lark.text(name))

    def any_head(self, *, text: bool) -> str:
        """Any key, and what opens its value."""
        return self._opened("/[^<\\n]{1,128}/")

    def bounded(self, expressions: list[str]) -> str:
        """A text under rules."""
        held = expressions if self._by_token else [*expressions, without(END_VALUE)]
        text = self.lark.terminal("TEXT", " & ".join([*held, rules.ANY_TEXT]))
        if self._by_token:
            return f"{text} {self.close}"
        return f'{rules.until(self.lark, self.lark.text(END_VALUE), text)} "\\n"?'

    def write_raw(self, but: str) -> str:
        """Any text. A closing tag that neither the next key nor the end of the call follows is content."""
        lark, pair = self.lark, (CALL, END_CALL)
        text = lark.terminal("RAW", rules.text_but(but)) if but else rules.ANY_TEXT
        again = self.raw("") if but else SELF
        if self._by_token:
            close = lark.special(END_VALUE)
            other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/[ \t\r\n]*/")
            plain = f"{text} {close} " + lark.rule("more", f'"" | {SELF} ({other})? {close}')
            return f'{rules.with_examples(self.spec, lark, plain, text, pair, again, close)} "\\n"?'
        close = lark.text(END_VALUE)
        tags = "<arg_key>" if END_CALL in self.spec.markers else r"<(arg_key>|\/tool_call>)"
        other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/[ \t\r\n]{{0,64}}{tags}(?s:.*)/")
        more = f'"" | {SELF} {rules.until(lark, close, other)}'
        plain = f"{rules.until(lark, close, text)} {lark.rule('more', more)}"
        example = rules.example_text(self.spec, lark, text, pair)
        if not example:
            return plain
        end = f"{lark.special(END_CALL)} {again}"
        more = lark.rule("more", f'{more} | {SELF} "\\n"? {lark.special(END_CALL)} {rules.until(lark, close)}')
        return lark.rule("raw", f"{plain}\n    | {example} {end}\n    | {rules.until(lark, close, example)} {more}")


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
            newline = '"\\n"? ' if END_VALUE in spec.markers else ""
            calls = [f"{lark.text(tool.name)} {newline}{parameters.of(tool)}" for tool in spec.tools]
            body = lark.rule("body", "\n    | ".join(calls))
        return lark.build(rules.answer(spec, lark, open_tag=CALL, call_body=body, gap="\n"))


FORMAT = Glm()
