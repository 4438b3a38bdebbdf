"""curl: one request for each API."""

from __future__ import annotations

import json
from typing import Any

from pooled_mlx.connect.merge import shell_quote
from pooled_mlx.connect.target import Launch, Profile, Target

_QUESTION = "What is a KV cache?"


def _words(target: Target, path: str, body: dict[str, Any], *headers: str) -> tuple[str, ...]:
    sent = ["content-type: application/json", *headers]
    if target.token is not None:
        sent.append(f"authorization: Bearer {target.token}")
    options = [word for header in sent for word in ("-H", header)]
    return ("curl", f"{target.base_url}{path}", *options, "-d", json.dumps(body))


def profile(target: Target) -> Profile:
    """Nothing to install or to write: three commands."""
    messages = [{"role": "user", "content": _QUESTION}]
    chat = _words(target, "/v1/chat/completions", {"model": target.model_id, "messages": messages})
    commands = [
        chat,
        _words(target, "/v1/responses", {"model": target.model_id, "input": _QUESTION}),
        _words(
            target,
            "/v1/messages",
            {"model": target.model_id, "max_tokens": 1000, "messages": messages},
            "anthropic-version: 2023-06-01",
        ),
    ]
    return Profile(
        name="curl",
        title="curl",
        text="\n\n".join(" ".join(map(shell_quote, words)) for words in commands) + "\n",
        install="curl is part of macOS and of most Linux systems",
        launch=Launch(chat),
    )
