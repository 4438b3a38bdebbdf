"""From the bytes of an HTTP body to a JSON value that is safe to walk."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pooled_mlx.core.errors import bad_request

MAX_DEPTH = 200
"""Arrays and objects inside each other. Deeper bodies would exhaust the stack of whatever walks them later."""

_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"[dD][89abAB]{_HEX}{{2}}", rf"[dD][c-fC-F]{_HEX}{{2}}"
_LONE = re.compile(rf"\\u(?:{_HIGH}(?!\\u{_LOW})|{_LOW}(?<!\\u{_HIGH}\\u{_LOW}))".encode())
"""An escaped surrogate without its other half, or what looks like one. Escaped emoji, which some clients send, are none."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` with every lone surrogate replaced by U+FFFD, so that it can be encoded; NUL and the rest stay."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def decode_json(raw: bytes) -> Any:
    """The value of a UTF-8 JSON text, lone surrogates in it replaced by U+FFFD: nothing else can be encoded again.

    Raises `ApiError` 400 for an empty body, bytes that are not UTF-8, broken JSON, NaN and infinite numbers, and nesting
    over `MAX_DEPTH`. The message gives the place, never the text. CPU work: call it in a worker thread.
    """
    if not raw.strip():
        raise bad_request("The body is empty: a JSON object is required.")
    try:
        value = json.loads(
            raw.decode("utf-8-sig"), object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8: byte {error.start} does not fit ({error.reason}).") from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} (character {error.pos})."
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return _whole_characters(value) if _LONE.search(raw) else value
    raise _too_deep()


def _whole_characters(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    return value if clean(text) is text else json.loads(clean(text))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A Python function on purpose: json's C scanner never lets go of the interpreter lock, and each call of this one is a
    # point where the event loop gets its turn while a large body is decoded in a worker.
    return dict(pairs)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep() -> Exception:
    return bad_request(f"The body is nested too deeply: at most {MAX_DEPTH} arrays and objects inside each other are allowed.")
