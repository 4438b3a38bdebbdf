"""`pooled-mlx models`: list, show, pull, rm."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pooled_mlx.catalog import Catalog, pick_default
from pooled_mlx.cli.common import Refused, call_form_of, check_fit, convert, load_user_catalog, plainly, table
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import format_size
from pooled_mlx.store import ensure_model, resolve_model
from pooled_mlx.store.ensure import disk_state, remove_model, verify_model

if TYPE_CHECKING:
    from pooled_mlx.core.memory import DeviceFacts

_UNKNOWN_KV_BYTES = 131_072  # per token, where neither a card nor a loaded model says it: a dense model of 30 layers


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("models", help="list, show, download and remove models")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    entry = actions.add_parser("list", help="all cards: size, whether it fits this machine, what is on disk")
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
        _list(catalog, read_device(), as_json=args.json)
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


def fits(card: ModelCard, facts: DeviceFacts) -> tuple[int | None, str]:
    """(context in tokens that this machine can hold, "") or (None, why the model does not fit)."""
    from pooled_mlx.core.memory import CacheShape, DoesNotFitError, loaded_bytes, plan_memory

    shape = CacheShape(card.kv_bytes_per_token or _UNKNOWN_KV_BYTES, card.state_bytes)
    weights = loaded_bytes(card.weights_bytes, facts.has_metal)
    context, default = card.context_max, card.context_default
    try:
        plan = plan_memory(facts, weights, shape, context_max=context, context_default=default, model=card.id)
        return plan.context_tokens, ""
    except DoesNotFitError as error:
        return None, str(error)


def facts_of(card: ModelCard, facts: DeviceFacts) -> dict[str, Any]:
    """What `models list --json` says of one card."""
    context, why = fits(card, facts)
    state, size = disk_state(card)
    return {
        "id": card.id,
        "label": card.label,
        "weights_bytes": card.weights_bytes,
        "minimum_memory_bytes": card.minimum_memory_bytes,
        "context_max": card.context_max,
        "fits": context is not None,
        "context_tokens": context,
        "why": why,
        "on_disk": state == "ready",
        "disk": state,
        "disk_bytes": size,
    }


def _list(catalog: Catalog, facts: DeviceFacts, *, as_json: bool) -> None:
    rows = [facts_of(card, facts) for card in catalog.ranked()]
    default = pick_default(catalog, facts.memory_bytes, facts.has_metal).id
    if as_json:
        print(json.dumps({"default": default, "models": rows}, indent=1))
        return
    print(f"{facts.name}: {format_size(facts.memory_bytes)} of memory, {format_size(facts.limit_bytes)} for a model\n")
    cells = [
        (
            row["id"] + (" *" if row["id"] == default else ""),
            format_size(row["weights_bytes"]) if row["weights_bytes"] else "?",
            format_size(row["minimum_memory_bytes"]) if row["minimum_memory_bytes"] else "?",
            f"{row['context_tokens']:,} tokens" if row["fits"] else "no",
            {"ready": "yes", "partial": f"part, {format_size(row['disk_bytes'])}", "absent": "-"}[row["disk"]],
            row["label"],
        )
        for row in rows
    ]
    print(table(cells, ("MODEL", "SIZE", "MEMORY", "FITS WITH", "ON DISK", "NAME")))
    print("\n* the default here. pooled-mlx models show MODEL says more, and why one does not fit.")


def _show(card: ModelCard, facts: DeviceFacts, *, verify: bool) -> None:
    row = facts_of(card, facts)
    source = card.repo or card.folder or (card.wheel and f"{card.wheel.project} {card.wheel.version} (package index)")
    thinking = "no"
    if card.thinking.supported:
        thinking = "yes, with effort levels" if card.thinking.effort_variable else "yes"
    lines = [
        ("id", card.id),
        ("name", card.label),
        ("source", source),
        ("license", card.license or "not stated"),
        ("size", format_size(card.weights_bytes) if card.weights_bytes else "known after a download"),
        ("memory", f"at least {format_size(card.minimum_memory_bytes)}" if card.minimum_memory_bytes else "not stated"),
        ("context", f"{card.context_default:,} by default, {card.context_max:,} at most"),
        ("this machine", f"fits with {row['context_tokens']:,} tokens" if row["fits"] else row["why"]),
        ("on disk", f"{row['disk']}, {format_size(row['disk_bytes'])}"),
        ("thinking", thinking),
        ("tool calls", _tool_calls(card)),
        ("sampling", _sampling(card, thinking=False)),
    ]
    if card.thinking.supported:
        lines.append(("  thinking", _sampling(card, thinking=True)))
    print("\n".join(f"{name:<13} {text}" for name, text in lines))
    if verify:
        print(f"{'verified':<13} {verify_model(card)}")


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
    with TerminalBar() as bar:
        ready = ensure_model(card, convert=convert, report=bar, check_fit=check, refresh=True)
    print(f"{ready.card.id} is ready in {ready.folder}")
