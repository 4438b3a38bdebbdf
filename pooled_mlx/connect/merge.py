"""Adding our keys to a client's own configuration file, the rest of it kept as it is."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from pooled_mlx.connect.target import CannotMerge

_BARE = re.compile(r"[A-Za-z0-9_./:@-]+")


def json_text(value: Any) -> str:
    """JSON as people keep it in files."""
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


class JsonMerge:
    """A merge into a JSON object: objects are merged key by key, every other value of ours replaces the old one."""

    def __init__(self, ours: Mapping[str, Any]) -> None:
        self._ours = ours

    def __call__(self, old: str | None) -> str:
        """The merged text. Raises `CannotMerge`."""
        if old is None or not old.strip():
            return json_text(self._ours)
        return json_text(_merged(_json_object(old), self._ours))

    def undo(self, current: str, written: str, original: str | None) -> str | None:
        """`current` without what `written` has changed in `original`. Raises `CannotMerge`."""
        before = _json_object(original) if original and original.strip() else {}
        left = _unmerged(_json_object(current), _json_object(written), before)
        return json_text(left) if left or original is not None else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CannotMerge(f"it is not plain JSON ({error}); add or remove the printed settings by hand") from None
    if not isinstance(value, dict):
        raise CannotMerge("it does not hold a JSON object; add the printed settings by hand")
    return value


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
    by_name = {_name(entry): entry for entry in ours}
    known = {_name(entry) for entry in old}
    return [entry for entry in ours if _name(entry) not in known] + [by_name.get(_name(entry), entry) for entry in old]


def _name(entry: Any) -> str:
    """What tells an entry of a list from the others: its id, or all of it."""
    key = entry["id"] if isinstance(entry, Mapping) and "id" in entry else entry
    return json.dumps(key, sort_keys=True, default=str)


def _unmerged(current: Mapping[str, Any], ours: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """`current` without what is still ours in it; what that had replaced comes back."""
    left = dict(current)
    for key, value in ours.items():
        if key not in left:
            continue
        now, earlier = left[key], before.get(key)
        if isinstance(now, Mapping) and isinstance(value, Mapping):
            now = _unmerged(now, value, earlier if isinstance(earlier, Mapping) else {})
            is_gone = not now and key not in before
        elif isinstance(now, list) and isinstance(value, list):
            old = {_name(entry): entry for entry in earlier} if isinstance(earlier, list) else {}
            names = {_name(entry) for entry in value}
            now = [old.get(_name(entry), entry) for entry in now if _name(entry) not in names or _name(entry) in old]
            is_gone = not now and key not in before
        elif now == value:
            now, is_gone = earlier, key not in before
        else:
            is_gone = False
        if is_gone:
            del left[key]
        else:
            left[key] = now
    return left


class YamlMerge:
    """A merge of top-level keys into a YAML mapping; comments, anchors, order and everything else stay."""

    def __init__(self, ours: Mapping[str, str | int | bool]) -> None:
        self._ours = ours

    def __call__(self, old: str | None) -> str:
        """The merged text. Raises `CannotMerge`."""
        document = _yaml_mapping(old or "")
        document.update(self._ours)
        return _yaml_text(document)

    def undo(self, current: str, written: str, original: str | None) -> str | None:
        """`current` without what `written` has changed in `original`. Raises `CannotMerge`."""
        document, before = _yaml_mapping(current), _yaml_mapping(original or "")
        for key, value in _yaml_mapping(written).items():
            if key not in document or document[key] != value:
                continue
            if key in before:
                document[key] = before[key]
            else:
                del document[key]
        return _yaml_text(document) if document or original is not None else None


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    return yaml


def _yaml_mapping(text: str) -> Any:
    from ruamel.yaml import YAMLError
    from ruamel.yaml.comments import CommentedMap

    try:
        value = _yaml().load(text)
    except YAMLError as error:
        line = str(error).splitlines()[0]
        raise CannotMerge(f"it is not plain YAML ({line}); add or remove the printed settings by hand") from None
    if value is None:
        return CommentedMap()
    if not isinstance(value, CommentedMap):
        raise CannotMerge("it does not hold a YAML mapping; add the printed settings by hand")
    return value


def _yaml_text(document: Any) -> str:
    out = io.StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


def yaml_scalar(value: str | int | bool) -> str:
    """A value as YAML writes it: plain where that is safe, else in double quotes (JSON strings are YAML)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value if _BARE.fullmatch(value) and ": " not in value and not value.endswith(":") else json.dumps(value)


class Replacing:
    """For a file that is ours alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, old: str | None) -> str:
        """Our text."""
        return self._text

    def undo(self, current: str, written: str, original: str | None) -> str | None:
        """Raises `CannotMerge`: whatever was added to the file is somebody's own."""
        raise CannotMerge("it was changed since it was written; remove it by hand if it is not needed")


def shell_lines(env: Mapping[str, str], command: str) -> str:
    """`export` lines and a command, for a shell."""
    return "\n".join([*(f"export {name}={shell_quote(value)}" for name, value in env.items()), command])


def shell_quote(text: str) -> str:
    """`text` as one word of a POSIX shell."""
    return text if re.fullmatch(r"[A-Za-z0-9_./:@%+=,-]+", text) else "'" + text.replace("'", "'\\''") + "'"
