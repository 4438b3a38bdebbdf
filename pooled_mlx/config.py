"""Every setting, once: name, type, default, limits, text.

The table is the dataclass `Settings`. From it come the command line's flags, the environment names (POOLED_MLX_*), the keys
of `~/.config/pooled-mlx/config.toml` and docs/settings.md. A value is taken from the flag, else the environment, else the
file, else the default.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import stat
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pooled_mlx.catalog import config_folder, nearest, parse_size
from pooled_mlx.core.memory import format_size

ENV_PREFIX = "POOLED_MLX_"
TOKEN_ENV = "POOLED_TOKEN"


class ConfigError(Exception):
    """A setting is wrong; the message names where it was set, the value, the limit."""


def _setting(
    default: Any, text: str, group: str, *, size: bool = False, low: Any = None, high: Any = None, choices: Any = None
) -> Any:
    facts = {"text": text, "group": group, "size": size, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of the server. None means: chosen at start from the model and the machine."""

    model: str | None = _setting(
        None,
        "Card id, Hugging Face repo or local folder in mlx-lm's format. Default: the best card that fits this machine.",
        "model",
    )
    context: int | None = _setting(
        None, "Context in tokens. Default: what fits the memory, at most the card's default.", "model", low=1024, high=1_048_576
    )
    seed: int | None = _setting(
        None,
        "Seed of all sampling, for tests: the same request gives the same answer. Default: a new one per request.",
        "model",
        low=0,
    )
    deterministic: bool = _setting(False, "One request at a time, so that rounding does not depend on what else runs.", "model")
    replay: str | None = _setting(
        None,
        "Scripted answers from this JSON lines file instead of a model, through the real engine: for testing clients.",
        "model",
    )

    host: str = _setting("127.0.0.1", "Address to listen on. Any but a loopback address needs a token.", "network")
    port: int = _setting(8080, "Port to listen on. 0 takes a free one.", "network", low=0, high=65_535)
    allow_host: tuple[str, ...] = _setting(
        (), "A further value that the Host header may have (host:port). May be given more than once.", "network"
    )
    allow_origin: tuple[str, ...] = _setting(
        (), "An Origin whose web pages may call this server (scheme://host:port). May be given more than once.", "network"
    )
    token: str | None = _setting(
        None, f"Token that clients must send. Visible to other programs: better --token-file or {TOKEN_ENV}.", "network"
    )
    token_file: str | None = _setting(None, f"File with the token. Wins over {TOKEN_ENV} and --token.", "network")

    max_queue: int = _setting(8, "Requests that may wait. More get 429.", "engine", low=0, high=10_000)
    max_running: int = _setting(4, "Requests that are answered at the same time.", "engine", low=1, high=256)
    prefill_step: int | None = _setting(
        None,
        "Tokens of one prefill piece. Default: measured once per machine and model; a piece takes half a second at most.",
        "engine",
        low=32,
        high=8192,
    )
    prefill_share: float = _setting(
        0.33, "Share of its own speed that a running answer keeps while other prompts are read.", "engine", low=0.05, high=0.95
    )
    drafts: str = _setting(
        "off",
        "auto: an answer that repeats what was read takes several tokens a pass, the text is the same; off: one token a pass.",
        "engine",
        choices=("auto", "off"),
    )
    pool_bytes: int | None = _setting(
        None,
        "Memory for the pool of prompt caches (4 GiB, 800 MB). Default: what the memory plan leaves.",
        "engine",
        size=True,
        low=0,
    )
    memory_limit: int | None = _setting(
        None,
        "Memory the server may use in all (24 GiB). Default: what Metal recommends, or most of the memory on Linux.",
        "engine",
        size=True,
        low=2**28,
    )

    wired: str = _setting(
        "auto",
        "What the system may neither swap nor compress: auto wires the weights where they take over 60 % of what Metal allows, "
        "off nothing, weights always the weights. Caches never are, because macOS can panic where wired memory comes and goes.",
        "engine",
        choices=("auto", "off", "weights"),
    )

    self_check: bool = _setting(
        True,
        "Try each model once per version, in the background while nothing is asked: what was read before gives the same "
        "numbers, two answers at a time, a schema. It only reports.",
        "engine",
    )

    keep_awake: bool = _setting(
        True, "Keep the Mac from idle sleep while requests run or a model is made ready. The display may sleep.", "engine"
    )

    log_level: str = _setting(
        "info",
        "How much is logged. Prompts and answers never are below debug.",
        "output",
        choices=("debug", "info", "warning", "error"),
    )
    json_log: bool = _setting(False, "Log one JSON object a line.", "output")
    quiet: bool = _setting(False, "No banner and no line per request.", "output")
    service: bool = _setting(
        False, "Run under a supervisor: what cannot be repaired by a restart is logged and exits with 0.", "output"
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `kind` is str, int, float or bool; `many` True takes a list."""

    name: str
    kind: type
    many: bool
    default: Any
    text: str
    group: str
    size: bool
    low: Any
    high: Any
    choices: tuple[str, ...] | None

    @property
    def flag(self) -> str:
        """`--max-queue`."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """`POOLED_MLX_MAX_QUEUE`; the token has the name that clients know."""
        return TOKEN_ENV if self.name == "token" else ENV_PREFIX + self.name.upper()

    @property
    def secret(self) -> bool:
        """True for a value that is never shown."""
        return self.name == "token"

    def parse(self, value: Any, where: str) -> Any:
        """A value from a flag, variable or file as its own type. Raises `ConfigError` that begins with `where`."""
        if self.many:
            return tuple(self._parse_one(entry, where) for entry in (value.split(",") if isinstance(value, str) else value))
        return self._parse_one(value, where)

    def _parse_one(self, value: Any, where: str) -> Any:
        shown = "the value" if self.secret else repr(value)
        try:
            parsed = self._convert(value)
        except (KeyError, TypeError, ValueError) as error:
            wanted = "a size such as 4 GiB" if self.size else _KIND_NAMES[self.kind]
            raise ConfigError(f"{where}: {shown} is not {wanted}") from error
        if self.choices is not None and parsed not in self.choices:
            raise ConfigError(f"{where}: {shown} is not one of {', '.join(self.choices)}")
        if (self.low is not None and parsed < self.low) or (self.high is not None and parsed > self.high):
            low, high = (format_size(limit) if self.size and limit else limit for limit in (self.low, self.high))
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{where}: {value} must be {limits}")
        return parsed

    def _convert(self, value: Any) -> Any:
        if self.size:
            return parse_size(value)
        if self.kind is bool:
            if isinstance(value, bool):
                return value
            return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
                str(value).strip().lower()
            ]
        if isinstance(value, bool) or (self.kind is str and not isinstance(value, str)) or isinstance(value, list | dict):
            raise TypeError
        if self.kind is int and isinstance(value, float):
            raise TypeError
        return self.kind(value.strip() if isinstance(value, str) else value)


_KIND_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _table() -> dict[str, Setting]:
    hints = get_type_hints(Settings)
    rows: dict[str, Setting] = {}
    for entry in fields(Settings):
        hint = hints[entry.name]
        if get_origin(hint) in (Union, types.UnionType):
            hint = next(option for option in get_args(hint) if option is not type(None))
        many = get_origin(hint) is tuple
        rows[entry.name] = Setting(entry.name, get_args(hint)[0] if many else hint, many, entry.default, **entry.metadata)
    return rows


TABLE: Mapping[str, Setting] = _table()
"""All settings by name, in the order of `Settings`."""

GROUPS = {"model": "Model", "network": "Network and access", "engine": "Engine", "output": "Output"}


def config_file() -> Path:
    """The settings file that is read unless --config names another."""
    return config_folder() / "config.toml"


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """Add the flags of these settings (all by default) to a parser. A flag that is not given leaves no trace."""
    wanted = set(names or TABLE)
    for group, title in GROUPS.items():
        rows = [row for row in TABLE.values() if row.group == group and row.name in wanted]
        if not rows:
            continue
        section = parser.add_argument_group(title)
        for row in rows:
            text = f"{row.text} [{row.env}{'' if row.default in (None, ()) else f', default {row.default}'}]".replace("%", "%%")
            if row.kind is bool:
                section.add_argument(
                    row.flag, dest=row.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
                )
            else:
                section.add_argument(
                    row.flag,
                    dest=row.name,
                    action="append" if row.many else "store",
                    default=argparse.SUPPRESS,
                    metavar="|".join(row.choices) if row.choices else row.name.rpartition("_")[2].upper(),
                    help=text,
                )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=f"settings file [default {config_file()}]")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings with the place that each one came from: "flag", the variable's name, the file's path or "default"."""

    settings: Settings
    origin: Mapping[str, str]


def load_settings(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """The settings in force. `given` are the parsed flags (argparse's namespace as a dict, other keys are ignored).

    Raises `ConfigError` for an unknown key or variable, a wrong value, or an unsafe combination.
    """
    given, environ = given or {}, os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origin = dict.fromkeys(TABLE, "default")
    path = Path(given["config"]).expanduser() if given.get("config") else config_file()
    for name, value in read_file(path, must_exist=bool(given.get("config"))).items():
        values[name], origin[name] = TABLE[name].parse(value, f"{path}: {name}"), str(path)
    for name, value in _from_environment(environ).items():
        values[name], origin[name] = value, TABLE[name].env
    for name, row in TABLE.items():
        if given.get(name) is not None:
            if row.secret and origin[name] == row.env:
                continue  # the variable wins over the flag that every process list shows
            values[name], origin[name] = row.parse(given[name], row.flag), "flag"
    settings = Settings(**values)
    if settings.deterministic and settings.max_running != 1:
        if origin["max_running"] != "default":
            raise ConfigError(
                f"deterministic needs max_running 1, which is set to {settings.max_running} ({origin['max_running']})"
            )
        settings = Settings(**{**values, "max_running": 1})
        origin["max_running"] = origin["deterministic"]
    return Loaded(settings, origin)


def read_file(path: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """The keys of a settings file, {} where there is none. Raises `ConfigError` for an unknown key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if must_exist:
            raise ConfigError(f"there is no settings file {path}") from error
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} is not valid TOML: {error}") from error
    keys = {key.replace("-", "_"): value for key, value in table.items()}
    for key in keys:
        if key not in TABLE:
            raise ConfigError(f"{path}: unknown setting '{key}'.{nearest(key, TABLE)} See pooled-mlx config list")
    return keys


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {row.env: row for row in TABLE.values()}
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        if variable in known:
            if value:
                found[known[variable].name] = known[variable].parse(value, variable)
        elif variable.startswith(ENV_PREFIX):
            raise ConfigError(f"unknown variable {variable}.{nearest(variable, known)} See pooled-mlx config list")
    return found


def resolve_token(settings: Settings) -> str | None:
    """The token that clients must send: that of --token-file, else POOLED_TOKEN, else --token; None without one.

    Raises `ConfigError` for a file that cannot be read or is empty, and for a token that HTTP headers cannot carry.
    """
    token, where = settings.token, "the token"
    if settings.token_file is not None:
        path, where = Path(settings.token_file).expanduser(), f"the token in {settings.token_file}"
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the token file {path}: {getattr(error, 'strerror', None) or error}") from error
        if not token:
            raise ConfigError(f"the token file {path} is empty")
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"{where} has characters that an HTTP header cannot carry: use printable ASCII without spaces")
    return token


def token_file_is_open(settings: Settings) -> bool:
    """True when other users of this machine can read the token file."""
    if settings.token_file is None:
        return False
    try:
        return bool(Path(settings.token_file).expanduser().stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def check_host(settings: Settings, token: str | None) -> None:
    """Raise `ConfigError` when other machines could reach the server and no token is set."""
    if token is None and not is_loopback(settings.host):
        raise ConfigError(
            f"--host {settings.host} lets other machines in, and no token is set. Set one with --token-file, {TOKEN_ENV} or "
            "--token, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def shown(row: Setting, value: Any) -> str:
    """A value for people; secrets are hidden."""
    if value is None or value == ():
        return "-"
    if row.secret:
        return "(set)"
    if row.many:
        return ", ".join(value)
    return str(value).lower() if row.kind is bool else str(value)
