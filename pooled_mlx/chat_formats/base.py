"""What a chat format offers, and what it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pooled_mlx.core.request import Request, Tool
from pooled_mlx.grammar.errors import Unenforced
from pooled_mlx.grammar.schema import Lowered
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


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What one answer's grammar must hold.

    `tools` are the callable tools in prompt order (`Request.callable_tools`). `reasoning_open`: the prompt ends inside a
    thinking block; `may_think`: the model may open one itself. `json_schema` is the schema of the answer text, None for
    free text. `markers` are the tags that the model has as single tokens. The end of the turn is the matcher's business.

    `degraded` maps names of tools whose schema is not used to the reason: their calls keep name and shape, their arguments
    are free. The caller puts tools in whose rules do not compile, a format adds those whose schema is broken.
    """

    request: Request
    tools: tuple[Tool, ...] = ()
    reasoning_open: bool = False
    may_think: bool = False
    json_schema: Mapping[str, Any] | bool | None = None
    markers: frozenset[str] = frozenset()
    degraded: dict[str, str] = field(default_factory=dict[str, str])


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
