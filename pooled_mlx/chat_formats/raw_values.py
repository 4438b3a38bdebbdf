"""Grammar of strings that stand as bare text in front of a closing tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pooled_mlx.chat_formats.schemas import Alternatives, resolve
from pooled_mlx.grammar import formats, patterns

_WORD = re.compile("[0-9A-Za-z_]+")

LONGEST_BOUND = 4096
"""The largest `maxLength` held in bare text. A bounded text cannot contain its closing tag, and files must be able to."""


Branches = list[tuple[list[str] | None, list[str]]]


def text_branches(schema: object, root: object, dropped: list[tuple[str, str]]) -> Branches:
    """The strings a schema allows, as alternatives: the only texts there are, or regexes that the whole text must match.

    Without either any text will do. `dropped` takes the keywords that no rule holds, each with the reason.
    """
    return _text_branches(schema, root, dropped, Alternatives())


def _text_branches(schema: object, root: object, dropped: list[tuple[str, str]], walk: Alternatives) -> Branches:
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return [(None, [])]
    if not walk.enter(schema):
        return []
    try:
        return _text_branches_here(schema, root, dropped, walk)
    finally:
        walk.leave()


def _text_branches_here(
    schema: Mapping[str, Any], root: object, dropped: list[tuple[str, str]], walk: Alternatives
) -> Branches:
    texts = enum_texts(schema)
    if texts is not None:
        return [(texts, [])] if texts else []
    own = _expressions(schema, dropped)
    dropped.extend((word, "bare text cannot be held to it") for word in ("not", "if") if word in schema)
    members = schema.get("allOf")
    for member in members if isinstance(members, list) else ():
        parts = _text_branches(member, root, dropped, walk)
        if len(parts) != 1:
            dropped.append(("allOf", "bare text cannot be held to alternatives in it"))
        elif parts[0][0] is not None:
            return [(parts[0][0], own)]
        else:
            own += parts[0][1]
    branches = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), None)
    if branches is None:
        return [(None, own)]
    found: Branches = []
    for branch in branches:
        if walk.shape(branch, root).maybe_text:
            found += [(texts, own + more) for texts, more in _text_branches(branch, root, dropped, walk)]
    return found


def _expressions(schema: Mapping[str, Any], dropped: list[tuple[str, str]]) -> list[str]:
    found: list[str] = []
    low, high = schema.get("minLength"), schema.get("maxLength")
    if isinstance(high, int) and high > LONGEST_BOUND:
        dropped.append(("maxLength", f"in bare text up to {LONGEST_BOUND} is held"))
        high = None
    if (isinstance(low, int) and low > 0) or isinstance(high, int):
        found.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    for keyword in ("pattern", "format"):
        value = schema.get(keyword)
        if not isinstance(value, str):
            continue
        try:
            expression = formats.PATTERNS.get(value, "") if keyword == "format" else patterns.translate(value)
        except patterns.PatternError as error:
            dropped.append((keyword, error.why))
            continue
        whole = whole_match(expression) if expression else ""
        if whole:
            found.append(whole)
        else:
            dropped.append((keyword, "bare text cannot be held to it"))
    return found


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


def without(tag: str) -> str:
    """A regex for any text that does not contain `tag`, whose first character stands in it once.

    Written out along the tag, without a complement: the grammar engine would have to prove that the complement and a bounded
    length leave nothing, and gives up.
    """
    first = regex(tag[0])
    after = ""
    for char in reversed(tag[1:]):
        step = f"[^{first}{regex(char)}][^{first}]*"
        after = f"(?:{step}|{regex(char)}{after})?" if after else f"(?:{step})?"
    return f"/[^{first}]*(?:{first}{after})*/"


@lru_cache(maxsize=4096)
def regex(text: str) -> str:
    """A literal as part of a Lark regex."""
    return text if _WORD.fullmatch(text) else patterns.literal(text)


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
