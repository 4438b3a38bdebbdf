"""What a model folder must have before it is served, read without loading it: weights, tokenizer, template, no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.whole import Faults, find_faults, has_tokenizer, way_on, weight_names


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder, {} where there is no such file. Raises `StoreError` for a broken one."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / name} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{folder / name} holds a {type(value).__name__}, it must be a JSON object")
    return value


def check_folder(folder: Path) -> None:
    """Raise `StoreError` unless `folder` is a whole model in mlx-lm's format that needs no code of its own."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder. --model takes a card id, a Hugging Face repo id or a folder with config.json")
    if faults := find_faults(folder):
        raise StoreError(not_whole(folder, faults))
    if not (folder / "config.json").is_file():
        raise StoreError(
            f"{folder} has no config.json: it is no model in mlx-lm's format. Convert it first: mlx_lm.convert --help"
        )
    config = read_json(folder, "config.json")
    check_no_code(folder, config)
    if "model_type" not in config:
        raise StoreError(f"{folder}/config.json has no model_type: it is no model in mlx-lm's format")
    if not weight_names(folder):
        raise StoreError(f"{folder} has no weights (model*.safetensors): it is no model in mlx-lm's format, or incomplete")
    if not has_tokenizer(folder):
        raise StoreError(not_whole(folder, Faults(("tokenizer.json",))))
    if not chat_template(folder):
        raise StoreError(f"{folder} has no chat template: it is a base model. Use the instruct or chat variant of it")


def not_whole(folder: Path, faults: Faults) -> str:
    """What to tell the user of a folder with faults."""
    return ". ".join(filter(None, (f"{folder} is not whole: {faults}", way_on(folder, faults))))


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


def weights_bytes(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum((folder / name).stat().st_size for name in weight_names(folder))


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
