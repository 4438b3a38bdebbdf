"""Server-sent event frames."""

from __future__ import annotations

import json
from typing import Any

_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that JSON leaves as they are and that several clients' line readers (`str.splitlines`) take for a line end."""


def json_text(value: Any) -> str:
    """Compact JSON that stays on one line for every client, without other escapes than it needs."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_ENDS)


def data_frame(value: Any) -> str:
    """A `data:` frame with `value` as JSON."""
    return f"data: {json_text(value)}\n\n"


def comment_frame(text: str) -> str:
    """A comment frame, which clients ignore; line ends in `text` become spaces."""
    return f": {' '.join(text.splitlines())}\n\n"
