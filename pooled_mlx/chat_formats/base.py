"""What a chat format offers, and what it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pooled_mlx.core.request import Tool
from pooled_mlx.grammar.errors import Unenforced
from pooled_mlx.grammar.schema import Lowered
from pooled_mlx.grammar.spec import AnswerSpec
from pooled_mlx.text.answer_stream import AnswerParser, ParserSetup

CUSTOM_PARAMETER = "input"
"""The one string parameter under which a custom (free-form) tool is shown to the model."""

CUSTOM_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_PARAMETER: {"type": "string"}},
    "required": [CUSTOM_PARAMETER],
    "additionalProperties": False,
}
"""How a custom tool looks to a model that knows function tools only."""


def tool_schema(tool: Tool) -> Mapping[str, Any] | bool:
    """The schema of a tool's arguments as the model sees it: a custom tool takes one string, no schema takes nothing."""
    if tool.custom:
        return CUSTOM_SCHEMA
    return {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters


__all__ = ["CUSTOM_PARAMETER", "CUSTOM_SCHEMA", "AnswerSpec", "ChatFormat", "GrammarBuilder", "tool_schema"]


class GrammarBuilder(Protocol):
    """The Lark text that a format writes its rules into; `pooled_mlx.grammar` has the real one."""

    def rule(self, prefix: str, body: str, *, attributes: str = "") -> str:
        """Add a uniquely named rule and return its name; equal bodies share one rule."""
        ...

    def terminal(self, prefix: str, body: str) -> str:
        """Add a uniquely named terminal and return its name."""
        ...

    def json(self, schema: Mapping[str, Any] | bool, where: str) -> str:
        """A rule for a JSON value of `schema`, cleaned, lowered and shared; `where` names it in messages."""
        ...

    def lowered(self, lowered: Lowered) -> str:
        """A rule for a JSON value of a schema that was lowered already."""
        ...

    @property
    def unenforced(self) -> list[Unenforced]:
        """What no rule enforces."""
        ...

    def special(self, name: str) -> str:
        """The Lark spelling of an added token."""
        ...

    def text(self, literal: str) -> str:
        """A quoted literal."""
        ...

    def build(self, start_body: str) -> str:
        """The whole grammar, starting with `start_body`."""
        ...


class ChatFormat(Protocol):
    """One chat format. It is also an `AnswerFormat` for `text.answer_stream.AnswerStream`."""

    @property
    def tags(self) -> frozenset[str]:
        """The spellings that are tags where the model has them as tokens."""
        ...

    @property
    def end_of_thought(self) -> str | None:
        """The tag that closes a thought; None where one tag alone does not, so that a thought cannot be cut short."""
        ...

    def recognises(self, template_text: str, added_token_names: frozenset[str]) -> int:
        """How surely this is the format of that template: 0 not at all, 1 as a fallback, 2 and more by its own marks."""
        ...

    def parser(self, setup: ParserSetup) -> AnswerParser:
        """A parser for one answer."""
        ...

    def grammar(self, spec: AnswerSpec, lark: GrammarBuilder) -> str:
        """The Lark text that holds a whole answer to this format, to `spec`'s tools and to its JSON schema.

        Raises `grammar.lark.SchemaError` for a JSON schema of the answer that cannot be held; a tool's schema degrades alone.
        """
        ...
