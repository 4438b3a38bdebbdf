"""A model hub on 127.0.0.1 for tests: just enough of the HTTP API for huggingface_hub to download one repo."""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class HubStub:
    """Serves `files` as repo `name`.

    `cut_after` ends each answer of weights after that many bytes, `status` refuses everything, `spoil` sends zeros.
    """

    def __init__(self, name: str, files: dict[str, bytes], tls: ssl.SSLContext | None = None):
        self.name, self.files = name, files
        self.cut_after: int | None = None
        self.has_ranges = True
        self.spoil = False
        self.status = 200
        self.error_code = ""
        self.ranges: list[str] = []
        self.served: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> HubStub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _tree(self) -> list[dict]:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in self.files.items()
        ]

    def _handler(stub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def _json(self, value: object) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                api, resolve = f"/api/models/{stub.name}", f"/{stub.name}/resolve/"
                if stub.status != 200 or not path.startswith((api, resolve)):
                    self.send_response(stub.status if stub.status != 200 else 404)
                    self.send_header("X-Error-Code", stub.error_code or "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif path.startswith(api + "/tree/"):
                    self._json(stub._tree())
                elif path.startswith(api):
                    self._json({"id": stub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in stub.files]})
                else:
                    self._file(path.removeprefix(resolve).partition("/")[2])

            def _file(self, name: str) -> None:
                data = stub.files[name]
                begin = 0
                if stub.has_ranges and (wanted := self.headers.get("Range")):
                    stub.ranges.append(wanted)
                    begin = int(wanted.removeprefix("bytes=").partition("-")[0])
                part = data[begin:]
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Accept-Ranges", "bytes")
                if begin:
                    self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if self.command == "HEAD":
                    return
                stub.served.append(name)
                if stub.spoil:
                    part = bytes(len(part))
                if stub.cut_after is not None and name.endswith(".safetensors"):
                    self.wfile.write(part[: stub.cut_after])
                    self.wfile.flush()
                    self.close_connection = True
                    return
                self.wfile.write(part)

        return Handler
