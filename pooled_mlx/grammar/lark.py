"""Builds one Lark grammar for a whole answer, in the dialect of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pooled_mlx.grammar.errors import SchemaError, Unenforced
from pooled_mlx.grammar.plain import surely_met
from pooled_mlx.grammar.schema import Lowered, lower

SELF = "\x00self\x00"
"""Stands for the rule's own name inside its body: for recursive and parametric rules."""

_GUIDANCE = '"x-guidance":{"whitespace_flexible":false,"item_separator":", ","key_separator":": "}'
_ONE_SPELLING = _GUIDANCE[:-1] + r',"json_allowed_escapes":"nrbtf\\\""}'
"""No `\\u` in any string: control characters other than those with an escape of their own cannot be written then."""
_MOST_MEMBERS = 64
_LARK_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Compact JSON in the order given, non-ASCII kept."""

_ascii = json.JSONEncoder().encode


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
        return self._value(lowered.schema, _ONE_SPELLING if lowered.has_open_names else _GUIDANCE)

    def lowered(self, lowered: Lowered) -> str:
        """A rule for one JSON value of a schema that `lower` has been through."""
        return self._value(lowered.schema)

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
        return _ascii(literal) if literal.isascii() else dumps(literal)

    def build(self, start_body: str) -> str:
        """The whole grammar, `start_body` as the body of its start rule."""
        return "\n".join(["%llguidance {}", f"start: {start_body}", *self._lines, ""])

    def _value(self, schema: Mapping[str, Any] | bool, guidance: str = _GUIDANCE) -> str:
        text = dumps(schema)
        known = self._schemas.get(text + guidance)
        if known is None:
            known = self._object(schema, guidance) if isinstance(schema, Mapping) and _is_plain_object(schema) else ""
            if not known:
                text_only = {"true": "{}", "false": '{"enum":[]}'}.get(text, text)
                head = text_only[:-1] + ("," if len(text_only) > 2 else "")
                known = self.rule("json", f"%json {head}{guidance}}}")
            self._schemas[text + guidance] = known
        return known

    def _object(self, schema: Mapping[str, Any], guidance: str) -> str:
        """An object of listed properties as a rule of its own: a third of the engine's time for the same as a schema.

        Most objects of many tools have the same properties somewhere, and those are compiled once.
        """
        required = set(schema.get("required", ()))
        members = [(name, name in required, self._value(part, guidance)) for name, part in schema.get("properties", {}).items()]
        first = next((index for index, member in enumerate(members) if member[1]), len(members))
        starts: list[str] = ['"{}"'] if first == len(members) else []
        for index, (name, _, value) in enumerate(members[: first + 1]):
            rest = self._members(members, index + 1, chained=first > 1)
            starts.append(f'{self.text("{" + dumps(name) + ": ")} {value} {rest}"}}"')
        return self.rule("object", "\n    | ".join(starts))

    def _members(self, members: Sequence[tuple[str, bool, str]], start: int, *, chained: bool) -> str:
        """What follows from member `start` on, one being there before it. `chained`: in rules that others can share."""
        rest = ""
        for name, is_required, value in reversed(members[start:]):
            member = f"{self.text(', ' + dumps(name) + ': ')} {value}"
            rest = f"{member if is_required else f'({member})?'} {rest}"
            if chained:
                rest = self.rule("members", rest) + " "
        return rest

    def _add(self, prefix: str, body: str, attributes: str) -> str:
        key = (attributes, body)
        known = self._names.get(key)
        if known is not None and known[0].isupper() == prefix[0].isupper():
            return known
        self._count += 1
        name = f"{prefix}_{self._count}"
        self._names[key] = name
        self._lines.append(f"{name}{attributes}: {body.replace(SELF, name) if SELF in body else body}")
        return name


def _is_plain_object(schema: Mapping[str, Any]) -> bool:
    """True for an object of listed properties and no others, all of which can stand alone as rules."""
    if schema.get("type") != "object" or schema.get("additionalProperties") is not False or not schema.keys() <= _LARK_OBJECT:
        return False
    properties = schema.get("properties", {})
    return (
        len(properties) <= _MOST_MEMBERS
        and all(name in properties for name in schema.get("required", ()))
        and all(map(surely_met, properties.values()))
    )


__all__ = ["SELF", "LarkBuilder", "SchemaError", "dumps"]
