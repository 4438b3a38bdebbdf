"""The HTTP client of the menu bar and the terminal: short requests to a server on this machine.

`http.client` and not `urllib`: the latter would send a request for 127.0.0.1 through a proxy named in the environment.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pooled_mlx.mac.facts import ServerFacts, read_health

_MAX_BODY_BYTES = 16 * 1024 * 1024


class NotHttp(ConnectionError):
    """Something listens there and it is no web server."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: `body` is the decoded JSON, or None where it was none."""

    status: int
    body: Any


class LocalServer:
    """Asks one server. `base_url` has no path (`http://127.0.0.1:8080`); the time-out is in seconds."""

    def __init__(self, base_url: str, token: str | None = None, timeout_seconds: float = 3.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{base_url!r} is not the address of a local server: give http://HOST:PORT")
        self.base_url = f"http://{parts.netloc}"
        self.token = token
        self._host = parts.hostname
        self._port = parts.port or 80
        self._timeout = timeout_seconds

    def get(self, path: str) -> Reply:
        """GET `path`. Raises OSError when nothing answers and TimeoutError when the answer does not come."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            headers = {"Accept": "application/json"}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            data = response.read(_MAX_BODY_BYTES)
        except http.client.RemoteDisconnected:
            raise
        except http.client.HTTPException as error:
            raise NotHttp(f"what listens on {self.base_url} does not speak HTTP") from error
        finally:
            connection.close()
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        return Reply(response.status, body)

    def health(self) -> ServerFacts:
        """One look at `/health`. Never raises: what is wrong is in `state` and `reason`."""
        try:
            reply = self.get("/health")
        except TimeoutError:
            return ServerFacts(
                state="silent",
                reason=f"a process listens on {self.base_url} and did not answer within {self._timeout:g} s",
            )
        except ConnectionRefusedError:
            return ServerFacts(state="stopped", reason=f"nothing listens on {self.base_url}")
        except NotHttp as error:
            return ServerFacts(state="foreign", reason=str(error))
        except OSError as error:
            return ServerFacts(state="stopped", reason=f"{self.base_url} cannot be reached: {error}")
        if reply.status in (401, 403):
            return ServerFacts(state="locked", reason=f"the server refused the request ({reply.status})")
        return read_health(reply.body)

    def pool(self) -> Any:
        """The decoded `/pool`, or None when it cannot be had."""
        try:
            reply = self.get("/pool")
        except OSError:
            return None
        return reply.body if reply.status == 200 else None
