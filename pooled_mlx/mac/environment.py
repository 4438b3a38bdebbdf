"""What launchd does not hand on: it starts programs without the variables of a terminal, so those that matter are recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pooled_mlx.config import ENV_PREFIX, TOKEN_ENV

PLACES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "PIP_CONFIG_FILE", "UV_CONFIG_FILE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Variables whose value is a file or folder."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
SECRETS = ("HF_TOKEN", TOKEN_ENV)
OTHERS = ("PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL")
"""PATH too: launchd's own has neither Homebrew's folder nor uv's, and uv fetches wheels where there is no pip."""
_PASSWORD = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The variables that a launchd agent gets, and one line for each that will not do there what it does here."""

    variables: dict[str, str]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """`NAME=value` for people: secrets and passwords are not shown."""
        return [f"{name}={_shown(name, value)}" for name, value in self.variables.items()]


def record(environment: Mapping[str, str], home: Path, without: tuple[str, ...] = ()) -> Recorded:
    """The variables of `environment` that decide what the server does, less those named in `without`.

    `~` at the beginning of a path is written out: launchd and what it starts take it literally.
    """
    names = (*PLACES, *PROXIES, *SECRETS, *OTHERS, *sorted(name for name in environment if name.startswith(ENV_PREFIX)))
    variables = {name: environment[name] for name in names if environment.get(name) and name not in without}
    for name in PLACES:
        if variables.get(name, "").startswith("~/"):
            variables[name] = str(home / variables[name][2:])
    return Recorded(variables, tuple(_warnings(variables)))


def _warnings(variables: Mapping[str, str]) -> Iterator[str]:
    for name in PLACES:
        value = variables.get(name, "")
        if not value:
            continue
        if not Path(value).is_absolute():
            yield f"{name}={value} is relative to this folder, and the service starts in /: set it to an absolute path"
        elif value.startswith("/Volumes/"):
            yield f"{name}={value} is on a disk that may not be there yet when the service starts at login"
        elif value.startswith(("/tmp/", "/private/tmp/", "/var/folders/", "/private/var/folders/")):
            yield f"{name}={value} is in a folder that the system empties"
    for name in SECRETS:
        if name in variables:
            yield f"{name} is written into the agent's file, which only you can read; a changed one needs another install"


def _shown(name: str, value: str) -> str:
    return "…" if name in SECRETS else _PASSWORD.sub("//…@", value)
