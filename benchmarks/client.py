"""A small streaming client of Chat Completions: when each piece of an answer came, and what the answer was."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from benchmarks.servers import Server

_TIMEOUT_SECONDS = 600.0
_PATH = "/v1/chat/completions"


@dataclass
class Stream:
    """What a client saw of one streamed answer so far; times are `time.perf_counter` seconds, one for each piece."""

    sent: float
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    @property
    def first(self) -> float:
        """When the first piece came. Raises IndexError when none did."""
        return self.times[0]

    @property
    def last(self) -> float:
        """When the last piece came."""
        return self.times[-1]

    @property
    def first_token_seconds(self) -> float:
        """Time to the first piece."""
        return self.first - self.sent

    @property
    def tokens(self) -> int:
        """The server's own count, else the number of pieces."""
        return self.usage.get("completion_tokens") or len(self.times)

    @property
    def prompt_tokens(self) -> int:
        """The server's own count."""
        return self.usage["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server did not compute again."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @property
    def rate(self) -> float:
        """Tokens a second between the first and the last piece."""
        return (self.tokens - 1) / (self.last - self.first) if len(self.times) > 1 else 0.0

    def rate_between(self, begin: float, end: float) -> float:
        """Pieces a second in a span of time."""
        return sum(1 for at in self.times if begin < at <= end) / (end - begin)

    def longest_gap(self, begin: float = 0.0, end: float = float("inf")) -> float:
        """The longest time between two pieces of which the second came within the span."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if begin < later <= end), default=0.0)

    def message(self, *, reasoning: bool = True) -> dict[str, Any]:
        """The answer as a client sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning and reasoning:
            message["reasoning_content"] = self.reasoning
        if not self.text and not self.calls:
            message["content"] = ""
        return message

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Read one chunk. Raises RuntimeError for an error chunk."""
        if "error" in chunk:
            raise RuntimeError(f"the answer broke off: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.finish = choice.get("finish_reason") or self.finish
            text = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.text += text
            self.reasoning += thought
            for part in delta.get("tool_calls") or ():
                self._call(part)
            if text or thought or delta.get("tool_calls"):
                self.times.append(now)

    def _call(self, part: dict[str, Any]) -> None:
        index = part.get("index", len(self.calls))
        while len(self.calls) <= index:
            self.calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = self.calls[index], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def body_of(server: Server, messages: Sequence[dict[str, Any]], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request, streamed unless `more` says otherwise."""
    body = {
        "model": server.model,
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    if not body["stream"]:
        del body["stream_options"]
    return body


def stream(server: Server, messages: Sequence[dict[str, Any]], tokens: int, **more: Any) -> Stream:
    """Read one streamed answer to its end. Raises RuntimeError for a refusal or an error."""
    running = Running(server, messages, tokens, **more)
    return running.wait()


class Running:
    """A streamed answer that a thread reads; `stream` grows meanwhile."""

    def __init__(self, server: Server, messages: Sequence[dict[str, Any]], tokens: int, **more: Any) -> None:
        self._body = json.dumps(body_of(server, messages, tokens, **more))
        url = urlsplit(server.url)
        self._connection = HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_SECONDS)
        self._sock: socket.socket | None = None
        self._stopped = False
        self._error: Exception | None = None
        self.stream = Stream(time.perf_counter())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.stream.sent = time.perf_counter()
            self._connection.request("POST", _PATH, self._body, {"Content-Type": "application/json"})
            assert self._connection.sock is not None
            self._sock = self._connection.sock.dup()  # the connection forgets its own one when the server will close it
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {answer.read(1000).decode('utf-8', 'replace')}")
            self._read(answer)
        except Exception as error:
            if not self._stopped:
                self._error = error
        finally:
            self._connection.close()
            if self._sock is not None:
                self._sock.close()

    def _read(self, answer: HTTPResponse) -> None:
        while line := answer.readline():
            now = time.perf_counter()
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                self.stream.take(json.loads(line[6:]), now)

    @property
    def over(self) -> bool:
        """True when the answer ended."""
        return not self._thread.is_alive()

    def wait(self) -> Stream:
        """Wait for the end. Raises what went wrong."""
        self._thread.join(_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the answer did not end within {_TIMEOUT_SECONDS:.0f} s")
        if self._error is not None:
            raise self._error
        return self.stream

    def wait_pieces(self, count: int) -> Stream:
        """Wait until `count` pieces came. Raises RuntimeError when the answer ends before."""
        while len(self.stream.times) < count:
            if self.over:
                self.wait()
                if len(self.stream.times) < count:
                    raise RuntimeError(f"the answer ended after {len(self.stream.times)} pieces, {count} were expected")
            time.sleep(0.002)
        return self.stream

    def stop(self) -> Stream:
        """Close the connection, as a client does that goes away."""
        self._stopped = True
        if self._sock is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        return self.stream
