"""The guard in front of every route of a live server, and what the token opens."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.api.live import CHAT, EDGES, chat_body, connect, post, running

ROUTES = [("GET", "/"), ("GET", "/health"), ("GET", "/v1/models"), ("GET", "/pool"), ("GET", "/nothing"), ("POST", CHAT)]
ROUTES += [("OPTIONS", CHAT), ("HEAD", "/"), ("DELETE", "/v1/models")]


def ask(method: str, path: str, port: int, **headers: str) -> bytes:
    """A request, with a chat body where it is a POST."""
    given = {"Host": f"127.0.0.1:{port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    body = b""
    if method == "POST":
        body = chat_body()
        given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **given}
    return (
        f"{method} {path} HTTP/1.1\r\n".encode() + "".join(f"{k}: {v}\r\n" for k, v in given.items()).encode() + b"\r\n" + body
    )


async def status_of(port: int, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    async with connect(port, ask(method, path, port, **headers)) as raw:
        return await raw.head()


async def test_foreign_host_and_origin_on_every_route() -> None:
    async with running() as live:
        for method, path in ROUTES:
            for headers in (
                {"Host": f"evil.example:{live.port}"},
                {"Host": f"evil.example:{live.port}", "Origin": f"http://evil.example:{live.port}"},
                {"Origin": "https://evil.example"},
                {"Origin": "null"},
                {"Sec-Fetch-Site": "cross-site"},
            ):
                status, answer = await status_of(live.port, method, path, **headers)
                assert status == 403, (method, path, headers)
                assert not any(name.startswith("access-control") for name in answer)
        assert live.engine.requests == []


async def test_own_names_and_origin() -> None:
    async with running() as live:
        for host in (f"127.0.0.1:{live.port}", f"localhost:{live.port}", f"[::1]:{live.port}"):
            assert (await status_of(live.port, "GET", "/v1/models", Host=host))[0] == 200
            assert (await status_of(live.port, "POST", CHAT, Host=host, Origin=f"http://{host}"))[0] == 200


async def test_a_preflight_gets_no_permission() -> None:
    async with running() as live:
        own = f"http://127.0.0.1:{live.port}"
        status, headers = await status_of(live.port, "OPTIONS", CHAT, Origin=own, Access_Control_Request_Method="POST")
        assert status == 405
        assert headers["allow"] == "POST"
        assert not any(name.startswith("access-control") for name in headers)


async def test_forms_of_a_web_page_are_refused() -> None:
    async with running() as live:
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            response = await live.http.post(CHAT, content=chat_body(), headers={"content-type": media_type})
            assert response.status_code == 415
            assert "Content-Type: application/json" in response.json()["error"]["message"]
        assert live.engine.requests == []


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}])
async def test_without_the_token(headers: dict[str, str]) -> None:
    async with running(token="s3cret") as live:
        for method, path in [("GET", "/v1/models"), ("GET", "/pool"), ("GET", "/metrics"), ("GET", "/nothing"), ("PUT", CHAT)]:
            response = await live.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        response = await live.http.post(CHAT, json={}, headers=headers)
        assert response.status_code == 401
        assert response.headers["x-should-retry"] == "false"
        page = await live.http.get("/", headers=headers)
        assert page.status_code == 200
        health = await live.http.get("/health", headers=headers)
        assert (health.status_code, health.json()) == (200, {"ok": True})
        live.engine.facts |= {"ok": False, "reason": "the engine is dead"}
        health = await live.http.get("/health", headers=headers)
        assert (health.status_code, health.json()) == (503, {"ok": False})
        assert live.engine.requests == []


@pytest.mark.parametrize("headers", [{"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}])
async def test_with_the_token(headers: dict[str, str]) -> None:
    async with running(token="s3cret") as live:
        assert (
            await live.http.post(CHAT, content=chat_body(), headers={**headers, "content-type": "application/json"})
        ).status_code == 200
        for path in ("/v1/models", "/pool"):
            assert (await live.http.get(path, headers=headers)).status_code == 200
        assert "ctx" in (await live.http.get("/health", headers=headers)).json()


async def test_a_refused_token_does_not_read_the_body() -> None:
    async with running(token="s3cret") as live, connect(live.port, post(live.port, b"", length=10_000_000)) as raw:
        status, _, body = await raw.response()
        assert status == 401
        assert json.loads(body)["error"]["message"]


async def test_websockets_get_an_ordinary_404() -> None:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    async with running(token="s3cret") as live:
        for headers, expected in (
            ({**upgrade, "x-api-key": "s3cret"}, 404),
            (upgrade, 401),
            ({**upgrade, "Origin": "null"}, 403),
        ):
            assert (await status_of(live.port, "GET", "/v1/responses", **headers))[0] == expected
        assert (await live.http.get("/health")).status_code == 200


async def test_allowed_host_and_origin() -> None:
    async with running(allow_hosts=("host.docker.internal",), allow_origins=("app://obsidian.md",)) as live:
        assert (await status_of(live.port, "GET", "/v1/models", Host=f"host.docker.internal:{live.port}"))[0] == 200
        assert (await status_of(live.port, "POST", CHAT, Origin="app://obsidian.md"))[0] == 200


async def test_ipv6_loopback() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no ::1")
    async with running(edges=EDGES) as live:
        reader, writer = await asyncio.open_connection("::1", live.port)
        writer.write(f"GET /health HTTP/1.1\r\nHost: [::1]:{live.port}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
