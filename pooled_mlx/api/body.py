"""From the bytes of an HTTP body to a JSON value that is safe to walk."""

from __future__ import annotations

import json
import math
from typing import Any

from pooled_mlx.core.errors import bad_request

MAX_DEPTH = 200
"""Arrays and objects inside each other. Deeper bodies would exhaust the stack of whatever walks them later."""


def decode_json(raw: bytes) -> Any:
    """The value of a UTF-8 JSON text.

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
            return value
    raise _too_deep()


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
