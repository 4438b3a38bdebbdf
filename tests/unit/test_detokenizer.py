from __future__ import annotations

import pytest

from pooled_mlx.text.detokenizer import Detokenizer
from tests.answers import byte_table


def pieces_of(data: bytes) -> list[str]:
    detokenizer = Detokenizer(byte_table())
    return [detokenizer.add(byte) for byte in data] + [detokenizer.end()]


@pytest.mark.parametrize(
    "text",
    [
        "ďábelské 👩‍👩‍👧 你好",
        "  leading spaces kept",
        "tab\tand\r\nCRLF",
        "\x00nul",
        "🇫🇷🇯🇵",
        "�a real replacement character",
        "é combining",
    ],
)
def test_st01_characters_split_over_tokens_come_out_whole(text: str) -> None:
    pieces = pieces_of(text.encode())
    assert "".join(pieces) == text
    assert all(piece == "" or not piece.startswith("�") for piece in pieces) or "�" in text


def test_st01_an_end_inside_a_character_gives_one_replacement() -> None:
    assert "".join(pieces_of("a🙂".encode()[:-1])) == "a�"


def test_invalid_bytes_are_replaced_and_the_rest_stays() -> None:
    data = b"ab\xf0 cd\xff\xc3"
    assert "".join(pieces_of(data)) == data.decode("utf-8", "replace")


def test_the_decoder_starts_afresh_after_an_end() -> None:
    detokenizer = Detokenizer(byte_table())
    assert detokenizer.add("é".encode()[0]) == ""
    assert detokenizer.end() == "�"
    assert detokenizer.add(ord("x")) == "x"


def test_an_unknown_id_is_an_error() -> None:
    with pytest.raises(IndexError):
        Detokenizer(byte_table()).add(10_000)
