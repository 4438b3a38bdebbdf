"""Listening sockets."""

from __future__ import annotations

import socket

import pytest

from pooled_mlx.server.serve import PortBusyError, open_sockets, port_of
from pooled_mlx.server.settings import ServerSettings


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def test_a_free_port_on_every_loopback_address() -> None:
    sockets = open_sockets(ServerSettings(port=0))
    try:
        assert {sock.getsockname()[0] for sock in sockets} <= {"127.0.0.1", "::1"}
        assert sockets[0].getsockname()[0] == "127.0.0.1"
        assert {sock.getsockname()[1] for sock in sockets} == {port_of(sockets)}
        assert port_of(sockets) > 0
        with socket.create_connection(("127.0.0.1", port_of(sockets)), timeout=5) as client:
            assert client.getpeername()[1] == port_of(sockets)
    finally:
        close(sockets)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_busy_port(host: str) -> None:
    first = open_sockets(ServerSettings(port=0))
    try:
        with pytest.raises(PortBusyError, match=f"port {port_of(first)} on 127.0.0.1 is in use"):
            open_sockets(ServerSettings(host=host, port=port_of(first)))
    finally:
        close(first)


def test_a_port_that_is_busy_on_one_address_only() -> None:
    with socket.socket(socket.AF_INET6) as other:
        try:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            other.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortBusyError, match="::1"):
            open_sockets(ServerSettings(port=port))
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            assert again.getsockname()[1] == port


def test_an_address_of_another_machine() -> None:
    with pytest.raises(OSError, match=r"(?i)assign|address"):
        open_sockets(ServerSettings(host="192.0.2.1", port=0, token="t"))


def test_the_port_is_free_again_at_once() -> None:
    first = open_sockets(ServerSettings(port=0))
    port = port_of(first)
    close(first)
    second = open_sockets(ServerSettings(port=port))
    assert port_of(second) == port
    close(second)
