"""What is said of a request that is not held to all that it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.core.notices import header_text, headers, ignored_fields, log_lines, not_enforced, skipped


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"top_p": 0.5, "seed": 7}, ["top_p", "seed"]),
        ({"top_p": 1, "seed": None, "repetition_penalty": 1.0}, []),
        ({"seed": 0}, ["seed"]),
        ({"min_p": 0.1, "verbosity": "low"}, ["min_p", "verbosity"]),
        ({"text": {"verbosity": "high"}}, ["text.verbosity"]),
        ({"store": True, "metadata": {"a": 1}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k"}, []),
        ([], []),
    ],
)
def test_fields_that_are_ignored(body: Any, ignored: list[str]) -> None:
    assert [notice.what for notice in ignored_fields(body)] == ignored


def test_what_stands_where() -> None:
    notices = [
        *ignored_fields({"top_p": 0.5}),
        *skipped(["tools of type 'x' are skipped", "tools of type 'x' are skipped"]),
        *not_enforced(["pattern at #/pattern", "not at #/not"], ["tool 't': not enforced"]),
    ]
    assert headers(notices) == {"x-pooled-ignored": "top_p", "x-pooled-unenforced": "pattern at #/pattern, not at #/not"}
    assert log_lines(notices) == [
        "top_p has no influence here and is ignored",
        "tools of type 'x' are skipped",
        "tool 't': not enforced",
    ]
    assert headers([]) == {}


def test_a_header_is_short_printable_ascii() -> None:
    assert header_text("a\r\nb\u00e9") == "a  b\\xe9"
    assert len(header_text("x" * 5000)) == 2000
