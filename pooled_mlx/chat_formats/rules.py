"""The parts of an answer's grammar that formats share: thinking, text around calls, calls in a row, a JSON answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pooled_mlx.chat_formats.base import CUSTOM_SCHEMA, AnswerSpec, GrammarBuilder, tool_schema
from pooled_mlx.chat_formats.raw_values import regex
from pooled_mlx.chat_formats.schemas import loosened
from pooled_mlx.chat_formats.tagged import END_THINK, THINK
from pooled_mlx.core.request import MAX_CALLS, Tool
from pooled_mlx.grammar.errors import Unenforced
from pooled_mlx.grammar.keywords import KEYWORDS
from pooled_mlx.grammar.lark import SELF, SchemaError
from pooled_mlx.grammar.schema import lower

ANY_TEXT = r"/(?s:.*)/"
"""Any text. A token that is a tag never matches it."""

_SOME_TEXT = r"/(?s:.+)/"

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def text_but(beginnings: str) -> str:
    """Any text that does not begin, after whitespace, with one of the characters of a regex set."""
    return rf"{ANY_TEXT} & ~/[ \t\r\n]*[{beginnings}](?s:.*)/"


def tag(spec: AnswerSpec, lark: GrammarBuilder, name: str) -> str:
    """A tag as the model writes it: its token, or its spelling where it has none, in which a marker is a token."""
    if name in spec.markers:
        return lark.special(name)
    before, mark, after = _parted(spec, name)
    parts = [lark.text(before) if before else "", lark.special(mark) if mark else "", lark.text(after) if after else ""]
    return " ".join(part for part in parts if part)


def _parted(spec: AnswerSpec, name: str) -> tuple[str, str, str]:
    """What stands before the marker in a tag, the marker, and what stands behind it."""
    return next((name.partition(mark) for mark in spec.markers if mark in name), (name, "", ""))


def until(lark: GrammarBuilder, end: str, text: str = ANY_TEXT) -> str:
    """A rule for text up to and including the first `end`, which may be any terminal."""
    return lark.rule("until", text, attributes=f"[suffix={end}]")


def example_text(spec: AnswerSpec, lark: GrammarBuilder, text: str, pair: tuple[str, str]) -> str:
    """A terminal for a `text` in which an example of a call has begun; "" where no text can be taken for the end of a call.

    `pair` are the tags of a call. The opening one is spelled, the closing one is the token: without an opening one before it,
    that ends the value's own call, and only another call or the end of the answer may follow.
    """
    opening, closing = pair
    if closing not in spec.markers:
        return ""
    return lark.terminal("EXAMPLE", ("" if text == ANY_TEXT else f"{text} & ") + f"/(?s:.*){regex(opening)}(?s:.*)/")


def with_examples(
    spec: AnswerSpec, lark: GrammarBuilder, plain: str, text: str, pair: tuple[str, str], again: str, end: str
) -> str:
    """`plain`, a raw value that is any `text` up to the token `end`, or an example in it that ends with a real closing tag, and
    `again`.
    """
    example = example_text(spec, lark, text, pair)
    if not example:
        return plain
    rest = f"{lark.special(pair[1])} {again}"
    inside = lark.rule("inside", f'"" | {SELF} {_SOME_TEXT}? {end}')
    return lark.rule("raw", f"{plain}\n    | {example} {rest}\n    | {example} {end} {inside} {_SOME_TEXT}? {rest}")


def up_to_tag(spec: AnswerSpec, lark: GrammarBuilder, name: str) -> str:
    """Any text, then the tag `name`."""
    if name in spec.markers:
        return f"{ANY_TEXT} {lark.special(name)}"
    before, mark, after = _parted(spec, name)
    if not mark:
        return until(lark, lark.text(name))
    text = lark.terminal("BEFORE", f"{ANY_TEXT} {lark.text(before)}") if before else ANY_TEXT
    return f"{text} {lark.special(mark)} {lark.text(after)}"


def several(one: str, between: str, most: int) -> str:
    """One to `most` of the rule `one`, with `between` between two of them."""
    return one if most == 1 else f"{one} ({between} {one}){{0,{most - 1}}}"


def answer(
    spec: AnswerSpec,
    lark: GrammarBuilder,
    *,
    open_tag: str = "",
    call_body: str = "",
    separator: str = '"\\n"',
    most: int = MAX_CALLS,
    gap: str = "\n\n",
    think_tags: tuple[str, str] = (THINK, END_THINK),
) -> str:
    """The body of the start rule.

    A call is `open_tag` and then `call_body`, a rule that ends with the closing tag; `call_body` "" means that none can be
    made. `separator` stands between calls, of which there are at `most` as many. `gap` is what the template puts between a
    thought and the answer; where the answer's form is forced, so is the gap.
    """
    request = spec.request
    limit = min(request.call_limit, most) if call_body and spec.tools else 0
    trailing = f"{separator}?" if separator else ""
    forced = limit > 0 and request.tool_choice.mode in ("required", "named")
    value = ""
    if spec.json_schema is not None and not forced:
        value = lark.json(spec.json_schema, "")
    row = ""
    if limit:
        call = lark.rule("call", f"{tag(spec, lark, open_tag)} {call_body}")
        row = lark.rule("calls", f"{several(call, separator, limit)} {trailing}")
    if forced:
        body, fixed = row, True
    elif value:
        body, fixed = (f"({value} | {row})" if row else value), True
    elif not row:
        body, fixed = ANY_TEXT, False
    elif open_tag in spec.markers:
        body, fixed = f"{ANY_TEXT} {row}?", False
    else:
        # text that ends in the opening tag is preferred to plain text by the lexer, because it is lazy
        opening = tag(spec, lark, open_tag)
        rest = f"{call_body} ({separator} {opening} {call_body}){{0,{limit - 1}}}" if limit > 1 else call_body
        body, fixed = f"({ANY_TEXT} | {up_to_tag(spec, lark, open_tag)} {rest} {trailing})", False
    return f"{_thinking(spec, lark, lark.text(gap) if fixed and gap else '', think_tags)}{body}"


def _thinking(spec: AnswerSpec, lark: GrammarBuilder, gap: str, tags: tuple[str, str]) -> str:
    opening, closing = tags
    if spec.reasoning_open:
        return f"{up_to_tag(spec, lark, closing)} {gap} "
    if spec.may_think and opening in spec.markers and closing in spec.markers:
        return f'("\\n"? {lark.special(opening)} {ANY_TEXT} {lark.special(closing)} {gap})? '
    return ""


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments as one JSON object.

    A plain schema with declared properties takes no others, but those it requires: a model that invents arguments helps nobody.
    """
    schema = tool_schema(tool)
    if not isinstance(schema, Mapping):
        return ANY_OBJECT
    result = {**loosened(schema), "type": "object"}
    composed = any(word in result for word in ("allOf", "anyOf", "$ref", "if", "patternProperties", "unevaluatedProperties"))
    if "properties" in result and not composed and "additionalProperties" not in result:
        names = result.get("required")
        undeclared = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        if isinstance(result["properties"], Mapping):
            result["properties"] = {**result["properties"], **{n: {} for n in undeclared if n not in result["properties"]}}
        result["additionalProperties"] = False
    if tool.custom and tool.grammar is not None and tool.grammar.syntax == "regex":
        result["properties"] = {
            name: {**value, "pattern": f"^(?:{tool.grammar.definition})$"} for name, value in result["properties"].items()
        }
    return result


def json_arguments(spec: AnswerSpec, lark: GrammarBuilder, tool: Tool) -> str:
    """A rule for a tool's arguments as one JSON object; any object where the tool is degraded or its schema is broken."""
    if tool.name not in spec.degraded:
        try:
            rule = tool_json(lark, arguments_schema(tool), where_of(tool))
        except SchemaError as error:
            spec.degraded[tool.name] = str(error)
        else:
            if tool.grammar is not None and tool.grammar.syntax == "lark":
                spec.degraded[tool.name] = "a Lark grammar cannot be held inside a JSON string"
            return rule
    return tool_json(lark, CUSTOM_SCHEMA if tool.custom else ANY_OBJECT, where_of(tool))


def tool_json(lark: GrammarBuilder, schema: Mapping[str, Any] | bool, where: str) -> str:
    """A rule for a JSON value in a call. What a tool's schema asks for and no rule can hold is dropped, and listed."""
    lowered = lower(schema, strict=False, where=where, tool=True)
    lark.unenforced.extend(lowered.unenforced)
    return lark.lowered(lowered)


def name_unheld(lark: GrammarBuilder, schema: Mapping[str, Any], held: frozenset[str], where: str, why: str) -> None:
    """List every keyword of `schema` that asserts something and is not among those `held`; alternatives of names alone are."""
    for part, pointer in [(schema, where), *((one, f"{where}/allOf/{n}") for n, one in enumerate(listed(schema, "allOf")))]:
        for keyword in part:
            conditions = keyword in ("anyOf", "oneOf") and all(set(one) <= {"required"} for one in listed(part, keyword))
            if keyword in KEYWORDS and keyword not in held and not conditions:
                lark.unenforced.append(Unenforced(f"{pointer}/{keyword}", keyword, why))


def listed(schema: Mapping[str, Any], word: str) -> list[Mapping[str, Any]]:
    """The schemas that a keyword lists."""
    value = schema.get(word)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def where_of(tool: Tool) -> str:
    """The pointer under which a tool's schema is named in messages."""
    return f"/tools/{tool.name}"


def shape_key(*parts: object) -> str:
    """A key for equal shapes."""
    return json.dumps(parts, ensure_ascii=False, default=sorted)
