"""A small GGUF writer for tests, and the meaning of its blocks in plain numpy."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

_ALIGN = 32
_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_KINDS = {"F32": _F32, "F16": _F16, "Q4_1": _Q4_1, "Q8_0": _Q8_0}


def q4_1(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random Q4_1 blocks of 32 weights (scale, minimum, 16 bytes of nibbles) and the float32 weights they mean."""
    data, weights = b"", []
    for _ in range(rows * columns // 32):
        scale, minimum = np.float16(rng.uniform(0.001, 0.1)), np.float16(rng.uniform(-1, 0))
        codes = rng.integers(0, 16, 32, dtype=np.uint8)
        data += scale.tobytes() + minimum.tobytes() + (codes[:16] | codes[16:] << 4).tobytes()
        weights.append(np.float32(scale) * codes.astype(np.float32) + np.float32(minimum))
    return data, np.concatenate(weights).reshape(rows, columns)


def q8_0(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random Q8_0 blocks (scale, 32 signed bytes) and the float32 weights they mean."""
    data, weights = b"", []
    for _ in range(rows * columns // 32):
        scale = np.float16(rng.uniform(0.001, 0.01))
        codes = rng.integers(-128, 128, 32, dtype=np.int8)
        data += scale.tobytes() + codes.tobytes()
        weights.append(np.float32(scale) * codes.astype(np.float32))
    return data, np.concatenate(weights).reshape(rows, columns)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A metadata value with its type code: bool 7, uint32 4, float32 6, string 8, array 9."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write a GGUF file; a tensor is (kind, shape with the outer dimension first, its bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", _KINDS[kind], len(body))
        body += data + b"\0" * (-len(data) % _ALIGN)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGN) + body)
