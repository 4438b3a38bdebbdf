"""Calls of XML tags: a function with a tag for each parameter, its value bare text between the tags.

One reader and one grammar for all families that write calls so; `xml_values.Notation` says how their tags look.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.arguments import ArgumentsWriter
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.marked import STAND_IN, MarkedParser
from pooled_mlx.chat_formats.parameters import BIT, ParameterRules
from pooled_mlx.chat_formats.raw_values import regex, without
from pooled_mlx.chat_formats.tagged import CallReader, Calls, Closing, Examples, Step, TaggedParser, first_tag
from pooled_mlx.chat_formats.xml_values import LONGEST_SPACE, Match, Notation, ValueEnd
from pooled_mlx.core.request import MAX_CALLS, Tool
from pooled_mlx.grammar.lark import SELF
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE

_NO_MATCH: Match = ("no", 0)
_LARGE_SET = 64
_CANDIDATE, _BARE_CANDIDATE = re.compile(r"\n|<"), re.compile("<")


@cache
def _patterns(notation: Notation) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The closing tags, whole or not, at the end of a call; a proper end of a parameter in the middle of a text."""
    parameter, function = (re.escape(tag[: max(6, len(tag) - 6)]) for tag in (notation.end_parameter, notation.end_function))
    remains = rf"(?:{parameter}[^<>\n]{{0,32}}>?\s*)?(?:{function}[^<>\n]{{0,32}}>?\s*)?$"
    following = f"(?:{re.escape(notation.parameter)}|{re.escape(notation.end_function)})"
    return re.compile(remains), re.compile(rf"{re.escape(notation.end_parameter)}\s*{following}")


class XmlReader:
    """Reads one call.

    Where a value ends: at `</parameter>`, when what follows is a parameter that is declared and not yet given, or the end of
    the function with the real closing tag of the call. Anything else that looks like a tag is content. One newline after the
    opening and one before the closing tag belong to the frame. Without a grammar, a missing or misspelt closing tag counts
    too, under the same condition.
    """

    def __init__(self, setup: ParserSetup, calls: Calls, notation: Notation, bare: bool) -> None:
        self._notation = notation
        self._remains, self._still_open = _patterns(notation)
        self._candidate = _CANDIDATE if notation.frame or not setup.constrained else _BARE_CANDIDATE
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
        self._ends = ValueEnd(notation, setup.constrained, bare)
        self._match = _NO_MATCH
        self._examples = Examples(self._notation.call, self._notation.end_call)

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
        if self._mode not in ("frame", "value"):
            return "yes"
        if token and self._constrained:
            return "yes" if not self._examples.open else "maybe" if self._match[0] == "end" else "no"
        if token:
            return "maybe"
        return "yes" if self._match[0] == "end" else "no"

    @property
    def in_value(self) -> bool:
        """True inside a parameter's value, before anything that may end it."""
        return self._mode in ("frame", "value") and self._match[0] != "end"

    def tag(self, name: str) -> Step:
        """No tag stands inside a call but as content."""
        return self.feed(name)

    def refutes(self, text: str) -> bool:
        """A proper end of a parameter after the tag shows that the tag was content; under a grammar any word does."""
        if self._constrained:
            return bool(text.strip(SPACE))
        return self._still_open.search(text) is not None

    def close(self) -> Step:
        """Complete the call with what there is."""
        if self._arguments is None:
            return "rejected", "".join(self._raw)
        if self._mode == "value":
            text = self._buffer
            remains = self._remains.search(text)
            if remains is not None:
                text = text[: remains.start()]
            self._content(text.removesuffix(self._notation.frame))
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
        notation = self._notation
        self._buffer = self._buffer.lstrip(SPACE)
        text = self._buffer
        if not text:
            return False
        if self._mode == "start":
            return self._opening(notation.function, "name") or self._reject_unless(notation.function.startswith(text))
        if self._mode == "confirm":
            if text.startswith((notation.parameter, notation.end_function)):
                return self._commit()
            return self._reject_unless(notation.parameter.startswith(text) or notation.end_function.startswith(text))
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
        self._tool = self._calls.find(self._notation.name(name))
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
        notation = self._notation
        if text.startswith(notation.parameter):
            name, found, rest = text[len(notation.parameter) :].partition(">")
            if not found and "\n" not in name and len(name) < 256:
                return False
            if found and "\n" not in name:
                self._arguments.begin(notation.name(name), notation.is_text(name))
                self._buffer, self._mode, self._match, self._at_line_start = rest, "frame", _NO_MATCH, True
                self._examples = Examples(notation.call, notation.end_call)
                return True
        elif text.startswith(notation.end_function):
            self._buffer = text[len(notation.end_function) :]
            self._end()
            self._mode = "done"
            return True
        elif any(tag.startswith(text) for tag in (notation.parameter, notation.end_function, notation.end_parameter)):
            return False
        following = text.find("<", 1)
        if not text.startswith(notation.end_parameter):
            self._writer.note("text between parameters was dropped")
        elif following < 0 or following > len(notation.end_parameter):
            following = len(notation.end_parameter)
        self._buffer = text[following:] if following >= 0 else ""
        return True

    def _frame(self) -> bool:
        """The newline after a parameter's opening tag."""
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix(self._notation.frame)
        self._mode = "value"
        return True

    def _value(self) -> bool:
        assert self._arguments is not None
        if self._arguments.streaming_json:
            at, tag = first_tag(self._buffer, (self._notation.end_parameter,))
            used = self._arguments.take_json(self._buffer[:at])
            if used is None and tag and self._arguments.in_json_string:
                self._arguments.take_json(tag)
                self._buffer = self._buffer[at + len(tag) :]
                return True
            if used is None and not tag:
                self._buffer = self._buffer[at:]
                return False
            self._arguments.end()
            self._buffer, self._mode = self._buffer[at if used is None else used :], "between"
            return True
        text, at = self._buffer, 0
        while True:
            found = self._candidate.search(text, at)
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
    """Parameters in any order, raw values ended by the rule of `xml_values`.

    Where the tags have a part that is a token, no text can be taken for one, and the first closing tag ends a value.
    """

    def __init__(self, spec: AnswerSpec, lark: GrammarBuilder, notation: Notation) -> None:
        self._notation = notation
        self._marked = notation.mark in spec.markers
        self.typed = notation.typed
        tag = notation.frame + notation.end_parameter
        end = rules.tag(spec, lark, "\n" + notation.end_function) + ' "\\n"'
        super().__init__(spec, lark, end=end, close=rules.tag(spec, lark, tag), tag="" if self._marked else tag)

    def head(self, name: str, *, text: bool) -> str:
        """The opening tag of a parameter."""
        notation = self._notation
        opened = notation.opening(notation.parameter, name, text=text)
        return rules.tag(self.spec, self.lark, f"\n{opened}{notation.frame}")

    def any_head(self, *, text: bool) -> str:
        """The opening tag of a parameter that no schema names."""
        before, _, after = self._notation.opening(self._notation.parameter, "\0", text=text).partition("\0")
        opening = rules.tag(self.spec, self.lark, "\n" + before)
        return f'{opening} /[^>"\\n]{{1,128}}/ {self.lark.text(after + self._notation.frame)}'

    def bounded(self, expressions: list[str]) -> str:
        """A text under rules; it cannot contain the closing tag."""
        if self._marked:
            return self._closed(" & ".join([*expressions, rules.ANY_TEXT]))
        body = self.lark.terminal("TEXT", " & ".join([*expressions, without(self._notation.end_parameter)]))
        return self.lark.rule("value", body, attributes=f"[suffix={self.close}]")

    def _closed(self, text: str) -> str:
        """A text and the closing tag, of which a part is a token: the text goes on up to that token."""
        before, mark, after = self._notation.end_parameter.partition(self._notation.mark)
        body = self.lark.terminal("BODY", f"({text}) {self.lark.text(self._notation.frame + before)}")
        return f"{body} {self.lark.special(mark)} {self.lark.text(after)}"

    def write_raw(self, but: str) -> str:
        """A text up to the first closing tag, which may be content: see `more`."""
        if self._marked:
            return self.lark.rule("raw", self._closed(rules.text_but(but) if but else rules.ANY_TEXT))
        text = self.lark.terminal("RAW", rules.text_but(but)) if but else rules.ANY_TEXT
        end, pair = self.lark.text(self._notation.end_parameter), (self._notation.call, self._notation.end_call)
        plain = rules.until(self.lark, end, text)
        example = rules.example_text(self.spec, self.lark, text, pair)
        if not example:
            return plain
        self.examples[but] = rules.until(self.lark, end, example)
        return self.lark.rule("raw", f"{plain} | {example} {self.lark.special(pair[1])} {self.raw('') if but else SELF}")

    def more(self, names: list[str], complete: str) -> tuple[str, str]:
        """What may follow a closing tag inside a raw value that goes on: whatever does not make that tag count. Behind the
        beginning of an example also its end, with a real closing tag.

        Where the closing tag of the call is no token, nothing tells content from the end: the first closing tag ends the
        value. In large tool sets no other tag of a parameter or function may follow: rules for each name would take too
        long to compile. Recursive to the left: to the right each tag in the value would cost the parser items, and these
        are limited.
        """
        lark, notation = self.lark, self._notation
        if notation.end_call not in self.spec.markers:
            return "", ""
        raw, space, close = self.raw(""), rf"[ \t\r\n]{{0,{LONGEST_SPACE}}}", lark.text(notation.end_parameter)
        parameter, end_function = regex(notation.parameter), regex(notation.end_function)
        if len(self.spec.tools) > _LARGE_SET:
            other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/{space}({parameter}|{end_function})(?s:.*)/")
            alternatives = ['""', f"{SELF} {rules.until(lark, close, other)}"]
            example = f'{SELF} {lark.text(chr(10) + notation.end_function)} "\\n" {lark.special(notation.end_call)} {raw}'
            return lark.rule("more", " | ".join(alternatives)), lark.rule("more", " | ".join([*alternatives, example]))
        behind = '"' if notation.quoted else ">"
        any_name = "|".join(regex(name) for name in names)
        named = rf"{parameter}{behind if notation.quoted else ''}({any_name}){behind}"
        other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/{space}({named}|{end_function})(?s:.*)/")
        odd_end = lark.terminal("ODD", rf"/(|[ \t\r]{space}|\n[ \t\r\n]{{1,{LONGEST_SPACE}}}){end_function}/")
        alternatives = ['""', f"{SELF}::_ {rules.until(lark, close, other)}"]
        for bit, name in enumerate(names):
            given = lark.terminal("GIVEN", f"/{space}{regex(notation.opening(notation.parameter, name))}/")
            alternatives.append(f"{SELF}::_ {given} {raw} %if bit_set({bit})")
        if notation.several:  # behind the end of the function another one may begin: that is no content
            other = lark.terminal("OTHER", rf"{rules.ANY_TEXT} & ~/{space}{regex(notation.function)}(?s:.*)/")
            raw = rules.until(lark, close, other)
        for end in (lark.text("\n" + notation.end_function), odd_end):
            alternatives.append(f"{SELF}::_ {end} {raw}{complete}")
        end = lark.text("\n" + notation.end_function)
        example = f'{SELF}::_ {end} "\\n" {lark.special(notation.end_call)} {self.raw("")}'
        plain, in_example = (
            lark.rule("more", "\n    | ".join(listed), attributes="::_") + f"::set_bit({BIT})"
            for listed in (alternatives, [*alternatives, example])
        )
        return plain, in_example


class XmlCalls:
    """A chat format of such calls. `marks` are what a template of the family writes, `certainty` how surely that tells it."""

    def __init__(self, notation: Notation, marks: tuple[str, ...], certainty: int = 3) -> None:
        self._notation = notation
        self._marks = marks
        self._certainty = certainty
        self._in_parser = replace(notation, **_standing_in(notation)) if notation.mark else notation
        own = {notation.mark} if notation.mark else {notation.call, notation.end_call}
        self.tags = frozenset({*notation.think_tags, *own})
        self.end_of_thought = notation.think_tags[1]

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write the family's marks."""
        return self._certainty if all(mark in template_text for mark in self._marks) else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)
        marked = self._notation.mark in setup.token_tags
        notation = self._in_parser if marked else self._notation

        def reader(bare: bool) -> CallReader:
            return XmlReader(setup, calls, notation, bare)

        parser = TaggedParser(
            setup,
            call_tags=(notation.call, notation.end_call),
            calls=calls,
            reader=reader,
            bare=notation.function,
            again=(notation.function,) if notation.several else (),
            think_tags=notation.think_tags,
        )
        return MarkedParser(parser, setup.writer, self._notation.mark) if marked else parser

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Parameters in any order, each once, the required ones always."""
        body, notation = "", self._notation
        if spec.tools and spec.request.call_limit:
            parameters = _Parameters(spec, lark, notation)
            heads = [rules.tag(spec, lark, notation.opening(notation.function, tool.name)) for tool in spec.tools]
            functions = [f"{head} {parameters.of(tool)}" for head, tool in zip(heads, spec.tools, strict=True)]
            one = lark.rule("functions", "\n    | ".join(functions))
            several = f"{{1,{spec.request.call_limit}}}" if notation.several else ""
            body = lark.rule("body", f'"\\n" {one}{several} {rules.tag(spec, lark, notation.end_call)}')
        return lark.build(
            rules.answer(
                spec,
                lark,
                open_tag=notation.call,
                call_body=body,
                most=1 if notation.several else MAX_CALLS,
                gap=notation.gap,
                think_tags=notation.think_tags,
            )
        )


def _standing_in(notation: Notation) -> dict[str, str]:
    """The tags with the mark as it stands in a parser's text."""
    words = ("call", "end_call", "function", "end_function", "parameter", "end_parameter")
    return {word: getattr(notation, word).replace(notation.mark, STAND_IN) for word in words}
