"""Listening, and who is in the way."""

from __future__ import annotations

import socket

from pooled_mlx.cli.common import Refused
from pooled_mlx.server.serve import PortBusyError, open_sockets
from pooled_mlx.server.settings import ServerSettings


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Sockets that listen. Raises `Refused` naming who holds the port."""
    try:
        return open_sockets(settings)
    except PortBusyError as error:
        raise Refused(busy_text(settings.host, settings.port)) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise Refused(f"cannot listen on {settings.host} port {settings.port}: {reason}. Choose --host and --port") from error


def busy_text(host: str, port: int) -> str:
    """Why the port cannot be had: the process that holds it, and whether that is a server of ours."""
    from pooled_mlx.mac.address import reachable
    from pooled_mlx.mac.local_server import LocalServer

    holder = port_holder(port)
    by = f" by {holder[1]} (pid {holder[0]})" if holder else ""
    facts = LocalServer(f"http://{reachable(host)}:{port}", timeout_seconds=2.0).health()
    if facts.answers:
        version = f" version {facts.version}" if facts.version else ""
        model = f" with {facts.model_card}" if facts.model_card else ""
        end = f"end it (kill {holder[0]})" if holder else "end it"
        return (
            f"port {port} is in use{by}: a pooled-mlx server{version}{model} runs there already. Use it, {end} or choose --port"
        )
    end = f"end that process (kill {holder[0]})" if holder else "end the process that holds it"
    return f"port {port} is in use{by}. Choose another one with --port, or {end}"


def port_holder(port: int) -> tuple[int, str] | None:
    """(pid, program) that listens on a local port; None when the system does not tell."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return _search_own(port)
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
            try:
                return connection.pid, psutil.Process(connection.pid).name()
            except psutil.Error:
                return connection.pid, "another program"
    return None


def _search_own(port: int) -> tuple[int, str] | None:
    """The same by looking at each process that may be looked at: macOS tells no more without root."""
    import psutil

    for process in psutil.process_iter(["name"]):
        try:
            connections = process.net_connections(kind="tcp")
        except (psutil.Error, OSError):
            continue
        if any(entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port for entry in connections):
            return process.pid, process.info["name"] or "another program"
    return None
