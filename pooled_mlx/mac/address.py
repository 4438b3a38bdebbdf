"""Where the server of this user is: the same settings that `serve` reads, and the token of the service."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from pooled_mlx.config import TABLE, TOKEN_ENV, ConfigError, add_flags, load_settings
from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.places import Places
from pooled_mlx.mac.token import TokenFileError, read_token

_NAMES = ("host", "port", "token_file")


class AddressError(Exception):
    """The address or token of the server cannot be made out; the message says what is wrong."""


def add_address_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the server is, and `--config`."""
    add_flags(parser, _NAMES)


def given_options(args: argparse.Namespace, names: tuple[str, ...] = _NAMES) -> list[str]:
    """The address flags that were given, as words for another of our commands."""
    words: list[str] = []
    for name in (*names, "config"):
        value = getattr(args, name, None)
        if value is not None:
            words += [TABLE[name].flag if name in TABLE else "--config", str(value)]
    return words


def server_from(args: argparse.Namespace, where: Places, environment: Mapping[str, str] | None = None) -> LocalServer:
    """The server that flags, environment and settings file mean. Raises `AddressError`."""
    environment = os.environ if environment is None else environment
    try:
        settings = load_settings(vars(args), environment).settings
    except ConfigError as error:
        raise AddressError(str(error)) from error
    url = f"http://{reachable(settings.host)}:{settings.port}"
    return LocalServer(url, find_token(settings.token_file, where, environment))


def reachable(host: str) -> str:
    """The address to connect to for an address that is listened on, ready for a URL."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return str(address) if address.version == 4 else f"[{address}]"


def find_token(token_file: str | None, where: Places, environment: Mapping[str, str] | None = None) -> str | None:
    """The token: of the named file, of `POOLED_TOKEN`, of the service's file; None without any. Raises `AddressError`."""
    environment = os.environ if environment is None else environment
    try:
        if token_file:
            return read_token(Path(token_file).expanduser())
        if environment.get(TOKEN_ENV):
            return environment[TOKEN_ENV]
        return read_token(where.token_file)
    except FileNotFoundError:
        if token_file:
            raise AddressError(f"the token file {token_file} does not exist") from None
        return None
    except (TokenFileError, OSError) as error:
        raise AddressError(str(error)) from error
