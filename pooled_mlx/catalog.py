"""The catalog: model cards from TOML files, and the choice among them.

The cards of the package lie in `models/` (package data); `~/.config/pooled-mlx/models/*.toml` adds cards or replaces those
with the same id.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pooled_mlx.core.card import ModelCard, SamplingDefaults, ThinkingRule, WheelSource
from pooled_mlx.core.limits import EFFORTS, MAX_TOP_K
from pooled_mlx.core.memory import format_size

EMBEDDED_CARD = "smollm2-135m"
"""The card that needs no model hub."""

_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_TABLES = {"wheel": WheelSource, "thinking": ThinkingRule, "sampling": SamplingDefaults, "sampling_thinking": SamplingDefaults}


class CatalogError(Exception):
    """A card cannot be read or found; the message says which file and key, and what to do."""


def parse_size(text: str | int) -> int:
    """Bytes of "512 MiB", "20 GB", "4g" or a plain number. Raises ValueError with the accepted forms."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        found = _SIZE.fullmatch(str(text).strip())
        if not found:
            raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
        unit = (found.group(2) or "").upper().removesuffix("B")
        base = 1000 if unit and not unit.endswith("I") and (found.group(2) or "").upper().endswith("B") else 1024
        size = int(float(found.group(1)) * base ** (_UNITS[unit.removesuffix("I")] if unit else 0))
    if size < 0:
        raise ValueError(f"{text!r} is not a size: it is negative")
    return size


def nearest(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest known word, "" when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def builtin_folder() -> Path:
    """The folder of the cards that come with the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "models"
    return inside if inside.is_dir() else package.parent / "models"


def config_folder() -> Path:
    """`$XDG_CONFIG_HOME/pooled-mlx`, by default `~/.config/pooled-mlx`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "pooled-mlx"


def user_folder() -> Path:
    """The folder of the user's own cards."""
    return config_folder() / "models"


def read_card(path: Path) -> ModelCard:
    """The card in one TOML file. Raises `CatalogError` naming the file and the wrong key."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise CatalogError(f"cannot read the model card {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"the model card {path} is not valid TOML: {error}") from error
    return parse_card(table, str(path))


def parse_card(table: Mapping[str, Any], where: str) -> ModelCard:
    """The card in a decoded TOML table; `where` names its file in errors. Raises `CatalogError`."""
    values = dict(table)
    for key in ("weights_bytes", "minimum_memory_bytes", "kv_bytes_per_token", "state_bytes"):
        if key in values:
            values[key] = _size(values[key], f"{where}: {key}")
    for key, shape in _TABLES.items():
        if key in values:
            if not isinstance(values[key], Mapping):
                raise CatalogError(f"{where}: {key} is {values[key]!r}; it must be a table [{key}]")
            values[key] = _build(shape, values[key], f"{where}: [{key}]")
    if "eos_token_ids" in values:
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
    card = _build(ModelCard, values, where)
    _check(card, where)
    return card


def _size(value: Any, where: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise CatalogError(f"{where}: {error}") from error


def _build(shape: Any, table: Mapping[str, Any], where: str) -> Any:
    """`shape(**table)` with errors in the file's words: unknown and missing keys, wrong types."""
    known = {field.name: field for field in fields(shape)}
    for key, value in table.items():
        if key not in known:
            raise CatalogError(f"{where}: unknown key '{key}'.{nearest(key, known)} Known: {', '.join(known)}")
        if not _fits(value, str(known[key].type)):
            raise CatalogError(f"{where}: {key} is {value!r}; it must be {known[key].type}")
    missing = [n for n, f in known.items() if n not in table and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise CatalogError(f"{where}: {', '.join(missing)} missing")
    return shape(**table)


def _fits(value: Any, declared: str) -> bool:
    """True when a TOML value can stand for a field declared as `declared` (the annotations are text)."""
    kind = declared.removesuffix(" | None")
    if kind in ("str", "bool"):
        return isinstance(value, str if kind == "str" else bool)
    if kind in ("int", "float"):
        return not isinstance(value, bool) and isinstance(value, int if kind == "int" else int | float)
    if kind.startswith("Mapping[str, str]"):
        return isinstance(value, Mapping) and all(isinstance(entry, str) for entry in value.values())
    if kind.startswith("Mapping"):
        return isinstance(value, Mapping)
    if kind.startswith("tuple[int"):
        return isinstance(value, tuple) and all(isinstance(entry, int) for entry in value)
    return True


def _check(card: ModelCard, where: str) -> None:
    """What the types do not say."""
    if not _ID.fullmatch(card.id):
        raise CatalogError(f"{where}: id is {card.id!r}; use 1 to 80 of a-z, 0-9, '.', '_', '-', no capital letters")
    sources = [name for name in ("repo", "wheel", "folder") if getattr(card, name) is not None]
    if len(sources) != 1:
        raise CatalogError(f"{where}: {' and '.join(sources) or 'no source'} given; set exactly one of repo, [wheel], folder")
    if not 1 <= card.context_default <= card.context_max:
        raise CatalogError(
            f"{where}: context_default {card.context_default} must be between 1 and context_max ({card.context_max})"
        )
    for name in ("sampling", "sampling_thinking"):
        sampling = getattr(card, name)
        if sampling is not None:
            _check_sampling(sampling, f"{where}: [{name}]")
    thinking = card.thinking
    unknown = [word for word in thinking.efforts if word not in EFFORTS]
    if unknown:
        raise CatalogError(f"{where}: [thinking] efforts has '{unknown[0]}'; the words are {', '.join(EFFORTS)}")
    absent = [word for word in EFFORTS if word not in thinking.efforts]
    if thinking.effort_variable and absent:
        raise CatalogError(f"{where}: [thinking] efforts lacks {', '.join(absent)}: each of the five words needs a value")
    if card.wheel and not re.fullmatch(r"[0-9a-f]{64}", card.wheel.sha256):
        raise CatalogError(f"{where}: [wheel] sha256 is {card.wheel.sha256!r}; it must be 64 hexadecimal digits")


def _check_sampling(sampling: SamplingDefaults, where: str) -> None:
    limits = {"temperature": (0, 2), "top_k": (1, MAX_TOP_K), "top_p": (0, 1), "min_p": (0, 1)}
    for name, (low, high) in limits.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            raise CatalogError(f"{where} {name} is {value}; it must be between {low} and {high}")


@dataclass(frozen=True, slots=True)
class Catalog:
    """All cards by id."""

    cards: Mapping[str, ModelCard]

    def get(self, card_id: str) -> ModelCard | None:
        """The card with this id, also as `pooled/<id>`, the name that clients see; None when there is none."""
        return self.cards.get(card_id.removeprefix("pooled/"))

    def for_repo(self, repo: str) -> ModelCard | None:
        """The card whose weights come from this Hugging Face repo."""
        return next((card for card in self.cards.values() if card.repo and card.repo.lower() == repo.lower()), None)

    def ranked(self) -> list[ModelCard]:
        """All cards, the preferred ones first."""
        return sorted(self.cards.values(), key=lambda card: (-card.rank, card.id))


def load_catalog(*folders: Path) -> Catalog:
    """The cards in these folders, later folders replacing earlier ones; by default the package's and the user's.

    A folder that does not exist is skipped. Raises `CatalogError` for a broken card or an id given twice in one folder.
    """
    cards: dict[str, ModelCard] = {}
    for folder in folders or (builtin_folder(), user_folder()):
        seen: dict[str, Path] = {}
        for path in sorted(folder.glob("*.toml")):
            card = read_card(path)
            if card.id in seen:
                raise CatalogError(f"{path}: the id '{card.id}' is already used by {seen[card.id]}")
            seen[card.id] = path
            cards[card.id] = card
    if not cards:
        raise CatalogError("no model cards found: the package is damaged. Install it again")
    return Catalog(cards)


def pick_default(catalog: Catalog, memory_bytes: int, has_metal: bool) -> ModelCard:
    """The best card for a machine with this much memory; without Metal always the embedded one.

    Raises `CatalogError` when no card fits.
    """
    embedded = catalog.get(EMBEDDED_CARD)
    if not has_metal and embedded is not None:
        return embedded
    for card in catalog.ranked():
        if card.minimum_memory_bytes <= memory_bytes:
            return card
    smallest = min(catalog.cards.values(), key=lambda card: card.minimum_memory_bytes)
    raise CatalogError(
        f"no model fits: this machine has {format_size(memory_bytes)} of memory, the smallest model ({smallest.id}) needs "
        f"{format_size(smallest.minimum_memory_bytes)}"
    )
