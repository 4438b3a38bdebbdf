"""Llama 3.1 to 3.3 calls: the whole answer is `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`.

Format: the chat template published with Llama 3.3, which writes one call a turn and refuses more. Its built-in tools
(`name.call(…)`) are not offered to the model and stay text.
"""

from __future__ import annotations

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.hermes import HermesReader
from pooled_mlx.chat_formats.tagged import CallReader, Calls, TaggedParser
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup
from pooled_mlx.text.json_stream import quote

CALL = "<|python_tag|>"


class Llama3:
    """An answer that begins with a call object is a call; everything else is text."""

    tags = frozenset({CALL})
    end_of_thought = None

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Templates with Llama's turn headers that write `"parameters"`."""
        return 3 if "<|start_header_id|>" in template_text and '"parameters": ' in template_text else 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        calls = Calls(setup)

        def reader(bare: bool) -> CallReader:
            return HermesReader(setup, calls, frozenset({"name"}), frozenset({"parameters", "arguments"}))

        return TaggedParser(setup, call_tags=(CALL, ""), calls=calls, reader=reader, again=("{",), first="{")

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """One call or text. Where a call may be made, a text cannot begin with a brace: it would be one."""
        calls: list[str] = []
        if spec.request.call_limit:
            for tool in spec.tools:
                head = lark.text(f'{{"name": {quote(tool.name)}, "parameters": ')
                calls.append(f'{head} {rules.json_arguments(spec, lark, tool)} "}}"')
        if not calls:
            return lark.build(rules.answer(spec, lark))
        call = lark.rule("calls", "\n    | ".join(calls))
        if CALL in spec.markers:
            call = f"{lark.special(CALL)}? {call}"
        if spec.request.tool_choice.mode in ("required", "named"):
            return lark.build(call)
        other = lark.terminal("TEXT", rules.text_but("\\{")) if spec.json_schema is None else lark.json(spec.json_schema, "")
        return lark.build(f"{other} | {call}")


FORMAT = Llama3()
