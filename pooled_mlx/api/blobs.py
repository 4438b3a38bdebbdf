"""The `pooled1.` blob: the exact reasoning of a turn in a string that clients keep and send back.

It is `encrypted_content` on Responses and `signature` on Messages: base64url of the zlib-compressed UTF-8 text followed by
the SHA-256 of that text. There is no key, so blobs survive restarts and need no storage here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib

PREFIX = "pooled1."
UNREADABLE = "a reasoning blob in the history was not written by this server or is damaged; it is ignored"
"""The warning for a blob that `decode_blob` refuses."""

_DIGEST_BYTES = 32
_MAX_BYTES = 16 << 20


def encode_blob(reasoning: str) -> str:
    """The blob that `decode_blob` turns back into `reasoning`, which must hold no lone surrogate."""
    raw = reasoning.encode()
    packed = zlib.compress(raw) + hashlib.sha256(raw).digest()
    return PREFIX + base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def decode_blob(blob: str) -> str | None:
    """The exact reasoning in `blob`, None when it is foreign, damaged or would unpack to more than 16 MiB."""
    if not blob.startswith(PREFIX):
        return None
    text = blob[len(PREFIX) :]
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(packed[:-_DIGEST_BYTES], _MAX_BYTES)
        whole = unpacker.eof and not unpacker.unused_data
        if not whole or not hmac.compare_digest(hashlib.sha256(raw).digest(), packed[-_DIGEST_BYTES:]):
            return None
        return raw.decode()
    except (binascii.Error, zlib.error, ValueError):
        return None
