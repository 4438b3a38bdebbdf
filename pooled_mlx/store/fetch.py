"""One large file over HTTP, resumed by byte range after a broken connection and after a killed process.

huggingface_hub resumes inside one call only: its partial files have a new name in every process and are thrown away. So the
weight files, which are nearly all of a model, are fetched here into the hub's own cache; the rest is left to it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.network import is_certificate_error
from pooled_mlx.store.paths import hash_file

ATTEMPTS = 6
"""Tries in a row that bring no byte before a download gives up."""

_PARTIAL = ".partial"
_TIMEOUT_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 20.0


def partial_bytes(target: Path) -> int:
    """Bytes of `target` that an earlier, broken download left."""
    path = target.with_name(target.name + _PARTIAL)
    return path.stat().st_size if path.exists() else 0


def fetch(
    session: Any,
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str | None,
    headers: Mapping[str, str],
    transport_errors: tuple[type[Exception], ...],
    advance: Callable[[int], None],
) -> None:
    """Download `url` to `target`: `size` bytes with this hash (None: not known). `session` is an httpx-like client.

    `advance` is called with the bytes that are there after each block, resumed ones included. A connection that breaks or
    brings nothing for 30 s is made anew, `ATTEMPTS` times in a row. Raises one of `transport_errors` after that, and
    `StoreError` when another process downloads the same file or the hash is wrong.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + _PARTIAL)
    with partial.open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"another process is downloading {target.name} already: wait for it, or end it", temporary=True
            ) from error
        failures = 0
        while (have := out.seek(0, os.SEEK_END)) < size:
            try:
                _read_on(session, url, out, have, headers, advance)
                if out.tell() == have:
                    raise StoreError(f"the server sends nothing more of {url} at byte {have} of {size}", temporary=True)
            except transport_errors as error:
                failures = 0 if out.tell() > have else failures + 1
                advance(out.tell())  # lets a stall be seen
                if failures >= ATTEMPTS or is_certificate_error(error):
                    raise
                time.sleep(min(2.0**failures - 1, _LONGEST_PAUSE_SECONDS))
        out.flush()
        found = hash_file(partial) if sha256 else None
        if have != size or found != sha256:
            partial.unlink()
            raise StoreError(
                f"{target.name} arrived damaged and was deleted: {have} bytes, SHA-256 {found}; "
                f"expected were {size} bytes, SHA-256 {sha256}. Run it again",
                temporary=True,
            )
        os.replace(partial, target)


def _read_on(
    session: Any, url: str, out: IO[bytes], have: int, headers: Mapping[str, str], advance: Callable[[int], None]
) -> None:
    """One connection: append what comes from byte `have` on."""
    wanted = {**headers, "Range": f"bytes={have}-"} if have else dict(headers)
    with session.stream("GET", url, headers=wanted, timeout=_TIMEOUT_SECONDS, follow_redirects=True) as answer:
        answer.raise_for_status()
        if have and answer.status_code != 206:
            out.truncate(0)
            have = 0
        out.seek(have)
        # Without a block size bytes come as the network brings them, so that a broken connection loses none.
        for block in answer.iter_bytes():
            out.write(block)
            out.flush()
            advance(out.tell())
