"""Plain text: thinking tags where the model has them, no calls."""

from __future__ import annotations

from pooled_mlx.chat_formats import rules
from pooled_mlx.chat_formats.base import AnswerSpec, GrammarBuilder
from pooled_mlx.chat_formats.tagged import END_THINK, THINK, Calls, TaggedParser
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup


class Plain:
    """For models that cannot call tools: tool calls stay text."""

    tags = frozenset({THINK, END_THINK})
    end_of_thought = END_THINK

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """Never chosen for a template: the generic call instructions work with any of them."""
        return 0

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        return TaggedParser(setup, call_tags=None, calls=Calls(setup))

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """Thinking, then text or a JSON value."""
        return lark.build(rules.answer(spec, lark))


FORMAT = Plain()
