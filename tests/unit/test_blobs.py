"""The reasoning blob: exact both ways, and silent about nothing."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooled_mlx.api.blobs import PREFIX, decode_blob, encode_blob

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)


@given(TEXTS)
def test_round_trip_is_exact(text: str) -> None:
    blob = encode_blob(text)
    assert blob.startswith(PREFIX)
    assert decode_blob(blob) == text


@given(TEXTS, st.data())
def test_a_changed_character_is_noticed(text: str, data: st.DataObject) -> None:
    blob = encode_blob(text)
    place = data.draw(st.integers(len(PREFIX), len(blob) - 1))
    letter = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_*"))
    changed = blob[:place] + letter + blob[place + 1 :]
    # The last letter of base64 may carry bits that no byte uses: such a change alters nothing.
    assert decode_blob(changed) in (None, text)


@pytest.mark.parametrize(
    "blob",
    ["", "c3R1Yg==", PREFIX, PREFIX + "!!!!", PREFIX + "AAAA", "pooled2.AAAA", encode_blob("thought")[:-4], PREFIX + "é" * 8],
)
def test_foreign_and_damaged_blobs_are_none(blob: str) -> None:
    assert decode_blob(blob) is None


def test_a_wrong_digest_is_refused() -> None:
    packed = zlib.compress(b"other") + hashlib.sha256(b"thought").digest()
    assert decode_blob(PREFIX + base64.urlsafe_b64encode(packed).decode()) is None


def test_a_blob_that_unpacks_to_too_much_is_refused() -> None:
    raw = b"\0" * (17 << 20)
    packed = zlib.compress(raw, 9) + hashlib.sha256(raw).digest()
    assert decode_blob(PREFIX + base64.urlsafe_b64encode(packed).decode()) is None


def test_bytes_behind_the_compressed_text_are_refused() -> None:
    packed = zlib.compress(b"thought") + b"more" + hashlib.sha256(b"thought").digest()
    assert decode_blob(PREFIX + base64.urlsafe_b64encode(packed).decode()) is None
