"""What a client is told that its request is not held to. The one place that decides what is said of it, and where.

| kind | what | log, once for each client | header of the answer, streamed too |
|---|---|---|---|
| ignored | a known field that has no influence here | yes | `x-pooled-ignored` |
| unenforced | a keyword of a response format | no: the header names it to whom it concerns | `x-pooled-unenforced` |
| tool | a tool whose schema is held in part or not at all | yes | - |
| skipped | a tool, an item or a value that means nothing here | yes | - |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

NoticeKind = Literal["ignored", "unenforced", "tool", "skipped"]

HEADERS: Mapping[NoticeKind, str] = {"ignored": "x-pooled-ignored", "unenforced": "x-pooled-unenforced"}
LOGGED: frozenset[NoticeKind] = frozenset({"ignored", "tool", "skipped"})

IGNORED: Mapping[str, object] = {
    "top_p": 1,
    "seed": None,
    "min_p": 0,
    "top_a": 0,
    "typical_p": 1,
    "repetition_penalty": 1,
    "best_of": 1,
    "verbosity": None,
    "modalities": ["text"],
}
"""Fields of a body that ask for another answer and do not get it -> the value with which they ask for nothing, null aside.

They are ignored and not refused because clients send them whatever their user wants. What merely labels a request (`user`,
`metadata`, `store`, `service_tier`, `prompt_cache_key`) asks for nothing.
"""

_HEADER_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing: `what` is its short name, ASCII, for a header; `text` a sentence for the log."""

    kind: NoticeKind
    what: str
    text: str


def ignored_fields(body: Any) -> list[Notice]:
    """Notices of the fields of a decoded body that are ignored, whatever API it is for."""
    if not isinstance(body, dict):
        return []
    values = cast("dict[str, Any]", body)
    found = [name for name, idle in IGNORED.items() if values.get(name) is not None and values[name] != idle]
    text: Any = values.get("text")
    if isinstance(text, dict) and cast("dict[str, Any]", text).get("verbosity") is not None:
        found.append("text.verbosity")
    return [Notice("ignored", name, f"{name} has no influence here and is ignored") for name in found]


def skipped(texts: Iterable[str]) -> list[Notice]:
    """Notices of what an API has skipped, in its words."""
    return [Notice("skipped", "", text) for text in texts]


def not_enforced(keywords: Iterable[str], tools: Iterable[str]) -> list[Notice]:
    """Notices of a format's keywords, and of tools (a sentence each), that no grammar holds."""
    return [*(Notice("unenforced", word, word) for word in keywords), *(Notice("tool", "", text) for text in tools)]


def headers(notices: Iterable[Notice]) -> dict[str, Any]:
    """The headers that an answer carries for these notices."""
    found: dict[str, list[str]] = {}
    for notice in notices:
        if notice.kind in HEADERS:
            found.setdefault(HEADERS[notice.kind], []).append(notice.what)
    return {name: header_text(", ".join(dict.fromkeys(what))) for name, what in found.items()}


def log_lines(notices: Iterable[Notice]) -> list[str]:
    """What the log says of these notices, each line once for a client."""
    return list(dict.fromkeys(notice.text for notice in notices if notice.kind in LOGGED))


def header_text(text: str) -> str:
    """`text` as the value of a header: printable ASCII, at most 2,000 characters."""
    printable = text.encode("ascii", "backslashreplace").decode()
    return "".join(character if character.isprintable() else " " for character in printable)[:_HEADER_CHARACTERS]
