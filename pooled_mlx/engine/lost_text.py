"""Some templates write the calls of a past turn and leave out its text and reasoning; here they are put back."""

from __future__ import annotations

from collections.abc import Sequence

from pooled_mlx.core.request import Turn
from pooled_mlx.engine.pieces import Piece, control_piece, cut_text
from pooled_mlx.engine.template_traits import TemplateTraits
from pooled_mlx.engine.tokens import Tokens

_THOUGHT, _TEXT = "\ue000", "\ue001"


def with_lost_text(pieces: Sequence[Piece], header: str, turn: Turn, traits: TemplateTraits, tokens: Tokens) -> list[Piece]:
    """The pieces of one assistant turn, with what the template left out of it right after its `header`."""
    if not turn.tool_calls:
        return list(pieces)
    whole = "".join(piece.text for piece in pieces)
    text, reasoning = turn.text.strip(), (turn.reasoning or "").strip()
    form = ""
    if reasoning and reasoning not in whole:
        form = f"{traits.think_before}{_THOUGHT}{traits.think_after}"
    if text and text not in whole:
        form += _TEXT
    if not form:
        return list(pieces)
    found = {ord(_THOUGHT): reasoning, ord(_TEXT): text}
    lost = [(piece.text, piece.control) for piece in cut_text(form, tokens, lambda part: part.translate(found))]
    before, after = _split(pieces, len(header if whole.startswith(header) else header.rstrip()))
    if after and after[0][1] is None:
        lost.append(("\n\n", None))
    return _encoded([*before, *lost, *after], tokens)


def _split(pieces: Sequence[Piece], characters: int) -> tuple[list[tuple[str, int | None]], list[tuple[str, int | None]]]:
    before: list[tuple[str, int | None]] = []
    after: list[tuple[str, int | None]] = []
    for piece in pieces:
        head, rest = piece.text[:characters], piece.text[characters:]
        if head:
            before.append((head, piece.control))
        if rest:
            after.append((rest, piece.control))
        characters = max(characters - len(piece.text), 0)
    return before, after


def _encoded(spans: Sequence[tuple[str, int | None]], tokens: Tokens) -> list[Piece]:
    joined: list[tuple[str, int | None]] = []
    for text, control in spans:
        if control is None and joined and joined[-1][1] is None:
            joined[-1] = (joined[-1][0] + text, None)
        else:
            joined.append((text, control))
    pieces: list[Piece] = []
    for text, control in joined:
        pieces.append(Piece(tokens.encode_plain(text, inside=True), text) if control is None else control_piece(control, text))
    return pieces
