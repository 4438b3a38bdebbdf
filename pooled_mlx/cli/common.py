"""What several commands need: refusals, the model's resolution, progress on the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pooled_mlx.catalog import Catalog, CatalogError, load_catalog
from pooled_mlx.choice import judge, pick_default
from pooled_mlx.config import ConfigError, Settings
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import Wired
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.store import StoreError, resolve_model
from pooled_mlx.store.ensure import local_folder
from pooled_mlx.store.paths import cache_folder

if TYPE_CHECKING:
    from pooled_mlx.core.memory import DeviceFacts
    from pooled_mlx.prompt.call_form import CallForm


class Refused(Exception):
    """The command cannot be done; the message is for the user. `temporary`: the same may work later without a change."""

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary


def plainly(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command whose refusals are one line on standard error and exit code 1."""

    def wrapped(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (Refused, ConfigError, CatalogError, StoreError) as error:
            print(f"pooled-mlx {args.command}: {error}", file=sys.stderr)
            return 1

    return wrapped


def choose_card(settings: Settings, catalog: Catalog, facts: DeviceFacts) -> ModelCard:
    """The card of --model, or the best one for this machine under --memory-limit. Raises `StoreError`, `CatalogError`."""
    if settings.model:
        return resolve_model(settings.model, catalog)
    return pick_default(catalog, facts, partial(judge, limit_bytes=settings.memory_limit))


def check_fit(facts: DeviceFacts, limit_bytes: int | None) -> Callable[[ModelCard], None]:
    """A check for `ensure_model`: refuses a model whose weights this machine cannot hold."""
    from pooled_mlx.core.memory import refuse_weights

    def check(card: ModelCard) -> None:
        if text := refuse_weights(facts, card.weights_bytes, card.id, limit_bytes):
            raise StoreError(text)

    return check


def convert(source: Path, target: Path) -> None:
    """GGUF to a model folder on this thread. Raises `StoreError`."""
    from pooled_mlx.runner.model import finish_work
    from pooled_mlx.store.gguf import GgufError, convert_gguf

    try:
        convert_gguf(source, target)
    except GgufError as error:
        raise StoreError(str(error)) from error
    finally:
        finish_work()


def engine_settings(settings: Settings, *, limit_bytes: int | None = None) -> EngineSettings:
    """The engine's part of the settings; `limit_bytes` takes the place of --memory-limit."""
    return EngineSettings(
        context_tokens=settings.context,
        max_queue=settings.max_queue,
        max_running=settings.max_running,
        prefill_step=settings.prefill_step,
        prefill_share=settings.prefill_share,
        drafts=settings.drafts == "auto",
        pool_bytes=settings.pool_bytes,
        memory_limit_bytes=limit_bytes or settings.memory_limit,
        wired=cast(Wired, settings.wired),
        seed=settings.seed,
        steps_file=cache_folder() / "steps.json",
    )


def call_form_of(card: ModelCard) -> CallForm | None:
    """How this model's tool calls are read, None where that is known after its download only. Raises `StoreError`."""
    from pooled_mlx.prompt.call_form import CallForm, folder_call_form
    from pooled_mlx.prompt.tokens import TokenizerError

    if card.chat_format is not None:
        return CallForm(card.chat_format, True)
    folder = local_folder(card)
    try:
        return None if folder is None else folder_call_form(folder)
    except TokenizerError as error:
        raise StoreError(str(error)) from error


def load_user_catalog() -> Catalog:
    """The package's and the user's cards. Raises `CatalogError`."""
    return load_catalog()


def table(rows: list[tuple[Any, ...]], heads: tuple[str, ...]) -> str:
    """Rows as aligned columns under their heads."""
    texts = [heads, *(tuple("" if cell is None else str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts)
