"""The package index that pip is configured with: which files it has, and what is in them, read in parts."""

from __future__ import annotations

import io
import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from email import message_from_string
from functools import cached_property
from typing import Any
from urllib.parse import urljoin

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

_REQUEST_SECONDS = 20
_BLOCK_BYTES = 128 * 1024
_JSON = "application/vnd.pypi.simple.v1+json"


class IndexUnavailable(Exception):
    """The index cannot be asked; the message says why."""


class NotThere(IndexUnavailable):
    """The index has no such file or project."""


@dataclass(frozen=True)
class Found:
    """One file of a project. `tags` is empty for a source archive, `python` says which versions it is for; sizes in bytes."""

    project: str
    version: Version
    filename: str
    url: str
    size: int | None
    python: SpecifierSet
    tags: frozenset[Tag]
    index: PackageIndex

    @cached_property
    def archive(self) -> zipfile.ZipFile:
        """The wheel, read by ranges as far as it is looked into."""
        return zipfile.ZipFile(io.BufferedReader(_Remote(self.index, self.url, self.size)))

    @cached_property
    def unpacked_bytes(self) -> int:
        """What the wheel takes on the disk."""
        return sum(entry.file_size for entry in self.archive.infolist())

    @cached_property
    def requirements(self) -> list[Requirement]:
        """What the wheel needs, with the markers."""
        (name,) = (name for name in self.archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        metadata = message_from_string(self.archive.read(name).decode("utf-8"))
        return [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]


class PackageIndex:
    """Asks as pip would: the same index and certificates, and the proxies of the environment. Safe to use from many threads.

    After `seconds` it is given up as unavailable: a slow index must not hold up what comes after.
    """

    def __init__(self, seconds: float = 110.0) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds
        settings = pip_settings()
        self._url = settings.get("index-url") or _default_url()
        self._context = ssl.create_default_context(cafile=settings.get("cert"))
        self._pages: dict[str, list[Found]] = {}
        self._lock = threading.Lock()

    def files(self, project: str) -> list[Found]:
        """All files of a project that are not yanked; [] for a project that it does not have. Raises `IndexUnavailable`."""
        name = canonicalize_name(project)
        with self._lock:
            known = self._pages.get(name)
        if known is None:
            page = urljoin(self._url.rstrip("/") + "/", f"{name}/")
            known = [found for entry in self._page(page)["files"] if (found := self._found(name, page, entry)) is not None]
            with self._lock:
                self._pages[name] = known
        return known

    def read(self, url: str, headers: dict[str, str] | None = None) -> bytes:
        """The body. Raises `IndexUnavailable`."""
        return self._open(url, headers or {})[0]

    def _page(self, url: str) -> Any:
        try:
            body, kind = self._open(url, {"Accept": _JSON})
        except NotThere:
            return {"files": []}
        if "json" not in kind:
            raise IndexUnavailable(f"it answers {kind or 'something'} and not {_JSON}")
        return json.loads(body)

    def _found(self, name: str, page: str, entry: dict[str, Any]) -> Found | None:
        filename = entry["filename"]
        if entry.get("yanked"):
            return None
        tags: frozenset[Tag] = frozenset()
        try:
            if filename.endswith(".whl"):
                _, version, _, tags = parse_wheel_filename(filename)
            elif filename.endswith(".tar.gz"):
                version = Version(filename.removesuffix(".tar.gz").rpartition("-")[2])
            else:
                return None
            python = SpecifierSet(entry.get("requires-python") or "")
        except (InvalidWheelFilename, InvalidVersion, InvalidSpecifier):
            return None
        return Found(name, version, filename, urljoin(page, entry["url"]), entry.get("size"), python, tags, self)

    def _open(self, url: str, headers: dict[str, str]) -> tuple[bytes, str]:
        if time.monotonic() >= self._until:
            raise IndexUnavailable(f"it has not told everything within {self._seconds:g} s")
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers), timeout=_REQUEST_SECONDS, context=self._context
            ) as answer:
                return answer.read(), answer.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            kind = NotThere if error.code == 404 else IndexUnavailable
            raise kind(f"it answers {error.code} for {url.rstrip('/').rpartition('/')[2]}") from error
        except OSError as error:
            raise IndexUnavailable(str(getattr(error, "reason", None) or error)) from error


class _Remote(io.RawIOBase):
    """A file of the index that can be read from any place; what was read is kept."""

    def __init__(self, index: PackageIndex, url: str, size: int | None) -> None:
        if size is None:
            raise IndexUnavailable("it does not tell the sizes of its files")
        self._index, self._url, self._size = index, url, size
        self._place = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        block, offset = divmod(self._place, _BLOCK_BYTES)
        if self._place >= self._size:
            return 0
        if block not in self._blocks:
            first = block * _BLOCK_BYTES
            last = min(first + _BLOCK_BYTES, self._size) - 1
            data = self._index.read(self._url, {"Range": f"bytes={first}-{last}"})
            if len(data) != last - first + 1:
                raise IndexUnavailable("it does not serve parts of its files")
            self._blocks[block] = data
        part = self._blocks[block][offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)


def pip_settings() -> dict[str, str]:
    """`index-url`, `cert` and the like of pip's files and environment; the environment wins, as for pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for prefix in ("global.", "install.", ":env:."):
        for line in done.stdout.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = value.strip().strip("'")
    return found


def _default_url() -> str:
    """The index that pip asks when nothing else is configured."""
    script = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise IndexUnavailable("pip does not tell its index")
    return done.stdout.strip()
