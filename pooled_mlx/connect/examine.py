"""Replays the request shapes of each agent against a running server and says what holds."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pooled_mlx.connect.shapes import Body, Reply, Shape, all_shapes

_SILENCE_SECONDS = 120
_REUSED = 0.8
"""The share of the first prompt that the second turn must find in the cache."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one agent. `holds` False: the agent would have trouble here; `detail` says what was seen."""

    agent: str
    what: str
    holds: bool
    detail: str


class _Refused(Exception):
    pass


def check_agents(base_url: str, token: str | None = None, shapes: list[Shape] | None = None) -> Iterator[Finding]:
    """Two turns and the side request of each agent. Takes as long as the model needs to read the prompts."""
    for shape in all_shapes() if shapes is None else shapes:
        try:
            yield from _check(shape, base_url, token)
        except _Refused as refused:
            yield Finding(shape.agent, "answers", False, str(refused))
        except (OSError, http.client.HTTPException) as error:
            yield Finding(shape.agent, "answers", False, f"the connection broke: {error or type(error).__name__}")


def _check(shape: Shape, base_url: str, token: str | None) -> Iterator[Finding]:
    first = _post(base_url, shape.path, shape.first, token)
    if shape.aside is not None:
        _post(base_url, shape.path, shape.aside, token)
    second = _post(base_url, shape.path, shape.second(shape.first, first), token)
    aside = ", its side request too" if shape.aside is not None else ""
    yield Finding(shape.agent, "answers", True, f"two turns{aside}")
    counted = first.prompt_tokens > 0 and second.prompt_tokens > first.prompt_tokens
    yield Finding(shape.agent, "counts", counted, f"prompts of {first.prompt_tokens} and {second.prompt_tokens} tokens")
    share = second.cached_tokens / max(first.prompt_tokens, 1)
    read = second.prompt_tokens - second.cached_tokens
    detail = f"{second.cached_tokens} of {second.prompt_tokens} tokens of the second turn reused, {read} read"
    yield Finding(shape.agent, "stays warm", share >= _REUSED, detail)


def _post(base_url: str, path: str, body: Body, token: str | None) -> Reply:
    """One request, its stream read to the end. Raises `_Refused` with what the server said or left out."""
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_SILENCE_SECONDS)
    headers = {"Content-Type": "application/json", "User-Agent": "pooled-doctor/1"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request("POST", f"{parts.path}{path}", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if response.status != 200:
        raise _Refused(f"{response.status} to POST {path}: {_message(text)}")
    readers = {"/v1/messages": _messages, "/v1/responses": _responses, "/v1/chat/completions": _chat}
    try:
        events = _events(text) if body.get("stream") else [json.loads(text)]
        reply = readers[path](events, bool(body.get("stream")))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _Refused(f"the answer of POST {path} could not be read ({type(error).__name__}: {error})") from None
    if reply is None:
        raise _Refused(f"the stream of POST {path} ended early: {text[-200:]!r}")
    return reply


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _events(text: str) -> list[Any]:
    """The data of all events but comments; `[DONE]` is None."""
    found: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line[len("data: ") :]
            found.append(None if data == "[DONE]" else json.loads(data))
    return found


def _chat(events: list[Any], stream: bool) -> Reply | None:
    if stream and (not events or events[-1] is not None):
        return None
    text, usage = "", None
    for event in filter(None, events):
        for choice in event["choices"]:
            text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        usage = event.get("usage") or usage
    if usage is None:
        return None
    return Reply(text, [], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def _responses(events: list[Any], stream: bool) -> Reply | None:
    final = events[-1]
    if stream:
        if final["type"] not in ("response.completed", "response.incomplete"):
            return None
        final = final["response"]
    usage = final["usage"]
    items = [item for item in final["output"] if item["type"] != "function_call"]
    return Reply("", items, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def _messages(events: list[Any], stream: bool) -> Reply | None:
    if not stream or events[-1]["type"] != "message_stop":
        return None
    blocks: list[Body] = []
    usage: Body = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    blocks[event["index"]][name] += delta[name]
        usage = event.get("usage") or usage
    kept = [block for block in blocks if block["type"] != "tool_use" and (block.get("text") or block.get("signature"))]
    cached = usage["cache_read_input_tokens"]
    return Reply("", kept, usage["input_tokens"] + cached, cached)
