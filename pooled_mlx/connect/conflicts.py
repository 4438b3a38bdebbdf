"""Settings of the user's that win over what we write: found by reading the places where each client looks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pooled_mlx.connect.target import Surroundings

_MOST_PARENTS = 64


def in_environment(around: Surroundings, ours: Mapping[str, str]) -> list[str]:
    """Exported variables that say something else than `ours`."""
    return [
        f"{name} is exported with another value ({_short(around.env[name])}): unset it"
        for name, value in ours.items()
        if around.env.get(name) and around.env[name].rstrip("/") != value.rstrip("/")
    ]


def in_dotenv(paths: Iterable[Path], ours: Mapping[str, str]) -> list[str]:
    """Lines of `.env` files that set one of our variables to something else."""
    found: list[str] = []
    for path in paths:
        for line in _text(path).splitlines():
            name, equals, value = line.strip().removeprefix("export ").partition("=")
            value = value.strip().strip("\"'")
            if equals and name.strip() in ours and value.rstrip("/") != ours[name.strip()].rstrip("/"):
                found.append(f"{path} sets {name.strip()} to another value ({_short(value)}): remove that line")
    return found


def in_json(path: Path, keys: Sequence[str], ours: object) -> list[str]:
    """A value in a JSON file, comments aside, that is there and is not `ours`."""
    try:
        value: Any = json.loads(_text(path) or "{}")
    except ValueError:
        word = f'"{keys[-1]}"'
        return [f"{path} has comments and names {word}: look whether it sets another one"] if word in _text(path) else []
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return [] if value is None or value == ours else [f"{path} sets {'.'.join(keys)} to {_short(value)}: remove it"]


def in_yaml(path: Path, ours: Mapping[str, object]) -> list[str]:
    """Top-level keys of a YAML file that are there and are not `ours`."""
    text = _text(path)
    if not text:
        return []
    from ruamel.yaml import YAML, YAMLError

    try:
        value = YAML(typ="safe").load(text)
    except YAMLError:
        return [f"{path} cannot be read as YAML: look whether it sets {', '.join(ours)}"]
    values = value if isinstance(value, dict) else {}
    return [
        f"{path} sets {key} to {_short(values[key])}: remove that line"
        for key, wanted in ours.items()
        if values.get(key) not in (None, wanted)
    ]


def project_folders(around: Surroundings) -> list[Path]:
    """The working folder and those above it, up to the root of its repository or the home folder."""
    found: list[Path] = []
    for folder in [around.folder, *around.folder.parents][:_MOST_PARENTS]:
        if folder == around.home:
            break
        found.append(folder)
        if (folder / ".git").exists():
            break
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
