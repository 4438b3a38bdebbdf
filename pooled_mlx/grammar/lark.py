"""Builds one Lark grammar for a whole answer, in the dialect of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pooled_mlx.grammar.errors import SchemaError, Unenforced
from pooled_mlx.grammar.schema import Lowered, lower

SELF = "\x00self\x00"
"""Stands for the rule's own name inside its body: for recursive and parametric rules."""

_ANY_JSON: Mapping[str, Any] = {}
_WHITESPACE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkBuilder:
    """Collects rules; equal bodies share one rule. Not thread-safe, used once.

    `added_tokens` maps the text of each added token to its id. With `strict`, a schema keyword that the grammar cannot
    enforce is a `SchemaError`; without it the keyword is dropped and listed in `unenforced`.
    """

    def __init__(self, added_tokens: Mapping[str, int], *, strict: bool = False) -> None:
        self._added = added_tokens
        self._strict = strict
        self._lines: list[str] = []
        self._names: dict[tuple[str, str], str] = {}
        self._count = 0
        self._schemas: dict[str, str] = {}
        self.unenforced: list[Unenforced] = []
        """What no rule enforces, pointers under the `where` of each schema."""

    def rule(self, prefix: str, body: str, *, attributes: str = "") -> str:
        """Add a rule and return its name: `prefix` (lower case) and a number.

        `attributes` follows the name directly (`[suffix="x"]`, `::_`). `SELF` in the body stands for the name.
        """
        return self._add(prefix.lower(), body, attributes)

    def terminal(self, prefix: str, body: str) -> str:
        """Add a terminal (one lexeme: regexes joined by `&`, `|`, `~`) and return its name in upper case."""
        return self._add(prefix.upper(), body, "")

    def json(self, schema: Mapping[str, Any] | bool, where: str) -> str:
        """A rule for one JSON value of `schema`. `where` is the pointer of the schema in the request, for errors and lists.

        Raises `SchemaError` for a broken schema, and under `strict` for a keyword that cannot be enforced.
        """
        lowered = lower(schema, strict=self._strict, where=where)
        self.unenforced.extend(lowered.unenforced)
        return self.lowered(lowered)

    def lowered(self, lowered: Lowered) -> str:
        """A rule for one JSON value of a schema that `lower` has been through."""
        text = dumps({**lowered.schema, "x-guidance": _WHITESPACE})
        known = self._schemas.get(text)
        if known is None:
            known = self._schemas[text] = self.rule("json", "%json " + text)
        return known

    def special(self, name: str) -> str:
        """The Lark spelling of the added token `name`. Raises LookupError when the vocabulary has no such token."""
        if name not in self._added:
            raise LookupError(f"the tokenizer has no added token {name!r}")
        return f"<[{self._added[name]}]>"

    def has_special(self, name: str) -> bool:
        """True when the vocabulary has the added token `name`."""
        return name in self._added

    @staticmethod
    def text(literal: str) -> str:
        """`literal` as a quoted Lark string."""
        return json.dumps(literal, ensure_ascii=True) if literal.isascii() else json.dumps(literal, ensure_ascii=False)

    def build(self, start_body: str) -> str:
        """The whole grammar, `start_body` as the body of its start rule."""
        return "\n".join(["%llguidance {}", f"start: {start_body}", *self._lines, ""])

    def _add(self, prefix: str, body: str, attributes: str) -> str:
        key = (attributes, body)
        known = self._names.get(key)
        if known is not None and known[0].isupper() == prefix[0].isupper():
            return known
        self._count += 1
        name = f"{prefix}_{self._count}"
        self._names[key] = name
        self._lines.append(f"{name}{attributes}: {body.replace(SELF, name)}")
        return name


def dumps(value: Any) -> str:
    """Compact JSON in the order given, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


__all__ = ["SELF", "LarkBuilder", "SchemaError", "dumps"]
