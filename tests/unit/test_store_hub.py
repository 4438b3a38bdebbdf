from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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
    ],
)
def test_refusals_of_the_hub(hub: HubStub, status: int, code: str, message: str):
    hub.status, hub.error_code = status, code
    with pytest.raises(StoreError, match=message):
        ensure_model(resolve_model(REPO, Catalog({})), convert=never)


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
