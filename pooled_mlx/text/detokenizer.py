"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs

from pooled_mlx.text.tokens import TokenTable

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes a token stream incrementally.

    The pieces join to exactly the UTF-8 decoding of all bytes, invalid ones replaced by U+FFFD. A character that is split
    over tokens comes out whole, with its last token.
    """

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, table: TokenTable) -> None:
        self._bytes_of = table.bytes_of
        self._decoder = _utf8("replace")

    def add(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished. Raises IndexError for an unknown id."""
        return self._decoder.decode(self._bytes_of[token])

    def end(self) -> str:
        """What an unfinished character leaves: "" or one U+FFFD. The next token starts afresh."""
        tail = self._decoder.decode(b"", True)
        self._decoder.reset()
        return tail
