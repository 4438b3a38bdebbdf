"""What the output side must know of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The vocabulary, seen from its bytes.

    `bytes_of[id]` is what a token adds to the output; an added token gives its own spelling. `name_of_added` maps the ids
    of added tokens to their spelling. `eos_ids` end a turn and never show.
    """

    bytes_of: Sequence[bytes]
    name_of_added: Mapping[int, str]
    eos_ids: frozenset[int] = frozenset()
