"""Tags of which a part is a token of its own, as DeepSeek's `<｜DSML｜invoke` and MiniMax's `]<]minimax[>[<invoke`.

The token stands in the parser's text as a character that no decoded text holds: what the model spells is told from it, and all
else sees whole tags in one text.
"""

from __future__ import annotations

from pooled_mlx.text.answer_stream import AnswerParser
from pooled_mlx.text.event_writer import EventWriter

STAND_IN = "\udcff"
"""Half of a surrogate pair. Decoding gives U+FFFD for such bytes, so this is always the token."""


class MarkedParser:
    """Hands on an answer to `parser`, `mark` as `STAND_IN`. What the parser writes has the mark again."""

    def __init__(self, parser: AnswerParser, writer: EventWriter, mark: str) -> None:
        self._parser = parser
        self._mark = mark
        writer.stand_ins[STAND_IN] = mark

    @property
    def in_reasoning(self) -> bool:
        """True while what comes next is thinking."""
        return self._parser.in_reasoning

    def text(self, text: str) -> None:
        """Ordinary text."""
        self._parser.text(text)

    def tag(self, name: str) -> None:
        """A tag as a token of its own."""
        if name == self._mark:
            self._parser.text(STAND_IN)
        else:
            self._parser.tag(name)

    def finish(self, cut: bool) -> None:
        """The answer is over."""
        self._parser.finish(cut)
