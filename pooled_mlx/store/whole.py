"""What of a model folder is missing, cut off or damaged, and how to complete it. Reads headers and small files only."""

from __future__ import annotations

import json
import re
import shlex
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    INDEX,
)
_TOKENIZERS = ("tokenizer.json", "tokenizer*.model", "*.tiktoken")
_SHARD = re.compile(r"(model.*)-(\d{5})-of-(\d{5})\.safetensors")
_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_HEADER = 100_000_000
_MOST_NAMES = 30


@dataclass(frozen=True, slots=True)
class Faults:
    """Files of a model that are `missing`, of them `weights_missing` of `weights` weight files, and what is wrong with others
    by their names. `mixed` tells of shards that belong to different models. False when the folder is whole."""

    missing: tuple[str, ...] = ()
    weights_missing: int = 0
    weights: int = 0
    wrong: Mapping[str, str] = field(default_factory=dict)
    mixed: str = ""

    def __bool__(self) -> bool:
        return bool(self.missing or self.wrong or self.mixed)

    def __str__(self) -> str:
        weights, others = self.missing[: self.weights_missing], self.missing[self.weights_missing :]
        parts = [f"{len(weights)} of {self.weights} weight files missing ({_listed(weights)})"] if weights else []
        parts += [f"{name} is missing" for name in others]
        parts += _cut([f"{name} {text}" for name, text in self.wrong.items()])
        return "; ".join([*parts, self.mixed] if self.mixed else parts)


def find_faults(folder: Path) -> Faults:
    """What is missing or damaged in the files that a server reads. A folder that is no model at all has no faults here."""
    wrong: dict[str, str] = {}
    present, missing, mixed = _weight_names(folder)
    files = [*present, *(name for name in _JSON_FILES if (folder / name).is_file()), "chat_template.jinja"]
    files += sorted(path.name for pattern in _TOKENIZERS for path in folder.glob(pattern))
    for name in files:
        if (folder / name).is_file() and (text := _fault(folder / name)):
            wrong[name] = text
    count = len(present) + len(missing)
    # Without weights it may be another kind of model, which lacks nothing but a conversion.
    others = ["config.json"] if count and not (folder / "config.json").is_file() else []
    return Faults((*missing, *others), len(missing), count, wrong, mixed)


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer of a known kind."""
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS)


def weight_names(folder: Path) -> list[str]:
    """The names of the weight files that are there."""
    return _weight_names(folder)[0]


def _weight_names(folder: Path) -> tuple[list[str], list[str], str]:
    """Weight files that are there, those that are not, and what is wrong with the set: by the index, else by the names."""
    found = sorted(path.name for path in folder.glob("model*.safetensors"))
    named = _index_names(folder)
    missing = [name for name in named if not (folder / name).is_file()]
    # A repo that was converted to one file may have kept the old index and some of its shards.
    if named and not (missing and "model.safetensors" in found):
        return [name for name in named if name not in missing], missing, ""
    sets: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, found)):
        sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    if "model.safetensors" in found:
        return found, [], ""
    if len(sets) > 1:
        texts = [f"{len(numbers)} named {prefix}-…-of-{total:05}" for (prefix, total), numbers in sorted(sets.items())]
        return found, [], f"its weight files belong to different sets ({', '.join(texts)}): remove what does not belong there"
    absent = [
        f"{prefix}-{number:05}-of-{total:05}.safetensors"
        for (prefix, total), numbers in sets.items()
        for number in sorted(set(range(1, total + 1)) - numbers)
    ]
    return found, absent, ""


def _index_names(folder: Path) -> list[str]:
    """The weight files that the index names, [] without one that can be read."""
    try:
        table = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in table.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _fault(path: Path) -> str | None:
    """What is wrong with one file, None when nothing is seen."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
            if size == 0:
                return "is damaged: it is empty"
            if begin == _POINTER:
                return "is no more than a Git LFS pointer to the file"
            file.seek(0)
            if path.suffix == ".safetensors":
                return _weights_fault(file, size)
            if path.name == "tokenizer.json":  # large: a cut file shows at its end
                file.seek(max(size - 64, 0))
                return None if file.read().rstrip().endswith(b"}") else "is damaged: it breaks off"
            if path.suffix == ".json":
                value = json.loads(file.read())
                return None if isinstance(value, dict) else f"holds a {type(value).__name__}, it must be a JSON object"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return f"is damaged: {error}"
    return None


def _weights_fault(file: Any, size: int) -> str | None:
    """What is wrong with a safetensors file: its header against its size."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 0 < length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError("its header is damaged")
        header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError, struct.error, AttributeError) as error:
        return f"is damaged: {error}"
    return None if size == wanted else f"is damaged: it has {size} bytes, its header says {wanted}"


def way_on(folder: Path, faults: Faults) -> str:
    """The command that completes the folder."""
    names = [*faults.missing, *faults.wrong]
    if not names:
        return ""
    if repo := hub_repo(folder):
        return f"pooled-mlx models pull {repo} fetches what is missing or damaged, and nothing else"
    where = shlex.quote(str(folder))
    if (folder / ".git").exists() and any("Git LFS" in text for text in faults.wrong.values()):
        return f"git -C {where} lfs pull fetches the files"
    command = ["hf download OWNER/NAME", *(map(shlex.quote, names) if len(names) <= _MOST_NAMES else ()), "--local-dir", where]
    if faults.wrong:
        command.append("--force-download")
    return "Copy them again from where the folder came from; where that is a Hugging Face repo: " + " ".join(command)


def hub_repo(folder: Path) -> str | None:
    """The repo of a folder in the hub's cache, None for any other."""
    for part, below in zip(folder.parts, folder.parts[1:], strict=False):
        if part.startswith("models--") and below == "snapshots":
            return part.removeprefix("models--").replace("--", "/", 1)
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_cut(list(names)))


def _cut(texts: list[str]) -> list[str]:
    more = len(texts) - _MOST_NAMES
    return texts if more <= 0 else [*texts[:_MOST_NAMES], f"and {more} more"]
