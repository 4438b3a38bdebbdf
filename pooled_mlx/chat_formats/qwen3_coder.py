"""Qwen XML calls: `<function=name>` with one `<parameter=name>` block for each argument (Qwen3-Coder, Qwen3.5 to 3.8)."""

from __future__ import annotations

import re

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.arguments import ArgumentsWriter
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.parameters import BIT, ParameterRules
from pooled_mlx.chat_formats.raw_values import regex, without
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Examples, Step, TaggedParser
from pooled_mlx.chat_formats.xml_values import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    LONGEST_SPACE,
    PARAMETER,
    Match,
    ValueEnd,
)
from pooled_mlx.core.request import Tool
from pooled_mlx.grammar.lark import SELF
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

CALL, END_CALL = "<tool_call>", "</tool_call>"

_NO_MATCH: Match = ("no", 0)
_LARGE_SET = 64
_CANDIDATE = re.compile(r"\n|<")
_REMAINS = re.compile(r"(?:</para[^<>\n]{0,32}>?\s*)?(?:</func[^<>\n]{0,32}>?\s*)?$")
_STILL_OPEN = re.compile(r"</parameter>\s*<(?:parameter=|/function>)")


class QwenXmlReader:
    """Reads one call.

    Where a value ends: at `</parameter>`, when what follows is a parameter that is declared and not yet given, or the end of
    the function with the real closing tag of the call. Anything else that looks like a tag is content. One newline after the
    opening and one before the closing tag belong to the frame. Without a grammar, a missing or misspelt closing tag counts
    too, under the same condition.
    """

    def __init__(self, setup: ParserSetup, calls: Calls, bare: bool) -> None:
        self._writer = setup.writer
        self._constrained = setup.constrained
        self._calls = calls
        self._bare = bare
        self._mode = "name" if bare else "start"
        self._raw: list[str] = []
        self._buffer = ""
        self._tool: Tool | None = None
        self._arguments: ArgumentsWriter | None = None
        self._at_line_start = True
        self._ends = ValueEnd(setup.constrained, bare)
        self._match = _NO_MATCH
        self._examples = Examples(CALL, END_CALL)

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._arguments is not None

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if self._arguments is None:
            self._raw.append(text)
        self._buffer += text
        while self._advance():
            if self._mode == "rejected":
                return "rejected", "".join(self._raw)
            if self._mode == "done":
                return "done", self._buffer
        return "open", ""

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """Inside a value a closing tag counts at once only behind the end of the function, if it is not an example's."""
        if self._mode != "value":
            return "yes"
        if token and self._constrained:
            return "yes" if not self._examples.open else "maybe" if self._match[0] == "end" else "no"
        if token:
            return "maybe"
        return "yes" if self._match[0] == "end" else "no"

    @property
    def in_value(self) -> bool:
        """True inside a parameter's value, before anything that may end it."""
        return self._mode == "value" and self._match[0] != "end"

    def tag(self, name: str) -> Step:
        """No tag stands inside a call but as content."""
        return self.feed(name)

    def refutes(self, text: str) -> bool:
        """A proper end of a parameter after the tag shows that the tag was content; under a grammar any word does."""
        if self._constrained:
            return bool(text.strip(SPACE))
        return _STILL_OPEN.search(text) is not None

    def close(self) -> Step:
        """Complete the call with what there is."""
        if self._arguments is None:
            return "rejected", "".join(self._raw)
        if self._mode == "value":
            text = self._buffer
            remains = _REMAINS.search(text)
            if remains is not None:
                text = text[: remains.start()]
            self._content(text.removesuffix("\n"))
        if self._mode in ("value", "frame"):
            self._arguments.end()
        self._end()
        return "done", ""

    def _advance(self) -> bool:
        """One step over the buffer; False when it needs more text."""
        if self._mode == "value":
            return self._value()
        if self._mode == "frame":
            return self._frame()
        if self._mode == "name":
            return self._name()
        self._buffer = self._buffer.lstrip(SPACE)
        text = self._buffer
        if not text:
            return False
        if self._mode == "start":
            return self._opening(FUNCTION, "name") or self._reject_unless(FUNCTION.startswith(text))
        if self._mode == "confirm":
            if text.startswith((PARAMETER, END_FUNCTION)):
                return self._commit()
            return self._reject_unless(PARAMETER.startswith(text) or END_FUNCTION.startswith(text))
        return self._between(text)

    def _opening(self, tag: str, mode: str) -> bool:
        if not self._buffer.startswith(tag):
            return False
        self._buffer = self._buffer[len(tag) :]
        self._mode = mode
        return True

    def _reject_unless(self, possible: bool) -> bool:
        if not possible:
            self._mode = "rejected"
        return not possible

    def _name(self) -> bool:
        name, found, rest = self._buffer.partition(">")
        if not found or "\n" in name:
            return self._reject_unless("\n" not in name and len(name) < 256)
        self._tool = self._calls.find(name.strip(SPACE))
        if self._tool is None:
            return self._reject_unless(False)
        self._buffer = rest
        self._mode = "confirm"
        return True if self._bare else self._commit()

    def _commit(self) -> bool:
        assert self._tool is not None
        self._writer.call_start(self._tool)
        self._arguments = ArgumentsWriter(self._writer, self._tool, self._constrained)
        self._raw.clear()
        self._mode = "between"
        return True

    def _between(self, text: str) -> bool:
        """Between two parameters: the next one, the end of the function, or remains of a mistake, which are dropped."""
        assert self._arguments is not None
        if text.startswith(PARAMETER):
            name, found, rest = text[len(PARAMETER) :].partition(">")
            if not found and "\n" not in name and len(name) < 256:
                return False
            if found and "\n" not in name:
                self._arguments.begin(name.strip(SPACE))
                self._buffer, self._mode = rest, "frame"
                return True
        elif text.startswith(END_FUNCTION):
            self._buffer = text[len(END_FUNCTION) :]
            self._end()
            self._mode = "done"
            return True
        elif any(tag.startswith(text) for tag in (PARAMETER, END_FUNCTION, END_PARAMETER)):
            return False
        following = text.find("<", 1)
        if not text.startswith(END_PARAMETER):
            self._writer.note("text between parameters was dropped")
        elif following < 0 or following > len(END_PARAMETER):
            following = len(END_PARAMETER)
        self._buffer = text[following:] if following >= 0 else ""
        return True

    def _frame(self) -> bool:
        """The newline after a parameter's opening tag."""
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._mode = "value"
        self._examples = Examples(CALL, END_CALL)
        self._at_line_start = True
        self._match = _NO_MATCH
        return True

    def _value(self) -> bool:
        assert self._arguments is not None
        if self._arguments.streaming_json:
            used = self._arguments.take_json(self._buffer)
            if used is None:
                self._buffer = ""
                return False
            self._arguments.end()
            self._buffer, self._mode = self._buffer[used:], "between"
            return True
        text, at = self._buffer, 0
        while True:
            found = _CANDIDATE.search(text, at)
            if found is None:
                self._content(text)
                self._buffer, self._match = "", _NO_MATCH
                return False
            at = found.start()
            self._match = self._ends.match(text, at, self._at_line_start, self._arguments.followers)
            if self._match[0] == "no":
                at += 1
                continue
            self._content(text[:at])
            if self._match[0] == "close":
                self._arguments.end()
                self._buffer, self._mode = text[self._match[1] :], "between"
                return True
            self._buffer = text[at:]
            return False

    def _content(self, text: str) -> None:
        assert self._arguments is not None
        if text:
            self._at_line_start = text[-1] == "\n"
            self._examples.add(text)
            self._arguments.add(text)

    def _end(self) -> None:
        assert self._arguments is not None
        self._arguments.finish()
        self._writer.call_end()


class _Parameters(ParameterRules):
    """Parameters in any order, raw values ended by the rule of `xml_values`."""

    def __init__(self, spec: AnswerSpec, lark: GrammarBuilder) -> None:
        tag = "\n" + END_PARAMETER
        super().__init__(spec, lark, end=lark.text("\n" + END_FUNCTION) + ' "\\n"', close=lark.text(tag), tag=tag)

    def head(self, name: str) -> str:
        """The opening tag of a parameter."""
        return self.lark.text(f"\n{PARAMETER}{name}>\n")

    def any_head(self) -> str:
        """The opening tag of a parameter that no schema names."""
        return self.lark.text("\n" + PARAMETER) + ' /[^>\\n]{1,128}/ ">\\n"'

    def bounded(self, expressions: list[str]) -> str:
        """A text under rules; it cannot contain the closing tag."""
        body = self.lark.terminal("TEXT", " & ".join([*expressions, without(END_PARAMETER)]))
        return self.lark.rule("value", body, attributes=f"[suffix={self.close}]")

    def write_raw(self, but: str) -> str:
        """A text up to the first closing tag, which may be content: see `more`."""
        text = self.lark.terminal("RAW", rules.text_but(but)) if but else rules.ANY_TEXT
        end = self.lark.text(END_PARAMETER)
        plain, again = rules.until(self.lark, end, text), self.raw("") if but else SELF
        return rules.with_examples(self.spec, self.lark, plain, text, (CALL, END_CALL), again, end)

    def more(self, names: list[str], complete: str) -> str:
        """What may follow a closing tag inside a raw value that goes on: whatever does not make that tag count.

        Where the closing tag of the call is no token, nothing tells content from the end: the first closing tag ends the
        value. In large tool sets no other tag of a parameter or function may follow: rules for each name would take too
        long to compile. Recursive to the left: to the right each tag in the value would cost the parser items, and these
        are limited.
        """
        lark = self.lark
        if END_CALL not in self.spec.markers:
            return ""
        raw, space = self.raw(""), rf"[ \t\r\n]{{0,{LONGEST_SPACE}}}"
        if len(self.spec.tools) > _LARGE_SET:
            other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/{space}<(parameter=|\/function>)(?s:.*)/")
            return lark.rule("more", f'"" | {SELF} {rules.until(lark, lark.text(END_PARAMETER), other)}')
        any_name = "|".join(regex(name) for name in names)
        other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/{space}<(parameter=({any_name})>|\/function>)(?s:.*)/")
        odd_end = lark.terminal("ODD", rf"/(|[ \t\r]{space}|\n[ \t\r\n]{{1,{LONGEST_SPACE}}})<\/function>/")
        alternatives = ['""', f"{SELF}::_ {rules.until(lark, lark.text(END_PARAMETER), other)}"]
        for bit, name in enumerate(names):
            given = lark.terminal("GIVEN", f"/{space}<parameter={regex(name)}>/")
            alternatives.append(f"{SELF}::_ {given} {raw} %if bit_set({bit})")
        for end in (lark.text("\n" + END_FUNCTION), odd_end):
            alternatives.append(f"{SELF}::_ {end} {raw}{complete}")
        return lark.rule("more", "\n    | ".join(alternatives), attributes="::_") + f"::set_bit({BIT})"


class Qwen3Coder:
    """Calls in Qwen's XML between `<tool_call>` tags, thinking between `<think>` tags."""

    tags = frozenset({THINK, END_THINK, CALL, END_CALL})
    end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write `<function=` and `<parameter=`."""
        return 3 if FUNCTION in template_text and PARAMETER in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return QwenXmlReader(setup, calls, bare)

        return TaggedParser(setup, call_tags=(CALL, END_CALL), calls=calls, reader=reader, bare=FUNCTION)

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Parameters in any order, each once, the required ones always."""
        body = ""
        if spec.tools and spec.request.call_limit:
            parameters = _Parameters(spec, lark)
            functions = [f"{lark.text(FUNCTION + tool.name + '>')} {parameters.of(tool)}" for tool in spec.tools]
            one = lark.rule("functions", "\n    | ".join(functions))
            body = lark.rule("body", f'"\\n" {one} {rules.tag(spec, lark, END_CALL)}')
        return lark.build(rules.answer(spec, lark, open_tag=CALL, call_body=body))


FORMAT = Qwen3Coder()
