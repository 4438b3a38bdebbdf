"""What each token adds to a text, in bytes: one table per vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

_BLANK = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """The characters that byte-level vocabularies write for the 256 bytes: code point -> the byte as a Latin-1 character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {256 + place: chr(byte) for place, byte in enumerate(others)}


def token_bytes(tokenizer: Tokenizer, vocabulary: Mapping[str, int], added: Mapping[str, int], size: int) -> tuple[bytes, ...]:
    """The bytes of the ids 0..size-1; b"" for ids that nothing has. Added tokens are their own text."""
    kinds = _decoder_kinds(tokenizer)
    table = [b""] * size
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        for text, index in vocabulary.items():
            try:
                table[index] = text.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:
                table[index] = text.encode()
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        for text, index in vocabulary.items():
            byte = _BYTE.fullmatch(text) if len(text) == 6 else None
            table[index] = bytes([int(byte[1], 16)]) if byte else text.replace(_BLANK, " ").encode()
    else:
        for index in vocabulary.values():
            table[index] = tokenizer.decode([index], skip_special_tokens=False).encode()
    for text, index in added.items():
        table[index] = text.replace(_BLANK, " ").encode() if not text.strip(_BLANK) else text.encode()
    return tuple(table)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder: Any = tokenizer.decoder
    waiting = [json.loads(decoder.__getstate__())] if decoder is not None else []
    kinds: set[str] = set()
    while waiting:
        part = waiting.pop()
        kinds.add(part["type"])
        waiting.extend(part.get("decoders") or ())
    return kinds
