"""Hermes JSON calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen3, and any model by instruction)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import CUSTOM_PARAMETER, AnswerSpec, GrammarBuilder, tool_schema
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, CallReader, Calls, Closing, Step, TaggedParser
from pooled_mlx.core.request import Tool, ToolCall, Turn
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.event_writer import SPACE
from pooled_mlx.text.json_stream import JsonStream, StringField

CALL, END_CALL = "<tool_call>", "</tool_call>"
RESULT, END_RESULT = "<tool_response>", "</tool_response>"

_OTHER_KEYS = frozenset({"id", "type", "function"})
"""Keys that may stand before the name of a call; any other key shows that the object is no call."""

_INSTRUCTIONS = """# Tools

You can call the tools below. Their signatures are JSON, one a line:
<tools>
{tools}
</tools>

To call a tool, write its name and its arguments as a JSON object between call tags, and end your turn:
<tool_call>
{{"name": "tool_name", "arguments": {{"argument": "value"}}}}
</tool_call>

Write one such block for each call. Results come back between <tool_response> tags. Without need of a tool, answer in plain
text."""


def generic_instructions(tools: Sequence[Tool]) -> str:
    """The system text that teaches `tools` to a model whose template knows none."""
    lines: list[str] = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool_schema(tool)
        lines.append(_json({"type": "function", "function": function}))
    return _INSTRUCTIONS.format(tools="\n".join(lines))


def render_call(call: ToolCall) -> str:
    """A past call as the model would have written it. Arguments that are not JSON stand as a JSON string."""
    arguments = call.arguments.strip() or "{}"
    if call.custom:
        arguments = _json({CUSTOM_PARAMETER: call.arguments})
    else:
        try:
            json.loads(arguments)
        except ValueError:
            arguments = _json(call.arguments)
    return f'{CALL}\n{{"name": {_json(call.name)}, "arguments": {arguments}}}\n{END_CALL}'


def render_tool_result(turn: Turn) -> str:
    """A tool's result as the text of a user turn."""
    return f"{RESULT}\n{turn.text}\n{END_RESULT}"


class HermesReader:
    """Reads one JSON call object, streaming its arguments as they are generated."""

    def __init__(self, setup: ParserSetup, calls: Calls, name_keys: frozenset[str], argument_keys: frozenset[str]) -> None:
        self._writer = setup.writer
        self._calls = calls
        self._name_keys = name_keys
        self._argument_keys = argument_keys
        self._raw: list[str] = []
        self._mode = "start"
        self._value = JsonStream()
        self._buffer: list[str] = []
        self._role = ""
        self._tool: Tool | None = None
        self._custom: StringField | None = None
        self._early: str | None = None
        self._has_arguments = False
        self._alone = False

    @property
    def committed(self) -> bool:
        """True once a callable tool's name was read."""
        return self._tool is not None

    def closing(self, *, token: bool, after_newline: bool) -> Closing:
        """Inside a JSON string a closing tag is content, except after a raw newline, which no JSON string contains."""
        if after_newline or not self.in_value:
            return "yes"
        return "maybe" if token else "no"

    @property
    def in_value(self) -> bool:
        """True inside a JSON string."""
        return self._mode == "value" and self._value.in_string

    def tag(self, name: str) -> Step:
        """No tag stands inside a call but as content."""
        return self.feed(name)

    def refutes(self, text: str) -> bool:
        """Any text after the tag shows that the string went on."""
        return bool(text.strip(SPACE))

    def begin(self, name: str) -> bool:
        """The call's name is known: what follows is its arguments alone. False where no such tool can be called."""
        self._alone = True
        self._name(name)
        if self._tool is not None:
            self._mode, self._role = "value", "arguments"
        return self._tool is not None

    def feed(self, text: str) -> Step:
        """The next piece of the call."""
        if self._tool is None:
            self._raw.append(text)
        at, size = 0, len(text)
        while at < size:
            if self._mode == "value":
                at = self._read_value(text, at)
            elif self._mode == "key":
                at = self._read_key(text, at)
            elif text[at] in SPACE:
                at += 1
            else:
                at = self._punctuation(text, at)
            if self._mode == "rejected":
                return self._reject()
            if self._mode == "done":
                return "done", text[at:]
        return "open", ""

    def close(self) -> Step:
        """Complete the call with what there is."""
        if self._mode == "value":
            self._value_text(self._value.close())
            self._value_end()
        if self._tool is None:
            return self._reject()
        if self._mode != "done":
            self._end()
        return "done", ""

    def _reject(self) -> Step:
        return "rejected", "".join(self._raw)

    def _punctuation(self, text: str, at: int) -> int:
        char = text[at]
        if self._mode == "start":
            if char == "{":
                self._mode = "next"
            elif char != "[":
                self._mode = "rejected"
            return at + 1
        if self._mode == "colon":
            self._mode = "value"
            self._value = JsonStream()
            self._buffer = []
            return at + (char == ":")
        if char == "}":
            if self._tool is None:
                self._mode = "rejected"
            else:
                self._end()
                self._mode = "done"
            return at + 1
        if char in "\"'":
            self._mode = "key"
            self._value = JsonStream()
            self._buffer = []
            return at
        if self._tool is None and char != ",":
            self._mode = "rejected"
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        out, used = self._value.feed(text[at:] if at else text)
        self._buffer.append(out)
        if self._value.done:
            key = json.loads("".join(self._buffer))
            self._role = ""
            if key in self._name_keys and self._tool is None:
                self._role = "name"
            elif key in self._argument_keys and not self._has_arguments:
                self._role = "arguments"
            known = key in self._name_keys or key in self._argument_keys or key in _OTHER_KEYS
            self._mode = "colon" if known or self._tool is not None else "rejected"
        return at + used

    def _read_value(self, text: str, at: int) -> int:
        if not self._value.started:
            if text[at] in SPACE + ":]":
                return at + 1
            if text[at] in ",}":
                self._value_end()
                return at
        out, used = self._value.feed(text[at:] if at else text)
        self._value_text(out)
        if self._value.done:
            self._value_end()
        return at + used

    def _value_text(self, out: str) -> None:
        if not out or not self._role:
            return
        if self._role == "arguments" and self._tool is not None and not self._buffer and out[0] in "{[":
            self._has_arguments = True
            self._role = "streaming"
        if self._role == "streaming":
            self._write(out)
        else:
            self._buffer.append(out)

    def _value_end(self) -> None:
        role, value = self._role, "".join(self._buffer)
        self._mode, self._role, self._buffer = "next", "", []
        if role == "name":
            self._name(json.loads(value) if value else None)
        elif role == "arguments" and value:
            self._has_arguments = True
            if self._tool is None:
                self._early = value
            else:
                self._whole_arguments(value)
        if self._alone:
            self._end()
            self._mode = "done"

    def _name(self, name: object) -> None:
        self._tool = self._calls.find(name) if isinstance(name, str) else None
        if self._tool is None:
            self._mode = "rejected"
            return
        self._raw.clear()
        self._writer.call_start(self._tool)
        if self._tool.custom:
            self._custom = StringField(CUSTOM_PARAMETER)
        if self._early is not None:
            self._whole_arguments(self._early)

    def _whole_arguments(self, value: str) -> None:
        """Arguments that were not streamed: a string that holds an object counts as the object, null as none."""
        if value[0] == '"':
            text = json.loads(value)
            if self._custom is not None:
                self._custom = None
                self._writer.call_arguments(text)
                return
            try:
                if isinstance(json.loads(text), dict):
                    value = text
            except ValueError:
                pass
        self._write("{}" if value == "null" else value)

    def _write(self, out: str) -> None:
        self._writer.call_arguments(out if self._custom is None else self._custom.feed(out))

    def _end(self) -> None:
        if not self._has_arguments and self._tool is not None and not self._tool.custom:
            self._writer.call_arguments("{}")
        self._writer.call_end()


class Hermes:
    """Calls as JSON objects between `<tool_call>` tags, thinking between `<think>` tags."""

    tags = frozenset({THINK, END_THINK, CALL, END_CALL})
    end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates that write a JSON call between the tags; the fallback for all others."""
        return 2 if CALL in template_text and '"arguments"' in template_text else 1

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return HermesReader(setup, calls, frozenset({"name"}), frozenset({"arguments", "parameters"}))

        return TaggedParser(setup, call_tags=(CALL, END_CALL), calls=calls, reader=reader, again=("{",))

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Calls with `name` before `arguments`, in the spelling of Qwen's templates."""
        body = ""
        if spec.tools and spec.request.call_limit:
            calls: list[str] = []
            for tool in spec.tools:
                head = f'{{"name": {_json(tool.name)}, "arguments": '
                calls.append(f"{lark.text(head)} {rules.json_arguments(spec, lark, tool)}")
            one = lark.rule("tools", "\n    | ".join(calls))
            body = lark.rule("body", f'"\\n" {one} "}}\\n" {rules.tag(spec, lark, END_CALL)}')
        return lark.build(rules.answer(spec, lark, open_tag=CALL, call_body=body))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


FORMAT = Hermes()
