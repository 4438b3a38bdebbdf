"""What the HTTP side needs to know."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

MIB = 1024 * 1024


class UnsafeHostError(ValueError):
    """The server would be reachable from other machines without a token."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one HTTP server. `port` 0 takes a free one.

    `allow_hosts` are further `Host` values, with or without a port; without one, any port goes. `allow_origins` are
    further `Origin` values (`http://localhost:3000`).
    """

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    keep_alive_seconds: float = 10.0
    """A stream that was silent for so long gets a keep-alive."""
    progress_timeout_seconds: float = 300.0
    """A running request without any progress for so long is given up."""
    stall_timeout_seconds: float = 120.0
    """A client that takes nothing of its answer for so long is cut off."""
    body_timeout_seconds: float = 60.0
    """A request body must have arrived by then."""
    stop_grace_seconds: float = 5.0
    """What open connections get to take their last bytes when the server stops."""
    linger_seconds: float = 5.0
    """After a refusal, how long the rest of the body is read and thrown away so that the client can read the answer."""
    body_limit_bytes: int = 64 * MIB
    workers: int = 4
    """Requests that are parsed, rendered and tokenized at the same time."""

    def __post_init__(self) -> None:
        if not self.loopback and not self.token:
            raise UnsafeHostError(
                f"--host {self.host} lets other machines in, and no token is set. Set one with --token-file, "
                "POOLED_TOKEN or --token, or listen on 127.0.0.1."
            )

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
