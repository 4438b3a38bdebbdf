"""Where the server of this user is: port and token from the flags, the environment, the settings file, the default."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.places import Places
from pooled_mlx.mac.token import TokenFileError, read_token

DEFAULT_PORT = 8080


class AddressError(Exception):
    """The address or token of the server cannot be made out; the message says what is wrong."""


def add_address_options(parser: argparse.ArgumentParser) -> None:
    """Add `--port` and `--token-file`."""
    parser.add_argument("--port", type=int, default=None, help=f"port of the server (default: settings, then {DEFAULT_PORT})")
    parser.add_argument(
        "--token-file", default=None, help="file with the server's token (default: POOLED_TOKEN, then the service's)"
    )


def server_from(args: argparse.Namespace, where: Places, environment: Mapping[str, str] = os.environ) -> LocalServer:
    """The server that the options mean. Raises `AddressError`."""
    settings = read_settings(where.config / "config.toml")
    port = args.port
    if port is None:
        port = _port(environment.get("POOLED_MLX_PORT"), "POOLED_MLX_PORT")
    if port is None:
        port = _port(settings.get("port"), f"port in {where.config / 'config.toml'}")
    token_file = args.token_file or environment.get("POOLED_MLX_TOKEN_FILE") or settings.get("token_file")
    return LocalServer(f"http://127.0.0.1:{port or DEFAULT_PORT}", find_token(token_file, where, environment))


def find_token(token_file: str | None, where: Places, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token: of the named file, of `POOLED_TOKEN`, of the service's file; None without any. Raises `AddressError`."""
    try:
        if token_file:
            return read_token(Path(token_file).expanduser())
        if environment.get("POOLED_TOKEN"):
            return environment["POOLED_TOKEN"]
        return read_token(where.token_file)
    except FileNotFoundError:
        if token_file:
            raise AddressError(f"the token file {token_file} does not exist") from None
        return None
    except (TokenFileError, OSError) as error:
        raise AddressError(str(error)) from error


def read_settings(path: Path) -> Mapping[str, Any]:
    """The settings file; empty without one. Raises `AddressError` when it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AddressError(f"{path} is not valid TOML: {error}") from error


def _port(value: Any, where: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        port = int(value)
    except (TypeError, ValueError):
        raise AddressError(f"{where} is {value!r}: it must be a number from 1 to 65535") from None
    if not 1 <= port <= 65535:
        raise AddressError(f"{where} is {port}: it must be from 1 to 65535")
    return port
