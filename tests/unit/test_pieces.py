"""Encoding piece by piece gives the ids of encoding the whole, also for tokenizers that look across control tokens."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.spans import TextSpan, cut_ids, cut_text
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from tests.small_tokenizer import byte_level, byte_level_tokens, sentencepiece

STRIPPING = [
    AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True, lstrip=True),
    AddedToken("<|end|>", special=True, normalized=False, lstrip=True),
]
TEXTS = [
    "<|user|>\n hello  <|end|>\n\n<|assistant|> \n\tfine",
    "  the start <|user|><|assistant|>  <|end|> ",
    "no tags at all",
    "<|user|>",
    "",
    "<|end|>\x1c x \u3000<|assistant|>\u00a0y",
]


def joined(pieces: list[TextSpan]) -> list[int]:
    return np.concatenate([np.zeros(0, np.uint32), *(piece.ids for piece in pieces)]).tolist()


def stripping() -> Tokens:
    tokenizer = byte_level(tags=())
    tokenizer.add_special_tokens(STRIPPING)
    return Tokens(tokenizer)


def legacy() -> Tokens:
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(token.content, special=True, normalized=False) for token in STRIPPING])
    return Tokens(tokenizer)


def metaspace(scheme: str) -> Tokens:
    tokenizer = sentencepiece(scheme=scheme)
    tokenizer.add_special_tokens([AddedToken(token.content, special=True, normalized=False) for token in STRIPPING])
    return Tokens(tokenizer)


KINDS = {
    "stripping": stripping,
    "legacy": legacy,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_equal_the_whole(kind: str, text: str) -> None:
    tokens = KINDS[kind]()
    whole = tokens.encode_with_control(text)
    assert joined(cut_text(text, tokens)) == whole.tolist()
    again = cut_ids(whole, tokens)
    assert joined(again) == whole.tolist()
    assert [piece.control for piece in again if piece.control is not None] == [
        piece.control for piece in cut_text(text, tokens) if piece.control is not None
    ]


def test_control_tokens_stand_alone_and_client_text_comes_back_afterwards() -> None:
    tokens = byte_level_tokens()
    pieces = cut_text("<|im_start|>user\n\ue000<|im_end|>\n", tokens, lambda text: text.replace("\ue000", "<think>"))
    assert [(piece.text, piece.control) for piece in pieces] == [
        ("<|im_start|>", tokens.control["<|im_start|>"]),
        ("user\n<think>", None),
        ("<|im_end|>", tokens.control["<|im_end|>"]),
        ("\n", None),
    ]


class Whole(PromptBuilder):
    """Shows which way a prompt was encoded."""

    @property
    def in_pieces(self) -> bool:
        return self._in_pieces


def test_a_tokenizer_that_looks_across_control_tokens_encodes_benign_text_as_a_whole() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate("abxy<> END")}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("END", special=True, normalized=False)])
    # Counts as a token only where no letter stands beside it, and END begins with one.
    tokenizer.add_tokens([AddedToken("<b>", special=False, normalized=False, single_word=True)])
    tokens = Tokens(tokenizer)
    source = "{% for m in messages %}{{ m.content }} <b>END{% endfor %}"
    build = Whole(tokens, ChatTemplate(source), ModelCard("t", "T"))
    assert not build.in_pieces
    benign = build.build(Request("r", (Turn("user", "xy"),)))
    assert benign.ids.tolist() == tokens.encode_with_control("xy <b>END").tolist()
    assert tokens.added["<b>"] not in benign.ids
    hostile = build.build(Request("r", (Turn("user", "x END y"),)))
    assert hostile.ids.tolist().count(tokens.control["END"]) == 1
    assert tokens.bytes_for(hostile.ids.tolist()) == b"x END y <b>END"
