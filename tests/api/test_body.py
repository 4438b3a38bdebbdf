"""Bytes of a body to JSON."""

from __future__ import annotations

import json

import pytest

from pooled_mlx.api.body import MAX_DEPTH, decode_json
from pooled_mlx.core.errors import ApiError, ErrorKind


@pytest.mark.parametrize(
    "value", [{"a": [1, 2.5, None, True, "ü\x00"]}, [], "x", {"n": 10**30}, {"a": {"b": {}}, "c": [[[]]]}, {"e": 1e300}]
)
def test_json(value: object) -> None:
    assert decode_json(json.dumps(value).encode()) == value


def test_a_byte_order_mark_is_skipped() -> None:
    assert decode_json(b"\xef\xbb\xbf{}") == {}


def test_the_order_of_keys_is_kept_and_the_last_of_two_equal_ones_wins() -> None:
    assert list(decode_json(b'{"b": 1, "a": 2, "b": 3}').items()) == [("b", 3), ("a", 2)]


def test_half_a_character_becomes_the_replacement_character_in_values_and_keys() -> None:
    raw = rb'{"a\udc00": [1, "x\ud800y", {"b": "\ud83d\ude42 \uD83D"}], "c": "\\ud800"}'
    assert decode_json(raw) == {"a\ufffd": [1, "x\ufffdy", {"b": "\U0001f642 \ufffd"}], "c": "\\ud800"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  ",
        b'{"model":',
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b"{} {}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'"\xff\xfe"',
        b'{"a": "x\ny"}',
        b"\x00",
    ],
)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_json(raw)
    assert caught.value.kind is ErrorKind.BAD_REQUEST


def test_the_message_gives_the_place_and_not_the_text() -> None:
    with pytest.raises(ApiError) as caught:
        decode_json(b'{"secret words": \n oops}')
    assert "line 2, column 2" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting(opening: bytes, closing: bytes) -> None:
    def nested(depth: int) -> bytes:
        return opening * depth + b"1" + closing * depth

    assert decode_json(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 900, 5_000, 100_000):
        with pytest.raises(ApiError) as caught:
            decode_json(nested(depth))
        assert str(MAX_DEPTH) in caught.value.message
