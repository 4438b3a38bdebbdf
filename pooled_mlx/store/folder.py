"""What a model folder must have before it is served, read without loading it: weights, tokenizer, template, no code."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pooled_mlx.store.errors import StoreError

_LARGEST_HEADER = 100_000_000


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder, {} where there is no such file. Raises `StoreError` for a broken one."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{folder / name} cannot be read: {error}. The model is damaged: remove it and download it again"
        ) from error
    if not isinstance(value, dict):
        raise StoreError(f"{folder / name} holds a {type(value).__name__}, it must be a JSON object")
    return value


def check_folder(folder: Path) -> None:
    """Raise `StoreError` unless `folder` is a whole model in mlx-lm's format that needs no code of its own."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder. --model takes a card id, a Hugging Face repo id or a folder with config.json")
    if not (folder / "config.json").is_file():
        raise StoreError(
            f"{folder} has no config.json: it is no model in mlx-lm's format. Convert it first: mlx_lm.convert --help"
        )
    config = read_json(folder, "config.json")
    check_no_code(folder, config)
    if "model_type" not in config:
        raise StoreError(f"{folder}/config.json has no model_type: it is no model in mlx-lm's format")
    for path in weight_files(folder):
        check_safetensors(path)
    if (
        not (folder / "tokenizer.json").is_file()
        and not list(folder.glob("tokenizer*.model"))
        and not list(folder.glob("*.tiktoken"))
    ):
        raise StoreError(f"{folder} has no tokenizer (tokenizer.json): the model is incomplete")
    if chat_template(folder) is None:
        raise StoreError(f"{folder} has no chat template: it is a base model. Use the instruct or chat variant of it")


def check_no_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise `StoreError` for a folder whose model or tokenizer is Python code: it is never run, with no way to allow it."""
    code = sorted(path.name for path in folder.glob("*.py"))
    for name, settings in (("config.json", config), ("tokenizer_config.json", read_json(folder, "tokenizer_config.json"))):
        key = "model_file" if settings.get("model_file") else "auto_map"
        if settings.get("model_file") or (settings.get("auto_map") and code):
            files = f" and there is {', '.join(code)}" if code else ""
            raise StoreError(
                f"{folder} wants to run its own code: {name} has {key} = {settings[key]!r}{files}. Code from a model folder is "
                f"never run. If mlx-lm knows this model type ({config.get('model_type', 'none given')}), delete that entry and "
                "the .py files to serve it without"
            )


def weight_files(folder: Path) -> list[Path]:
    """The weight files of the folder, all of them present. Raises `StoreError` naming the missing ones."""
    index = read_json(folder, "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict) and index:
        names = sorted({str(name) for name in index.values()})
        missing = [name for name in names if not (folder / name).is_file()]
        # A repo that was converted to one file may have kept the old index beside it.
        if not missing or not (folder / "model.safetensors").is_file():
            if missing:
                raise StoreError(
                    f"{folder} is incomplete: {len(missing)} of {len(names)} weight files missing ({missing[0]}, …)"
                )
            return [folder / name for name in names]
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise StoreError(f"{folder} has no weights (model*.safetensors): it is no model in mlx-lm's format, or incomplete")
    return files


def weights_bytes(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum(path.stat().st_size for path in weight_files(folder))


def check_safetensors(path: Path) -> None:
    """Raise `StoreError` when a weight file is cut off or not a safetensors file. Reads its header only."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 0 < length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError("its header is damaged")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, struct.error, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {error}. Remove the model and download it again") from error
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise StoreError(
            f"{path} is damaged: it has {size} bytes, its header says {wanted}. Remove the model and download it again"
        )


def chat_template(folder: Path) -> str | None:
    """The chat template of a model folder (the default one of several), None where it has none."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder, name).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            return named.get("default") or next(iter(named.values()), None)
    return None
