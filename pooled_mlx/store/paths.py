"""Where the store keeps its files, and writing them so that a half-made model is never taken for a whole one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pooled_mlx.core.memory import format_size
from pooled_mlx.store.errors import StoreError

MANIFEST = "pooled-mlx.json"
_LAYOUT = 1
_STAGING = ".making-"
_SPARE_BYTES = 512 * 1024**2
_READ_BYTES = 4 * 1024**2


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/pooled-mlx`, by default `~/.cache/pooled-mlx`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pooled-mlx"


def models_folder() -> Path:
    """The folder of the models that were made here."""
    return cache_folder() / "models"


def check_disk(folder: Path, needed_bytes: int, model: str) -> None:
    """Raise `StoreError` with the numbers unless the disk of `folder` holds `needed_bytes` and some to spare."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        raise StoreError(f"cannot write to {folder}: {existing} is not writable. Set XDG_CACHE_HOME to a writable folder")
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + _SPARE_BYTES:
        raise StoreError(
            f"not enough disk for {model}: it needs {format_size(needed_bytes)} and {format_size(_SPARE_BYTES)} to spare, "
            f"{folder} has {format_size(free)} free. Free some space, or choose a smaller model (pooled-mlx models list)"
        )


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A scratch folder on the disk of `target`, removed at the end; left-overs of killed processes are removed first."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob(f"{_STAGING}*"):
            if not _alive(old.name.removeprefix(_STAGING).partition("-")[0]):
                shutil.rmtree(old, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise StoreError(
            f"cannot write to {target.parent}: {error.strerror}. Set XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def publish(made: Path, target: Path) -> None:
    """Move the finished folder `made` to `target` in one step; a folder that another process put there first stays."""
    try:
        os.rename(made, target)
    except OSError as error:
        if damage(target) is not None:
            raise StoreError(f"cannot move the finished model to {target}: {error.strerror}") from error


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, source: Mapping[str, Any]) -> None:
    """Record where the folder's files came from, their sizes and hashes."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hash_file(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {"layout": _LAYOUT, "source": dict(source), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def damage(folder: Path, *, hashes: bool = False) -> str | None:
    """What is wrong with a folder that has a manifest, None when it is whole.

    A file that was touched after the manifest was written is read and checked, with `hashes` every file is.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        written_at = (folder / MANIFEST).stat().st_mtime_ns
        layout, files = manifest["layout"], manifest["files"]
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    if layout != _LAYOUT:
        return f"its layout is {layout}, this version writes {_LAYOUT}"
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        now = path.stat()
        if now.st_size != facts["bytes"]:
            return f"{name} has {now.st_size} bytes, {facts['bytes']} were written"
        if (hashes or now.st_mtime_ns > written_at) and hash_file(path) != facts["sha256"]:
            return f"{name} has changed since it was written"
    return None


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of a folder, links followed once each."""
    seen: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if path.is_file():
                seen[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(seen.values())
