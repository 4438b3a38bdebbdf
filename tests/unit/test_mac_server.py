"""The client of `/health`: what is said about every kind of server, and where the server is looked for."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.mac.address import AddressError, add_address_options, find_token, given_options, server_from
from pooled_mlx.mac.facts import ServerFacts, read_health
from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.places import places
from pooled_mlx.mac.words import bytes_text, count_text, percent_text, plural, seconds_text
from tests.mac_fakes import GIB, health_body, mac_places


@contextmanager
def answering(reply: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """A server for one request: it sends `reply`, or nothing at all and keeps the connection."""
    requests: list[bytes] = []
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(4096)
                requests.append(data)
                if reply is not None:
                    connection.sendall(reply)
                else:
                    done.wait(30)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        done.set()
        thread.join(timeout=30)


def http(body: Any, status: str = "200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(data), data)


def test_a_whole_answer() -> None:
    with answering(http(health_body())) as (url, requests):
        facts = LocalServer(url, token="secret").health()
    assert facts.ready
    assert facts.answers
    assert (facts.running, facts.queued, facts.served, facts.context_tokens) == (2, 1, 214, 131072)
    assert facts.model_label == "Qwen3.6 35B A3B"
    assert facts.requests[1].prefill_done == 12288
    assert facts.recent[1].why == "first request of this conversation: nothing to reuse"
    assert [row.finished_at for row in facts.recent] == [1_790_000_000.0, 1_789_999_970.0]
    assert facts.memory["pool_bytes"] == 5 * GIB
    assert requests[0].startswith(b"GET /health HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in requests[0]


@pytest.mark.parametrize(
    ("reply", "state", "words"),
    [
        (http({"ok": True}), "locked", "wants a token"),
        (http({"error": {}}, "401 Unauthorized"), "locked", "401"),
        (http({"error": {}}, "403 Forbidden"), "locked", "403"),
        (http(b"<html>hello</html>"), "foreign", "not pooled-mlx"),
        (http({"status": "ok"}), "foreign", "not pooled-mlx"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "foreign", "does not speak HTTP"),
        (b"", "stopped", "cannot be reached"),
        (
            http(health_body(ok=False, ready=False, state="failed", reason="engine died"), "503 Service Unavailable"),
            "failed",
            "engine died",
        ),
        (http({"ok": True, "ready": False, "model": None, "reason": "downloading"}), "loading", "downloading"),
    ],
)
def test_every_kind_of_answer(reply: bytes, state: str, words: str) -> None:
    with answering(reply) as (url, _):
        facts = LocalServer(url).health()
    assert facts.state == state
    assert words in facts.reason


def test_nobody_and_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    facts = LocalServer(url).health()
    assert (facts.state, facts.answers) == ("stopped", False)
    with answering(None) as (url, _):
        facts = LocalServer(url, timeout_seconds=0.05).health()
    assert (facts.state, facts.answers) == ("silent", False)
    assert "did not answer within 0.05 s" in facts.reason


def test_the_environment_s_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(http(health_body())) as (url, _):
        assert LocalServer(url).health().ready


def test_the_pool_or_nothing() -> None:
    with answering(http({"segments": 3})) as (url, _):
        assert LocalServer(url).pool() == {"segments": 3}
    with answering(http({}, "401 Unauthorized")) as (url, _):
        assert LocalServer(url).pool() is None
    assert LocalServer(url).pool() is None


def test_only_http_addresses() -> None:
    for wrong in ("ftp://x", "127.0.0.1:8080", "https://x"):
        with pytest.raises(ValueError, match="not the address of a local server"):
            LocalServer(wrong)


def test_odd_values_are_unknown_never_an_error() -> None:
    odd = health_body(
        model=3, requests=[1, {"state": 7, "seconds": "x"}], recent="no", rates=[{}], memory=[1], progress="x", ctx="many"
    )
    facts = read_health(odd)
    assert facts.model_id == ""
    assert len(facts.requests) == 1
    assert facts.requests[0].seconds is None
    assert (facts.recent, facts.tokens_per_second, facts.memory, facts.progress) == ((), None, {}, None)
    assert facts.context_tokens is None
    assert read_health([]) == ServerFacts(state="foreign", reason="what answers there is not pooled-mlx")


def test_the_speed_is_that_of_the_last_seconds_or_none() -> None:
    body = health_body(rates=[{"t": 100, "tokens_per_second": 50}, {"t": 103, "tokens_per_second": 70}])
    assert read_health(body, now=104.5).tokens_per_second == 60
    assert read_health(body, now=106.0).tokens_per_second == 70
    assert read_health(body, now=300.0).tokens_per_second is None


def test_progress() -> None:
    progress = {"stage": "downloading", "done_bytes": 10, "total_bytes": 40, "bytes_per_second": 2.5, "seconds_left": 12}
    facts = read_health(health_body(state="downloading", ready=False, progress=progress))
    assert facts.progress is not None
    assert (facts.progress.stage, facts.progress.done_bytes, facts.progress.seconds_left) == ("downloading", 10, 12)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_address_options(parser)
    return parser.parse_args(words)


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "pooled-mlx" / "config.toml"
    path.parent.mkdir()
    return path


def test_the_port_flag_then_environment_then_settings_then_default(tmp_path: Path, settings_file: Path) -> None:
    where = mac_places(tmp_path)
    assert server_from(options(), where, {}).base_url == "http://127.0.0.1:8080"
    settings_file.write_text("port = 8081\n")
    assert server_from(options(), where, {}).base_url == "http://127.0.0.1:8081"
    assert server_from(options(), where, {"POOLED_MLX_PORT": "8082"}).base_url == "http://127.0.0.1:8082"
    assert server_from(options("--port", "8083"), where, {"POOLED_MLX_PORT": "8082"}).base_url == "http://127.0.0.1:8083"


@pytest.mark.parametrize(
    ("host", "url_host"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost"), ("127.0.0.1", "127.0.0.1")],
)
def test_the_address_to_connect_to(tmp_path: Path, settings_file: Path, host: str, url_host: str) -> None:
    assert server_from(options("--host", host), mac_places(tmp_path), {}).base_url == f"http://{url_host}:8080"


def test_given_options_are_passed_on() -> None:
    assert given_options(options()) == []
    given = options("--port", "1", "--token-file", "/t", "--config", "/c")
    assert given_options(given) == ["--port", "1", "--token-file", "/t", "--config", "/c"]
    assert given_options(given, ("port",)) == ["--port", "1", "--config", "/c"]


def test_the_token_file_then_the_environment_then_the_service_s(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    assert find_token(None, where, {}) is None
    where.token_file.parent.mkdir(parents=True)
    for path, text in ((where.token_file, "service"), (tmp_path / "own", "file")):
        path.write_text(f"{text}\n")
        path.chmod(0o600)
    assert find_token(None, where, {}) == "service"
    assert find_token(None, where, {"POOLED_TOKEN": "variable"}) == "variable"
    assert find_token(str(tmp_path / "own"), where, {"POOLED_TOKEN": "variable"}) == "file"


@pytest.mark.parametrize(
    ("settings", "environment", "words", "message"),
    [
        ("port = [", {}, (), "is not valid TOML"),
        ('port = "x"', {}, (), "not a whole number"),
        ("prot = 1", {}, (), "unknown setting 'prot'"),
        ("", {"POOLED_MLX_PORT": "70000"}, (), "POOLED_MLX_PORT: 70000 must be between"),
        ("", {}, ("--token-file", "/nowhere/token"), "the token file /nowhere/token does not exist"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, settings_file: Path, settings: str, environment: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    settings_file.write_text(settings)
    with pytest.raises(AddressError, match=message):
        server_from(options(*words), mac_places(tmp_path), environment)


def test_folders_of_each_system(tmp_path: Path) -> None:
    mac = places(tmp_path, "darwin", {})
    assert mac.server_log == tmp_path / "Library" / "Logs" / "pooled-mlx" / "server.log"
    assert mac == mac_places(tmp_path)
    linux = places(tmp_path, "linux", {})
    assert linux.server_log == tmp_path / ".local" / "state" / "pooled-mlx" / "logs" / "server.log"
    elsewhere = places(tmp_path, "linux", {"XDG_STATE_HOME": "/s", "XDG_CONFIG_HOME": "/c"})
    assert elsewhere.state == Path("/s/pooled-mlx")
    assert elsewhere.token_file == Path("/c/pooled-mlx/token")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (19 * GIB, "19.0 GiB"),
        (110 * GIB, "110 GiB"),
        (3e12, "2.7 TiB"),
    ],
)
def test_sizes(size: float | None, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (1.23, "1.2 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (4321, "1 h 12 min"),
        (200000, "2 d 7 h"),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_counts() -> None:
    assert (count_text(131072), count_text(None)) == ("131,072", "–")
    assert (percent_text(999, 1000), percent_text(7, 5), percent_text(None, 3), percent_text(3, 0)) == ("99 %", "100 %", "", "")
    assert (plural(1, "request"), plural(2, "request"), plural(0, "entry", "entries")) == (
        "1 request",
        "2 requests",
        "0 entries",
    )
