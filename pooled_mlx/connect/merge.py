"""Adding our keys to a client's own configuration file, the rest of it kept as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pooled_mlx.connect.target import CannotMerge

_BARE = re.compile(r"[A-Za-z0-9_./:@-]+")


def json_text(value: Any) -> str:
    """JSON as people keep it in files."""
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def into_json(ours: Mapping[str, Any]) -> Callable[[str | None], str]:
    """A merge into a JSON object: objects are merged key by key, every other value of ours replaces the old one."""

    def merge(old: str | None) -> str:
        if old is None or not old.strip():
            return json_text(ours)
        try:
            value = json.loads(old)
        except ValueError as error:
            raise CannotMerge(f"it is not plain JSON ({error}); add the printed settings by hand") from None
        if not isinstance(value, dict):
            raise CannotMerge("it does not hold a JSON object; add the printed settings by hand")
        return json_text(_merged(value, ours))

    return merge


def _merged(old: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in ours.items():
        earlier = merged.get(key)
        if isinstance(earlier, dict) and isinstance(value, Mapping):
            merged[key] = _merged(earlier, value)
        elif isinstance(earlier, list) and isinstance(value, list):
            merged[key] = _merged_lists(earlier, value)
        else:
            merged[key] = value
    return merged


def _merged_lists(old: list[Any], ours: list[Any]) -> list[Any]:
    """Entries with the same `id` are replaced in their place; ours that are new come first."""
    ids = {entry.get("id"): entry for entry in ours if isinstance(entry, Mapping) and "id" in entry}
    kept = [ids.pop(entry["id"], entry) if isinstance(entry, Mapping) and "id" in entry else entry for entry in old]
    return [entry for entry in ours if not isinstance(entry, Mapping) or entry.get("id") in ids or "id" not in entry] + kept


def yaml_scalar(value: str | int | bool) -> str:
    """A value as YAML writes it: plain where that is safe, else in double quotes (JSON strings are YAML)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value if _BARE.fullmatch(value) and ": " not in value and not value.endswith(":") else json.dumps(value)


def into_flat_yaml(ours: Mapping[str, str | int | bool]) -> Callable[[str | None], str]:
    """A merge into a YAML file of plain `key: value` lines: our keys replace their old lines, new ones go to the end."""

    def merge(old: str | None) -> str:
        lines = (old or "").splitlines()
        missing = dict(ours)
        for index, line in enumerate(lines):
            key = line.split(":", 1)[0]
            if key in missing:
                lines[index] = f"{key}: {yaml_scalar(missing.pop(key))}"
        lines += [f"{key}: {yaml_scalar(value)}" for key, value in missing.items()]
        return "\n".join(lines) + "\n"

    return merge


def replacing(text: str) -> Callable[[str | None], str]:
    """For a file that is ours alone."""
    return lambda old: text


def shell_lines(env: Mapping[str, str], command: str) -> str:
    """`export` lines and a command, for a shell."""
    return "\n".join([*(f"export {name}={shell_quote(value)}" for name, value in env.items()), command])


def shell_quote(text: str) -> str:
    """`text` as one word of a POSIX shell."""
    return text if re.fullmatch(r"[A-Za-z0-9_./:@%+=,-]+", text) else "'" + text.replace("'", "'\\''") + "'"
