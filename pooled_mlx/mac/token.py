"""The token file: made once, readable by its owner alone."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

TOKEN_BYTES = 24


class TokenFileError(Exception):
    """The token file cannot be used; the message says why and what to do."""


def ensure_token(path: Path) -> bool:
    """Make the token file if there is none; True when it was made.

    Raises `TokenFileError` for a file that others can read, that is empty, or that is no plain file.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        read_token(path)
        return False
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    return True


def read_token(path: Path) -> str:
    """The token in `path`. Raises FileNotFoundError, or `TokenFileError` as `ensure_token` does."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise TokenFileError(f"{path} is not a plain file: remove it, or name another one")
    if facts.st_mode & 0o077:
        raise TokenFileError(
            f"{path} can be read by others (mode {stat.S_IMODE(facts.st_mode):04o}, must be 0600): run chmod 600 {path}"
        )
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise TokenFileError(f"{path} is empty: remove it, and a new token is made")
    return token
