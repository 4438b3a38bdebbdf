"""Grammar of strings that stand as bare text in front of a closing tag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooled_mlx.chat_formats.base import GrammarBuilder
from pooled_mlx.chat_formats.schemas import resolve, shape_of
from pooled_mlx.grammar import formats, patterns

ANY_TEXT = r"/(?s:.*)/"


def text_branches(schema: object, root: object) -> list[tuple[list[str] | None, list[str]]]:
    """The strings a schema allows, as alternatives: the only texts there are, or regexes that the whole text must match.

    Without either any text will do. Rules that no regex can hold (look-around, anchors inside, a few formats) are left out.
    """
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return [(None, [])]
    texts = enum_texts(schema)
    if texts is not None:
        return [(texts, [])] if texts else []
    own = _expressions(schema)
    branches = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), None)
    if branches is None:
        return [(None, own)]
    found: list[tuple[list[str] | None, list[str]]] = []
    for branch in branches:
        if shape_of(branch, root).maybe_text:
            found += [(texts, own + more) for texts, more in text_branches(branch, root)]
    return found


def _expressions(schema: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    low, high = schema.get("minLength"), schema.get("maxLength")
    if isinstance(low, int) or isinstance(high, int):
        found.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    pattern, form = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        try:
            found.append(whole_match(patterns.translate(pattern)))
        except patterns.PatternError:
            found.append("")
    if isinstance(form, str) and form in formats.PATTERNS:
        found.append(whole_match(formats.PATTERNS[form]))
    return [expression for expression in found if expression]


def whole_match(expression: str) -> str:
    """`expression`, which may match anywhere, as a Lark regex for the whole text; "" where an anchor stands inside."""
    branches: list[str] = []
    for branch in _branches(expression):
        start = branch.startswith("^")
        end = branch.endswith("$")
        body = branch[1 if start else 0 : len(branch) - (1 if end else 0)]
        inner = _branches(body[3:-1]) if start and end and _is_group(body) else [body]
        if any(_has_anchor(part) for part in inner):
            return ""
        branches.append(("" if start else "(?s:.*)") + f"(?:{body})" + ("" if end else "(?s:.*)"))
    return "/" + "|".join(branches).replace("/", r"\/") + "/"


def without(text: str) -> str:
    """The part of a terminal that keeps a literal out of the text."""
    return f"~/(?s:.*){regex(text)}(?s:.*)/"


def regex(text: str) -> str:
    """A literal as part of a Lark regex."""
    return patterns.literal(text)


def constrained_text(lark: GrammarBuilder, rules: list[str], close: str, tag: str) -> str:
    """A rule for a text under `rules` and `close` after it; the text cannot contain `tag`."""
    body = lark.terminal("TEXT", " & ".join([*rules, ANY_TEXT, without(tag)]))
    return lark.rule("value", body, attributes=f"[suffix={lark.text(close)}]")


def _branches(expression: str) -> list[str]:
    parts, depth, start, inside = [], 0, 0, False
    for at, char in enumerate(expression):
        if inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            parts.append(expression[start:at])
            start = at + 1
    return [*parts, expression[start:]]


def _has_anchor(expression: str) -> bool:
    inside = False
    for char in expression:
        if inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char in "^$":
            return True
    return False


def _is_group(expression: str) -> bool:
    return expression.startswith("(?:") and expression.endswith(")")


def enum_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The only strings a schema allows, where it lists them."""
    if isinstance(schema.get("const"), str):
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return [value for value in schema["enum"] if isinstance(value, str)]
    return None
