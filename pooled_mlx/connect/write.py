"""Doing what a profile says: changing a client's files with a backup, and starting a client with a temporary folder."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pooled_mlx.connect.target import TEMPORARY, CannotMerge, FileChange, Launch, Surroundings


class ConnectError(Exception):
    """A client could not be connected; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Written:
    """One file after `write_changes`. `backup` is the copy of the old one, None where there was none or nothing changed."""

    path: Path
    changed: bool
    backup: Path | None


class Record:
    """What we have written, so that it can be undone: for each file the user's original (a backup) and our text."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def get(self, path: Path) -> dict[str, Any] | None:
        """The entry of a file, None where we have written nothing."""
        return self._all().get(str(path))

    def put(self, path: Path, backup: Path | None, text: str) -> None:
        """Note that `text` is in the file. The first backup stays: it is the user's own."""
        entries = self._all()
        entry = entries.setdefault(str(path), {"backup": str(backup) if backup else None})
        entry["text"] = text
        self._write(entries)

    def drop(self, path: Path) -> None:
        """Forget a file."""
        entries = self._all()
        if entries.pop(str(path), None) is not None:
            self._write(entries)

    def _all(self) -> dict[str, Any]:
        try:
            value = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _write(self, entries: dict[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._file, json.dumps(entries, indent=2) + "\n", None)


def write_changes(changes: Sequence[FileChange], around: Surroundings, record: Record) -> list[Written]:
    """Change the files of a profile; all are merged before the first is written.

    The user's own file is copied to `<name>.before-pooled-<time>` first, once, and no backup is ever written over. New files
    can be read by their owner only, for they may hold a token. Raises `ConnectError`.
    """
    planned = [(path, *_plan(change, path)) for change in changes for path in [locate(change, around)]]
    written: list[Written] = []
    for path, old, new in planned:
        if old == new:
            written.append(Written(path, False, None))
            continue
        known = record.get(path)
        try:
            ours = old is not None and known is not None and known.get("text") == old
            path.parent.mkdir(parents=True, exist_ok=True)
            backup = None if old is None or ours else _backup(path)
            replace_text(path, new, path if old is not None else None)
        except OSError as error:
            raise ConnectError(f"{path} could not be written: {error.strerror or error}") from None
        record.put(path, backup, new)
        written.append(Written(path, True, backup))
    return written


def undo_changes(changes: Sequence[FileChange], around: Surroundings, record: Record) -> list[str]:
    """Take back what `write_changes` did, and say of each file what became of it. Raises `ConnectError`.

    A file that nobody has changed since becomes what it was; in one that was, only our settings go.
    """
    said: list[str] = []
    for change in changes:
        path = locate(change, around)
        entry = record.get(path)
        if entry is None:
            said.append(f"{path}: nothing was written there")
            continue
        try:
            said.append(f"{path}: {_undo(change, path, entry)}")
        except (OSError, UnicodeDecodeError, CannotMerge) as error:
            raise ConnectError(f"{path} was not changed: {error}") from None
        record.drop(path)
    return said


def _undo(change: FileChange, path: Path, entry: Mapping[str, Any]) -> str:
    backup = Path(entry["backup"]) if entry.get("backup") else None
    if not path.exists():
        return "it is gone already"
    current = path.read_text(encoding="utf-8")
    original = backup.read_text(encoding="utf-8") if backup is not None else None
    written = str(entry.get("text", ""))
    if current == written:
        text, what = original, "restored" if original is not None else "removed"
    else:
        text, what = change.merge.undo(current, written, original), "our settings were taken out, your later changes are kept"
    if text is None:
        path.unlink()
    else:
        replace_text(path, text, path)
    if backup is not None:
        backup.unlink()
    return what


def locate(change: FileChange, around: Surroundings) -> Path:
    """The real file: in the folder that the client's own variable names; a link, as dotfile managers make them, stays one."""
    path, moved = change.path, around.env.get(change.variable, "") if change.variable else ""
    if moved:
        base = Path(moved[2:] if moved.startswith("~/") else moved)
        found = (around.home if moved.startswith("~/") else around.folder) / base / path.removeprefix(change.moved).lstrip("/")
    else:
        found = around.home / path[2:] if path.startswith("~/") else around.folder / path
    better = next((found.with_name(name) for name in change.better if found.with_name(name).exists()), found)
    return Path(os.path.realpath(better))


def _plan(change: FileChange, path: Path) -> tuple[str | None, str]:
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else None
        return old, change.merge(old)
    except (OSError, UnicodeDecodeError, CannotMerge) as error:
        raise ConnectError(f"{path} was not changed: {error}") from None


def _backup(path: Path) -> Path:
    stem = f"{path.name}.before-pooled-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    backup = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    shutil.copy2(path, backup)
    return backup


def replace_text(path: Path, text: str, mode_of: Path | None) -> None:
    """Write a file in one step, with the mode of `mode_of`, else for its owner alone."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    if mode_of is not None:
        shutil.copymode(mode_of, name)
    os.replace(name, path)


def launch(start: Launch, more: Sequence[str], install: str, host: str, environment: Mapping[str, str] | None = None) -> int:
    """Run the client until it ends; its exit code. `host` is where our server is: no proxy stands before it.

    Raises `ConnectError` when the client is not installed, or when an argument would take the place of one of ours.
    """
    env = dict(os.environ if environment is None else environment)
    taken = next((word for word in more if word.partition("=")[0] in start.own_options), None)
    if taken is not None:
        raise ConnectError(f"{taken} cannot be given behind --run: the address of this server is given with it")
    program = shutil.which(start.argv[0], path=env.get("PATH"))
    if program is None:
        raise ConnectError(f"{start.argv[0]} is not installed (not in PATH). Install it with: {install}")
    for name in start.without:
        env.pop(name, None)
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(dict.fromkeys([*filter(None, env.get(name, "").split(",")), host, "127.0.0.1", "localhost"]))
    with tempfile.TemporaryDirectory(prefix="pooled-mlx-") as temporary:
        for name, text in start.files.items():
            path = Path(temporary, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

        def here(text: str) -> str:
            return text.replace(TEMPORARY, temporary)

        argv = [program, *map(here, start.argv[1:]), *more]
        env |= {name: here(value) for name, value in start.env.items()}
        return subprocess.call(argv, env=env)
