"""Whether the texts of a client's own grammar can be followed by the tag that closes them."""

from __future__ import annotations

from random import Random

import numpy as np

from pooled_mlx.grammar import isolated
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import CompiledGrammar, GrammarFailed, GrammarRefused, GrammarTokenizer, build

_TEXTS = 6
_MOST_BYTES = 2000


def runs_on(definition: str, tag: str) -> bool:
    """True when a text of the Lark grammar `definition` cannot be followed by the closing `tag`.

    The engine reads the longest piece that a terminal allows and never goes back: `/.+/s` takes the tag for content, and an
    answer under it could not end. Some texts are tried, so False is no proof. A definition that the engine refuses gives
    False: it is refused and named where the whole grammar is compiled.
    """
    inner = f"%lark {{\n{definition}\n}}"
    alone, closed = (f"%llguidance {{}}\nstart: {body}\n" for body in (inner, f"{inner} {LarkBuilder.text(tag)}"))
    if isolated.check(alone) or isolated.check(closed):
        return False
    tokenizer = GrammarTokenizer.of_bytes()
    try:
        texts, whole = build(tokenizer, alone), build(tokenizer, closed)
        said = [text for seed in range(_TEXTS) if (text := _text(texts, tokenizer, Random(seed))) is not None]
    except (GrammarRefused, GrammarFailed):
        return False
    return not all(_takes(whole, [*text, *tag.encode()]) for text in said)


def _text(grammar: CompiledGrammar, tokenizer: GrammarTokenizer, random: Random) -> list[int] | None:
    """The bytes of a random text, as short as its grammar lets it be; None where it comes to no end."""
    held = grammar.matcher()
    mask = np.zeros(tokenizer.mask_words, np.uint32)
    said: list[int] = []
    for _ in range(_MOST_BYTES):
        if said and held.may_end():
            return said
        held.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256])
        if not len(allowed):
            return said
        said.append(int(random.choice(allowed)))
        held.consume(said[-1])
    return None


def _takes(grammar: CompiledGrammar, text: list[int]) -> bool:
    held = grammar.matcher()
    try:
        for byte in text:
            held.consume(byte)
        return held.may_end()
    except GrammarFailed:
        return False
