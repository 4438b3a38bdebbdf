"""How launchd starts pooled-mlx again, and whether that will still work tomorrow."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

UV_INSTALL = "uv tool install --managed-python 'pooled-mlx[menubar]'"
PIPX_INSTALL = "pipx install 'pooled-mlx[menubar]'"
_UV_CACHE = re.compile(r"/(?:archive|environments|builds)-v\d+/")
_PIPX_CACHE = re.compile(r"/\.cache/pipx/|/Caches/pipx/|/\.cache/[0-9a-f]{15}/")
_GUARDED = ("Documents", "Desktop", "Downloads", "Library/Mobile Documents")
"""Folders of the home folder that macOS lets no program read that was not allowed to."""


class ProgramPathError(Exception):
    """The program will not be there when it is started again; the message has the command that helps."""


def program_command(argv0: str | None = None, executable: str = sys.executable) -> list[str]:
    """How to start pooled-mlx again: the console script where there is one, since it survives upgrades, else the module."""
    argv0 = sys.argv[0] if argv0 is None else argv0
    script = Path(argv0)
    if script.name == "pooled-mlx":
        found = str(script.absolute()) if script.exists() else shutil.which("pooled-mlx")
        if found and os.access(found, os.X_OK):
            return [found]
    return [executable, "-m", "pooled_mlx"]


def check_program(program: Sequence[str], *more: str) -> None:
    """Refuse a program, or one of the paths in `more`, that lies in the cache of uvx or `pipx run`: caches are emptied.

    Raises `ProgramPathError`.
    """
    for path in (program[0], *more):
        for runner, cache, install in (("uvx", _UV_CACHE, UV_INSTALL), ("pipx run", _PIPX_CACHE, PIPX_INSTALL)):
            if cache.search(f"{path}/"):
                raise ProgramPathError(
                    f"this pooled-mlx runs from the cache of {runner} ({path}), which is emptied from time to time: "
                    f"run {install}, and then this command again"
                )


def guarded_folder(paths: Sequence[str], home: Path) -> str | None:
    """One line about the first of `paths` that launchd's programs may not read, None without one."""
    for path in paths:
        for name in _GUARDED:
            if Path(path).is_relative_to(home / name):
                return (
                    f"{path} is below {home / name}, which macOS keeps from programs that start at login: "
                    "install pooled-mlx outside of it, or allow the Python in System Settings, Privacy & Security, "
                    "Files & Folders"
                )
    return None
