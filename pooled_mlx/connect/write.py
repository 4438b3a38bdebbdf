"""Doing what a profile says: changing a client's files with a backup, and starting a client with a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pooled_mlx.connect.target import TEMPORARY, CannotMerge, FileChange, Launch


class ConnectError(Exception):
    """A client could not be connected; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Written:
    """One file after `write_changes`. `backup` is the copy of the old one, None where there was none or nothing changed."""

    path: Path
    changed: bool
    backup: Path | None


def write_changes(changes: Sequence[FileChange], home: Path, folder: Path) -> list[Written]:
    """Change the files of a profile; all are merged before the first is written.

    Each old file is copied to `<name>.before-pooled-<time>` first. New files can be read by their owner only, for they may
    hold a token. Raises `ConnectError`.
    """
    planned = [(path, *_plan(change, path)) for change in changes for path in [_locate(change.path, home, folder)]]
    written: list[Written] = []
    for path, old, new in planned:
        if old == new:
            written.append(Written(path, False, None))
            continue
        try:
            written.append(Written(path, True, _write(path, old, new)))
        except OSError as error:
            raise ConnectError(f"{path} could not be written: {error.strerror or error}") from None
    return written


def _locate(path: str, home: Path, folder: Path) -> Path:
    """The real file: a symbolic link, as dotfile managers make them, stays one."""
    found = home / path[2:] if path.startswith("~/") else folder / path
    return Path(os.path.realpath(found))


def _plan(change: FileChange, path: Path) -> tuple[str | None, str]:
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else None
        return old, change.merge(old)
    except (OSError, UnicodeDecodeError, CannotMerge) as error:
        raise ConnectError(f"{path} was not changed: {error}") from None


def _write(path: Path, old: str | None, new: str) -> Path | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = None
    if old is not None:
        backup = path.with_name(f"{path.name}.before-pooled-{time.strftime('%Y%m%d-%H%M%S')}")
        shutil.copy2(path, backup)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
        file.write(new)
    if old is not None:
        shutil.copymode(path, name)
    os.replace(name, path)
    return backup


def launch(start: Launch, more: Sequence[str], install: str, environment: Mapping[str, str] | None = None) -> int:
    """Run the client until it ends; its exit code. Raises `ConnectError` when it is not installed."""
    program = shutil.which(start.argv[0], path=(environment or os.environ).get("PATH"))
    if program is None:
        raise ConnectError(f"{start.argv[0]} is not installed (not in PATH). Install it with: {install}")
    with tempfile.TemporaryDirectory(prefix="pooled-mlx-") as temporary:
        for name, text in start.files.items():
            path = Path(temporary, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

        def here(text: str) -> str:
            return text.replace(TEMPORARY, temporary)

        argv = [program, *map(here, start.argv[1:]), *more]
        env = {**(environment or os.environ), **{name: here(value) for name, value in start.env.items()}}
        return subprocess.call(argv, env=env)
