"""The app's icon, drawn here: a stem that branches, as the caches of conversations with one beginning do."""

from __future__ import annotations

import struct
import zlib

SIZES = ((b"ic07", 128), (b"ic08", 256))
"""Types of an icns file that hold a PNG, and their edges in pixels."""
_BACKGROUND, _LINE = (24, 34, 52), (122, 206, 255)
_BARS = ((0.20, 0.26, 0.80, 0.36), (0.20, 0.45, 0.62, 0.55), (0.20, 0.64, 0.44, 0.74), (0.20, 0.26, 0.30, 0.74))
"""Left, top, right, bottom as shares of the edge."""


def icns() -> bytes:
    """The icon as an icns file."""
    parts = [(kind, png(edge)) for kind, edge in SIZES]
    body = b"".join(kind + struct.pack(">I", len(data) + 8) + data for kind, data in parts)
    return b"icns" + struct.pack(">I", len(body) + 8) + body


def png(edge: int) -> bytes:
    """The icon as a square PNG with transparent corners, `edge` pixels wide."""
    rows = bytearray()
    for row in range(edge):
        rows.append(0)  # this line is not filtered
        for column in range(edge):
            rows += _pixel((column + 0.5) / edge, (row + 0.5) / edge)
    header = struct.pack(">IIBBBBB", edge, edge, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _pixel(x: float, y: float) -> bytes:
    if any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in _BARS):
        return bytes((*_LINE, 255))
    margin, radius = 0.08, 0.2
    dx = max(margin + radius - x, x - (1 - margin - radius), 0.0)
    dy = max(margin + radius - y, y - (1 - margin - radius), 0.0)
    return bytes((*_BACKGROUND, 255)) if dx * dx + dy * dy <= radius * radius else bytes(4)
