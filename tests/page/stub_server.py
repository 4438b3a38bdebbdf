"""A small HTTP server that stands in for pooled-mlx: what it says is set by the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pooled_mlx.page import page_html
from tests.mac_fakes import health_body

WAIT_SECONDS = 60


class StubServer:
    """Facts and scripted answers.

    `chat` is what the next chat request streams: text and bytes go out as they are, an Event is waited for with keep-alive
    comments. `gone` is set when a client closed its connection before the end.
    """

    def __init__(self) -> None:
        self.health: dict[str, Any] = health_body()
        self.pool: dict[str, Any] = {}
        self.token: str | None = None
        self.chat: list[str | bytes | threading.Event] = []
        self.chat_status = 200
        self.chat_error: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.gone = threading.Event()
        self.paths: list[str] = []
        self.silent = False
        self.url = ""


def sse(value: Any) -> str:
    """One server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def delta(**fields: Any) -> str:
    """One chunk of Chat Completions."""
    return sse({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def finish(reason: str = "stop", **usage: Any) -> str:
    """The end of an answer."""
    chunks = sse({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if usage:
        chunks += sse({"id": "chatcmpl-1", "choices": [], "usage": usage})
    return chunks + sse("[DONE]")


@contextmanager
def serve(stub: StubServer) -> Iterator[StubServer]:
    """Run the server on a free port; sets `stub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        @property
        def authorized(self) -> bool:
            return stub.token is None or self.headers.get("Authorization") == f"Bearer {stub.token}"

        def answer(self, body: Any, status: int = 200, kind: str = "application/json") -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            stub.paths.append(self.path)
            if stub.silent:
                self.close_connection = True
                return
            if self.path == "/":
                self.answer(page_html(), kind="text/html; charset=utf-8")
            elif self.path == "/health":
                up = stub.health.get("ready", False)
                self.answer(stub.health if self.authorized else {"ok": up}, 200 if up else 503)
            elif not self.authorized:
                self.answer({"error": {"message": "This server has a token."}}, 401)
            elif self.path == "/pool":
                self.answer(stub.pool)
            else:
                self.answer({"error": {"message": "unknown path"}}, 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            stub.authorizations.append(self.headers.get("Authorization"))
            if not self.authorized:
                self.answer({"error": {"message": "This server has a token."}}, 401)
                return
            stub.asked.append(json.loads(body))
            if stub.chat_status != 200:
                self.answer(stub.chat_error, stub.chat_status)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for part in stub.chat:
                    if isinstance(part, threading.Event):
                        self.wait(part)
                    else:
                        self.wfile.write(part.encode() if isinstance(part, str) else part)
                        self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                stub.gone.set()

        def wait(self, event: threading.Event) -> None:
            """Wait for the test, and notice meanwhile that the client went away."""
            for _ in range(WAIT_SECONDS * 50):
                if event.wait(0.02):
                    return
                self.wfile.write(b": keep-alive\n\n")
                self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
