"""Pages of an allowed origin: their browser asks first, and hands an answer over only if it is told to."""

from __future__ import annotations

import pytest

from tests.api.live import CHAT, chat_body, connect, running

ORIGIN = "app://obsidian.md"
JSON = {"content-type": "application/json"}
ASK = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nothing"])
async def test_a_preflight_of_an_allowed_origin_gets_204_before_the_token(path: str) -> None:
    async with running(allow_origins=(ORIGIN,), token="s3cret") as live:
        answer = await live.http.options(path, headers=ASK)
        assert answer.status_code == 204
        assert answer.content == b""
        assert "content-length" not in answer.headers
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-private-network" not in answer.headers
        near = await live.http.options(path, headers={**ASK, "access-control-request-private-network": "true"})
        assert near.headers["access-control-allow-private-network"] == "true"
        assert live.engine.requests == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({**ASK, "origin": "https://evil.example"}, 403),
        ({**ASK, "origin": "null"}, 403),
        ({**ASK, "host": "evil.example"}, 403),
        ({"origin": ORIGIN}, 405),
        ({"access-control-request-method": "POST"}, 405),
    ],
)
async def test_no_other_preflight_is_answered(headers: dict[str, str], status: int) -> None:
    async with running(allow_origins=(ORIGIN,)) as live:
        answer = await live.http.options(CHAT, headers=headers)
        assert answer.status_code == status
        assert "access-control-allow-methods" not in answer.headers


async def test_answers_streams_and_errors_name_the_origin() -> None:
    async with running(allow_origins=(ORIGIN,), token="s3cret") as live:
        key = {"authorization": "Bearer s3cret"}
        for method, path, body, headers, status in (
            ("POST", CHAT, chat_body(), {**JSON, **key}, 200),
            ("POST", CHAT, chat_body(stream=True), {**JSON, **key}, 200),
            ("POST", CHAT, chat_body(n=2), {**JSON, **key}, 400),
            ("POST", CHAT, chat_body(), JSON, 401),
            ("POST", CHAT, chat_body(), {"content-type": "text/plain", **key}, 415),
            ("GET", "/v1/models", b"", key, 200),
            ("GET", "/nothing", b"", key, 404),
            ("PUT", CHAT, b"", key, 405),
        ):
            answer = await live.http.request(method, path, content=body, headers={**headers, "origin": ORIGIN})
            assert (method, path, answer.status_code) == (method, path, status)
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert answer.headers["vary"] == "Origin"
            without = await live.http.request(method, path, content=body, headers=headers)
            assert not any(name.startswith("access-control") for name in without.headers)


async def test_other_origins_get_no_cors_headers() -> None:
    async with running(allow_origins=(ORIGIN,)) as live:
        answer = await live.http.post(CHAT, content=chat_body(), headers={**JSON, "origin": "https://evil.example"})
        assert answer.status_code == 403
        assert not any(name.startswith("access-control") for name in answer.headers)
        own = await live.http.post(CHAT, content=chat_body(), headers={**JSON, "origin": live.url})
        assert own.status_code == 200
        assert not any(name.startswith("access-control") for name in own.headers)


async def test_a_preflight_leaves_the_connection_usable() -> None:
    async with running(allow_origins=(ORIGIN,)) as live:
        lines = [
            f"OPTIONS {CHAT} HTTP/1.1",
            f"Host: 127.0.0.1:{live.port}",
            *(f"{name}: {value}" for name, value in ASK.items()),
        ]
        ask = ("\r\n".join(lines) + "\r\n\r\n").encode()
        async with connect(live.port, ask) as raw:
            assert (await raw.head())[0] == 204
            raw.writer.write(ask)
            assert (await raw.head())[0] == 204
