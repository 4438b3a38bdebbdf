"""`pooled-mlx bench`: the speed of the running server, as a client sees it."""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from pooled_mlx.cli.common import Refused, plainly, table
from pooled_mlx.mac.address import AddressError, add_address_options, server_from
from pooled_mlx.mac.places import places

_WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima", "mike")
_TIMEOUT_SECONDS = 600.0

DESCRIPTION = """\
Measures the server that runs on this machine: time to the first token of a new prompt (cold) and of the next turn of the same
conversation (warm), the rate of one stream and of several at once. Every number is a median over --repeat runs.
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed answer, in seconds from the sending of the request; counts are the server's own."""

    first_token: float
    end: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return (self.completion_tokens - 1) / (self.end - self.first_token) if self.end > self.first_token else 0.0


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the running server",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address_options(parser)
    parser.add_argument("--prompt-words", type=int, default=1000, metavar="N", help="length of the cold prompt [default 1000]")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of each answer [default 128]")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="streams at once [default 4]")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each measurement [default 3]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


@plainly
def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises `Refused` when there is no ready server."""
    try:
        server = server_from(args, places())
    except AddressError as error:
        raise Refused(str(error)) from error
    facts = server.health()
    if not facts.ready:
        raise Refused(f"no ready server at {server.base_url}: {facts.reason or facts.state}. Start one: pooled-mlx serve")
    client = Client(server.base_url, server.token)
    rows = measure(client, args.prompt_words, args.tokens, args.streams, args.repeat)
    if args.json:
        print(json.dumps({"model": facts.model_id, "rows": [{"what": what, "value": value} for what, value in rows]}, indent=1))
    else:
        print(f"{facts.model_label} at {server.base_url}\n")
        print(table([(what, value) for what, value in rows], ("MEASURED", "VALUE")))
    return 0


def measure(client: Client, prompt_words: int, tokens: int, streams: int, repeat: int) -> list[tuple[str, str]]:
    """All measurements as (what, value with unit)."""
    client.ask([_user("Say hello.")], 8)
    cold, warm = [], []
    for number in range(repeat):
        messages = [_user(_text(prompt_words, number))]
        cold.append(client.ask(messages, tokens))
        messages += [{"role": "assistant", "content": client.last_text}, _user(_text(40, 1000 + number))]
        warm.append(client.ask(messages, tokens))
    together = [_at_once(client, streams, tokens, number) for number in range(repeat)]
    one = statistics.median(timing.rate for timing in cold)
    rows = [
        ("cold prompt", f"{cold[-1].prompt_tokens} tokens"),
        ("cold: time to first token", f"{statistics.median(t.first_token for t in cold):.3f} s"),
        ("warm turn", f"{warm[-1].prompt_tokens} tokens, {warm[-1].cached_tokens} of them reused"),
        ("warm: time to first token", f"{statistics.median(t.first_token for t in warm):.3f} s"),
        ("one stream", f"{one:.1f} tokens/s"),
        (f"{streams} streams together", f"{statistics.median(together):.1f} tokens/s"),
    ]
    if one:
        rows.append((f"{streams} streams / one", f"{statistics.median(together) / one:.2f}"))
    return rows


def _at_once(client: Client, streams: int, tokens: int, number: int) -> float:
    """Tokens a second of several streams together, prompts included."""
    done: list[Timing] = []
    failed: list[Exception] = []

    def one(index: int) -> None:
        try:
            done.append(client.ask([_user(_text(20, 10_000 + 100 * number + index))], tokens))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(timing.completion_tokens for timing in done) / (time.perf_counter() - began)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _text(words: int, number: int) -> str:
    """A prompt of its own for each `number`, so that nothing of it is in the pool."""
    body = " ".join(_WORDS[(index * (number + 7) + index // 16) % len(_WORDS)] for index in range(words))
    return f"{number}: continue this list of words without end. {body}"


class Client:
    """Streams chat completions. May be used by several threads at once; `last_text` is the last answer."""

    def __init__(self, base_url: str, token: str | None) -> None:
        url = urlsplit(base_url)
        self._host, self._port = url.hostname or "127.0.0.1", url.port or 80
        self._headers = {"Content-Type": "application/json", "User-Agent": "pooled-mlx-bench/1"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self.last_text = ""

    def ask(self, messages: Sequence[dict[str, str]], tokens: int) -> Timing:
        """One greedy streamed answer. Raises `Refused` for what the server refuses or breaks off."""
        body = {
            "messages": list(messages),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = HTTPConnection(self._host, self._port, timeout=_TIMEOUT_SECONDS)
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(f"the server answered {answer.status}: {answer.read(500).decode('utf-8', 'replace')}")
            return self._read(answer, began)
        except (OSError, HTTPException) as error:
            raise Refused(f"the connection to {self._host}:{self._port} broke: {error}") from error
        finally:
            connection.close()

    def _read(self, answer: Any, began: float) -> Timing:
        first, usage, text = 0.0, None, ""
        for raw in answer:
            line = raw.decode("utf-8").strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                break
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise Refused(f"the answer broke off: {chunk['error'].get('message')}")
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                if piece and not first:
                    first = time.perf_counter() - began
                text += piece
            usage = chunk.get("usage") or usage
        end = time.perf_counter() - began
        if usage is None:
            raise Refused("the stream ended without its usage chunk")
        self.last_text = text
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Timing(first or end, end, usage["prompt_tokens"], cached, usage["completion_tokens"])
