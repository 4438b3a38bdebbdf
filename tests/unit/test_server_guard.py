"""The guard's decisions over request heads."""

from __future__ import annotations

import pytest

from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.server.guard import check_head, read_head
from pooled_mlx.server.settings import ServerSettings, UnsafeHostError

PORT = 8080
HOST = {"host": "127.0.0.1:8080"}
JSON = {"content-type": "application/json", "content-length": "2"}


def check(settings: ServerSettings | None = None, path: str = "/v1/models", port: int = PORT, **headers: str) -> bool:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in {**HOST, **headers}.items()]
    return check_head(read_head("POST", path, port, pairs), settings or ServerSettings())


def refused(settings: ServerSettings | None = None, path: str = "/v1/models", port: int = PORT, **headers: str) -> ErrorKind:
    with pytest.raises(ApiError) as caught:
        check(settings, path, port, **headers)
    return caught.value.kind


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST:8080", "[::1]:8080"])
def test_own_names(host: str) -> None:
    assert check(host=host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8080",
        "evil.example",
        "",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:8081",
        "localhost.evil.example:8080",
        "127.0.0.1:8080.evil.example",
        "127.0.0.1:8080@evil.example",
        "[::1]",
        "0.0.0.0:8080",
        "127.0.0.1:8080, evil.example",
    ],
)
def test_foreign_names(host: str) -> None:
    for path in ("/", "/health", "/v1/models", "/v1/chat/completions", "/nothing"):
        assert refused(path=path, host=host) is ErrorKind.FORBIDDEN


def test_no_host_at_all() -> None:
    with pytest.raises(ApiError) as caught:
        check_head(read_head("GET", "/", PORT, []), ServerSettings())
    assert caught.value.kind is ErrorKind.FORBIDDEN


def test_the_default_port_may_be_left_out() -> None:
    assert check(port=80, host="localhost")
    assert refused(port=80, host="evil.example") is ErrorKind.FORBIDDEN


def test_allowed_hosts() -> None:
    settings = ServerSettings(allow_hosts=("host.docker.internal:8080", "Mac.local"))
    assert check(settings, host="host.docker.internal:8080")
    assert check(settings, host="mac.local")
    assert check(settings, host="mac.local:9999")
    assert refused(settings, host="host.docker.internal:9999") is ErrorKind.FORBIDDEN
    assert refused(settings, host="host.docker.internal") is ErrorKind.FORBIDDEN


def test_the_address_it_listens_on_is_allowed() -> None:
    settings = ServerSettings(host="192.168.1.5", token="t")
    assert check(settings, host="192.168.1.5:8080", x_api_key="t")
    assert check(ServerSettings(host="fd00::5", token="t"), host="[fd00::5]:8080", x_api_key="t")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "mac.local"])
def test_other_machines_only_with_a_token(host: str) -> None:
    with pytest.raises(UnsafeHostError, match="token"):
        ServerSettings(host=host)
    with pytest.raises(UnsafeHostError):
        ServerSettings(host=host, token="")
    assert ServerSettings(host=host, token="t").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2", "[::1]"])
def test_this_machine_without_a_token(host: str) -> None:
    assert ServerSettings(host=host).loopback


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://localhost:3000", "http://127.0.0.1:80801"])
def test_foreign_origins(origin: str) -> None:
    assert refused(origin=origin) is ErrorKind.FORBIDDEN


def test_own_origin() -> None:
    assert check(origin="http://127.0.0.1:8080")
    assert check(host="localhost:8080", origin="http://localhost:8080")
    assert refused(host="localhost:8080", origin="http://127.0.0.1:8080") is ErrorKind.FORBIDDEN


def test_own_origin_is_no_way_around_the_host() -> None:
    assert refused(host="evil.example:8080", origin="http://evil.example:8080") is ErrorKind.FORBIDDEN


def test_allowed_origins() -> None:
    settings = ServerSettings(allow_origins=("http://localhost:3000", "app://obsidian.md"))
    assert check(settings, origin="http://localhost:3000")
    assert check(settings, origin="app://obsidian.md", sec_fetch_site="cross-site")
    assert refused(settings, origin="http://localhost:3001") is ErrorKind.FORBIDDEN


@pytest.mark.parametrize("site", ["cross-site", "Cross-Site"])
def test_cross_site_without_origin(site: str) -> None:
    assert refused(sec_fetch_site=site) is ErrorKind.FORBIDDEN


@pytest.mark.parametrize("site", ["same-origin", "none", "same-site"])
def test_other_fetch_sites(site: str) -> None:
    assert check(sec_fetch_site=site)


@pytest.mark.parametrize(
    "media_type", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_json_bodies(media_type: str) -> None:
    assert check(content_type=media_type, content_length="2")


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_bodies_that_any_web_page_could_send(media_type: str) -> None:
    assert refused(content_type=media_type, content_length="2") is ErrorKind.UNSUPPORTED_MEDIA
    assert refused(content_type=media_type, transfer_encoding="chunked") is ErrorKind.UNSUPPORTED_MEDIA
    assert check(content_type=media_type, content_length="0")


def test_body_size() -> None:
    settings = ServerSettings(body_limit_bytes=100)
    assert check(settings, **{**JSON, "content-length": "100"})
    assert refused(settings, **{**JSON, "content-length": "101"}) is ErrorKind.TOO_LARGE


TOKEN = ServerSettings(token="s3cret")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer s3cret"},
        {"authorization": "bearer  s3cret"},
        {"x-api-key": "s3cret"},
        {"x-api-key": "other", "authorization": "Bearer s3cret"},
        {"x-api-key": "s3cret", "authorization": "Bearer other"},
    ],
)
def test_token(headers: dict[str, str]) -> None:
    assert check(TOKEN, **headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "s3cret"},
        {"authorization": "Basic s3cret"},
        {"authorization": "Bearer S3CRET"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer s3cret2"},
        {"x-api-key": "s3cre"},
        {"x-api-key": "\xfc"},
    ],
)
def test_no_token(headers: dict[str, str]) -> None:
    assert refused(TOKEN, **headers) is ErrorKind.UNAUTHORIZED
    assert refused(TOKEN, "/nothing", **headers) is ErrorKind.UNAUTHORIZED
    for path in ("/", "/health"):
        assert check(TOKEN, path, **headers) is False


def test_a_token_beyond_ascii() -> None:
    settings = ServerSettings(token="schlüssel")
    pairs = [(b"host", b"127.0.0.1:8080"), (b"x-api-key", "schlüssel".encode())]
    assert check_head(read_head("GET", "/pool", PORT, pairs), settings)


def test_a_path_that_is_no_path() -> None:
    assert refused(path="*") is ErrorKind.NOT_FOUND
    assert refused(path="") is ErrorKind.NOT_FOUND


def test_headers_sent_twice_are_joined() -> None:
    head = read_head("GET", "/", PORT, [(b"Origin", b"a"), (b"origin", b"b")])
    assert head.headers["origin"] == "a, b"


@pytest.mark.parametrize(
    ("headers", "anthropic"),
    [
        ({}, False),
        ({b"anthropic-version": b"2023-06-01", b"authorization": b"Bearer x"}, True),
        ({b"x-api-key": b"k"}, True),
        ({b"x-api-key": b"k", b"authorization": b"Bearer x"}, False),
    ],
)
def test_anthropic_clients(headers: dict[bytes, bytes], anthropic: bool) -> None:
    assert read_head("GET", "/v1/models", PORT, headers.items()).anthropic is anthropic


def test_the_token_is_not_shown() -> None:
    assert "s3cret" not in repr(TOKEN)
