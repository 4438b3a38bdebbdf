"""A rendered prompt as pieces: each control token of the template alone, and the text between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pooled_mlx.prompt.exact_ids import Ids
from pooled_mlx.prompt.tokens import Tokens

_BLANKS_LEFT = re.compile(r"[^\S\x1c-\x1f]+$")
_BLANKS_RIGHT = re.compile(r"^[^\S\x1c-\x1f]+")


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Ids [tokens] and their text. `control` is the id of a control token, None for plain text."""

    ids: Ids
    text: str
    control: int | None = None


def cut_text(rendered: str, tokens: Tokens, show: Callable[[str], str] | None = None) -> list[TextSpan]:
    """Encode rendered text piece by piece. `show` turns stand-ins into client text once the control tokens are found."""
    spans: list[tuple[str, int | None]] = []
    place = 0
    for match in tokens.control_pattern.finditer(rendered):
        spans.append((rendered[place : match.start()], None))
        spans.append((match[0], tokens.control[match[0]]))
        place = match.end()
    spans.append((rendered[place:], None))
    if tokens.strips_left or tokens.strips_right:
        spans = _stripped(spans, tokens)
    texts = [show(text) if show else text for text, control in spans if control is None]
    encoded = iter([tokens.encode_plain(texts[0]), *tokens.encode_pieces(texts[1:])] if texts else [])
    shown = iter(texts)
    pieces: list[TextSpan] = []
    for text, control in spans:
        if control is not None:
            pieces.append(control_span(control, text))
            continue
        ids, text = next(encoded), next(shown)
        if text:
            pieces.append(TextSpan(ids, text))
    return pieces


def cut_ids(ids: Ids, tokens: Tokens) -> list[TextSpan]:
    """Cut encoded trusted text at its control tokens."""
    pieces: list[TextSpan] = []
    start = 0
    marks = np.flatnonzero(np.isin(ids, np.fromiter(tokens.control_ids, dtype=np.uint32)))
    for mark in [*marks.tolist(), len(ids)]:
        if mark > start:
            part = ids[start:mark]
            pieces.append(TextSpan(part, tokens.bytes_for(part.tolist()).decode("utf-8", "replace")))
        if mark < len(ids):
            control = int(ids[mark])
            pieces.append(TextSpan(ids[mark : mark + 1], tokens.text_of(control), control))
        start = mark + 1
    return pieces


def control_span(control: int, text: str) -> TextSpan:
    """A control token alone."""
    return TextSpan(np.array([control], dtype=np.uint32), text, control)


def _stripped(spans: list[tuple[str, int | None]], tokens: Tokens) -> list[tuple[str, int | None]]:
    """Some added tokens swallow the blanks beside them."""
    result = list(spans)
    for place, (text, control) in enumerate(spans):
        if control is None:
            continue
        if text in tokens.strips_left:
            result[place - 1] = (_BLANKS_LEFT.sub("", result[place - 1][0]), None)
        if text in tokens.strips_right:
            result[place + 1] = (_BLANKS_RIGHT.sub("", result[place + 1][0]), None)
    return result
