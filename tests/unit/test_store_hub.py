from __future__ import annotations

import json
import shutil
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pooled_mlx.catalog import Catalog
from pooled_mlx.core.card import ModelCard
from pooled_mlx.store import Progress, StoreError, ensure_model, resolve_model
from pooled_mlx.store import hub as store_hub
from pooled_mlx.store.ensure import disk_state, remove_model, verify_model
from tests.unit.hub_stub import HubStub

REPO = "someone/Tiny-Chat-4bit"


def safetensors(size: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(i % 251 for i in range(size))


FILES = {
    "config.json": json.dumps({"model_type": "llama", "max_position_embeddings": 2048, "eos_token_id": 2}).encode(),
    "generation_config.json": json.dumps({"temperature": 0.5, "top_k": 33, "eos_token_id": [2, 7]}).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{% if enable_thinking %}<think>{% endif %}{{ messages }}",
    "model.safetensors": safetensors(300_000),
    "modeling_evil.py": b"open('/tmp/never', 'w')",
    "README.md": b"# hello",
}


def never(source: Path, target: Path) -> None:
    raise AssertionError("a hub repo is not converted")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    from huggingface_hub import close_session, constants

    close_session()  # its open connections are to the server of another test, whose port may be this one's again
    with HubStub(REPO, dict(FILES)) as stub:
        for name, value in {
            "ENDPOINT": stub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": stub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
        yield stub


def test_download_derives_a_card_and_leaves_code_behind(hub: HubStub):
    seen: list[Progress] = []
    ready = ensure_model(resolve_model(REPO, Catalog({})), convert=never, report=seen.append)
    assert sorted(path.name for path in ready.folder.iterdir()) == sorted(set(FILES) - {"modeling_evil.py", "README.md"})
    assert ready.card.id == "tiny-chat-4bit"
    assert ready.card.context_max == 2048
    assert ready.card.thinking.supported
    assert (ready.card.sampling.temperature, ready.card.sampling.top_k, ready.card.sampling.top_p) == (0.5, 33, 1.0)
    assert ready.card.eos_token_ids == (2, 7)
    assert (seen[-1].stage, seen[-1].fraction) == ("downloading", 1.0)


def test_a_whole_cache_is_used_without_the_network(hub: HubStub):
    first = ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    hub.status, served = 503, len(hub.served)
    again = ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert again == first
    assert len(hub.served) == served


def _never_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooled_mlx.store.fetch.time.sleep", lambda seconds: None)


def verify_fails(card: ModelCard) -> bool:
    with pytest.raises(StoreError, match=r"not whole on this disk\. pooled-mlx models pull"):
        verify_model(card)
    return True


def test_a_broken_connection_goes_on_by_byte_range(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    _never_sleep(monkeypatch)
    hub.cut_after = 60_000
    seen: list[Progress] = []
    ready = ensure_model(resolve_model(REPO, Catalog({})), convert=never, report=seen.append)
    assert (ready.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [int(text.removeprefix("bytes=").rstrip("-")) for text in hub.ranges] == [60_000 * n for n in range(1, 6)]
    assert [progress.done_bytes for progress in seen] == sorted(progress.done_bytes for progress in seen)


def test_a_download_of_an_ended_process_goes_on_and_is_never_served(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    _never_sleep(monkeypatch)
    card = resolve_model(REPO, Catalog({}))
    hub.cut_after = 100_000

    def killed(progress: Progress) -> None:
        if progress.done_bytes >= 50_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_model(card, convert=never, report=killed)
    assert store_hub.cached_repo(REPO, None) is None
    state, there = disk_state(card)
    assert state == "partial"
    assert there >= 50_000
    hub.cut_after = None
    assert verify_fails(card)
    ready = ensure_model(card, convert=never)
    assert hub.ranges == [f"bytes={there}-"]
    assert (ready.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not list(ready.folder.parent.parent.glob("blobs/*.partial"))


def test_the_network_goes_away_for_good(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    _never_sleep(monkeypatch)
    hub.cut_after = 0
    with pytest.raises(StoreError, match=r"What was downloaded is kept; run it again.*--model smollm2-135m needs no hub"):
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert hub.served.count("model.safetensors") == 6


def test_a_server_without_ranges_starts_again(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    _never_sleep(monkeypatch)
    hub.cut_after, hub.has_ranges = 200_000, False

    def mend(progress: Progress) -> None:
        if len(hub.served) == 2:
            hub.cut_after = None

    ready = ensure_model(resolve_model(REPO, Catalog({})), convert=never, report=mend)
    assert (ready.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_damaged_bytes_are_deleted(hub: HubStub):
    hub.spoil = True
    card = resolve_model(REPO, Catalog({}))
    with pytest.raises(StoreError, match="arrived damaged and was deleted"):
        ensure_model(card, convert=never)
    assert disk_state(card) == ("absent", 0)


def test_the_weights_are_fetched_once(hub: HubStub):
    ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert hub.served.count("model.safetensors") == 1


def test_hub_unreachable_names_the_embedded_model(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(
        StoreError,
        match=r"cannot download someone/Tiny-Chat-4bit from the Hugging Face hub: .*--model smollm2-135m needs no hub",
    ):
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "the Hugging Face hub has no someone/Tiny-Chat-4bit"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (404, "RevisionNotFound", "has no revision"),
        (401, "GatedRepo", "is gated: accept its terms"),
        (401, "-", r"refuses someone/Tiny-Chat-4bit \(401\): the token is not valid.*hf auth login"),
        (403, "-", r"refuses someone/Tiny-Chat-4bit \(403\): the token may not read it"),
    ],
)
def test_refusals_of_the_hub(hub: HubStub, status: int, code: str, message: str):
    hub.status, hub.error_code = status, code
    with pytest.raises(StoreError, match=message) as caught:
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert not caught.value.temporary


@pytest.mark.parametrize(("status", "message"), [(429, r"too many requests.*\(429\)\. Wait"), (503, "has troubles of its own")])
def test_troubles_of_the_hub_pass(hub: HubStub, status: int, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.status, hub.error_code = status, "-"
    with pytest.raises(StoreError, match=message) as caught:
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert caught.value.temporary


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    """A server's side of a certificate that nobody knows, for 127.0.0.1."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl is not on this machine")
    key, own = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [tool, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", own, "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-days", "2", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    return context


def test_a_certificate_that_is_not_trusted(hub: HubStub, certificate: ssl.SSLContext, tmp_path: Path, monkeypatch: Any):
    from huggingface_hub import close_session, constants

    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    own = tmp_path / "certificate.pem"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(own))
    with HubStub(REPO, dict(FILES), certificate) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}")
        with pytest.raises(StoreError, match=r"its certificate is not trusted \(self.signed certificate\)") as caught:
            ensure_model(resolve_model(REPO, Catalog({})), convert=never)
        assert f"what helps is SSL_CERT_FILE={own} (REQUESTS_CA_BUNDLE is set" in str(caught.value)
        assert caught.value.temporary
        close_session()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere.pem"))
        with pytest.raises(StoreError, match=r"SSL_CERT_FILE is .*nowhere\.pem, which is not there"):
            ensure_model(resolve_model(REPO, Catalog({})), convert=never)
        close_session()
        monkeypatch.setenv("SSL_CERT_FILE", str(own))  # what was said helps
        assert ensure_model(resolve_model(REPO, Catalog({})), convert=never).folder.is_dir()
    close_session()


SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def sharded(hub: HubStub) -> Path:
    """The folder of a model of three shards in the cache."""
    del hub.files["model.safetensors"]
    for number, name in enumerate(SHARDS):
        hub.files[name] = safetensors(50_000 + number)
    folder = ensure_model(resolve_model(REPO, Catalog({})), convert=never).folder
    hub.served.clear()
    return folder


def cut(path: Path) -> None:
    with path.open("r+b") as file:  # follows the link into the cache
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("name", [SHARDS[1], "config.json", "tokenizer.json"])
def test_of_a_damaged_cache_only_the_damaged_file_is_fetched_again(hub: HubStub, name: str, refresh: bool):
    hub.files["tokenizer.json"] = b'{"model": {"type": "BPE", "vocab": {}}}'
    folder = sharded(hub)
    cut(folder / name)
    card = resolve_model(REPO, Catalog({}))
    assert disk_state(card)[0] == "partial"
    ready = ensure_model(card, convert=never, refresh=refresh)
    assert hub.served == [name]
    assert (ready.folder / name).read_bytes() == hub.files[name]


def test_all_damaged_and_missing_shards_are_fetched_and_no_other(hub: HubStub):
    folder = sharded(hub)
    cut(folder / SHARDS[2])
    (folder / SHARDS[0]).resolve().write_bytes(b"")
    (folder / "config.json").resolve().unlink()
    ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert sorted(hub.served) == ["config.json", SHARDS[0], SHARDS[2]]


def test_a_damaged_cache_without_a_network_is_named_and_may_pass(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    folder = sharded(hub)
    cut(folder / SHARDS[1])
    (folder / SHARDS[2]).unlink()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(StoreError) as caught:
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert caught.value.temporary
    assert f"{SHARDS[1]} is damaged: it has " in str(caught.value)
    assert f"1 of 3 weight files missing ({SHARDS[2]})" in str(caught.value)
    assert (folder / SHARDS[1]).exists()
    with pytest.raises(StoreError, match=rf"1 of 3 weight files missing.*{SHARDS[1]} is damaged.*models pull"):
        verify_model(resolve_model(REPO, Catalog({})))


def test_a_damaged_cache_with_the_hub_switched_off_is_named(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import close_session, constants

    folder = sharded(hub)
    cut(folder / SHARDS[1])
    close_session()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError) as caught:
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    text = str(caught.value)
    assert f"{SHARDS[1]} is damaged: it has " in text
    assert "the hub is switched off (HF_HUB_OFFLINE). What is there is kept; unset HF_HUB_OFFLINE to complete it: " in text
    assert f"pooled-mlx models pull {REPO}" in text
    assert hub.served == []
    close_session()


def test_a_repo_that_lacks_a_shard_on_the_hub_is_refused_as_such(hub: HubStub):
    del hub.files["model.safetensors"]
    hub.files[SHARDS[0]] = safetensors(50_000)
    with pytest.raises(StoreError, match=r"is not whole on the Hugging Face hub itself: 2 of 3 weight files") as caught:
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert not caught.value.temporary


def test_memory_is_checked_with_the_real_size_before_a_download(hub: HubStub):
    def too_big(card) -> None:
        raise StoreError(f"needs {card.weights_bytes}")

    with pytest.raises(StoreError, match=f"needs {len(FILES['model.safetensors'])}"):
        ensure_model(resolve_model(REPO, Catalog({})), convert=never, check_fit=too_big)
    assert hub.served == []


def test_disk_is_checked_with_the_real_size_before_a_download(hub: HubStub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1024**2))
    with pytest.raises(
        StoreError, match=r"not enough disk for someone/Tiny-Chat-4bit: it needs 293\.\d KiB.*has 1\.0 MiB free"
    ):
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)
    assert hub.served == []


def test_not_an_mlx_repo(hub: HubStub):
    del hub.files["model.safetensors"]
    hub.files["model.gguf"] = b"GGUF"
    with pytest.raises(StoreError, match=r"no weights in mlx-lm's format"):
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)


def test_list_verify_and_remove(hub: HubStub):
    card = resolve_model(REPO, Catalog({}))
    assert disk_state(card) == ("absent", 0)
    ready = ensure_model(card, convert=never)
    state, size = disk_state(card)
    assert state == "ready"
    assert size >= 300_000
    assert "length" in verify_model(card)
    (ready.folder / "model.safetensors").resolve().write_bytes(b"cut")
    assert disk_state(card)[0] == "partial"
    assert remove_model(card) > 0
    assert disk_state(card) == ("absent", 0)
