"""`pooled-mlx doctor --deep`: the model is loaded and tried, and one report is written that can be attached to an issue."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pooled_mlx import __version__
from pooled_mlx.cli.common import Refused, check_fit, choose_card, convert, engine_settings, load_user_catalog, plainly
from pooled_mlx.config import load_settings
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.memory import DeviceFacts, format_size, refuse_weights
from pooled_mlx.mac.address import AddressError, server_from
from pooled_mlx.mac.facts import ServerFacts
from pooled_mlx.mac.places import places
from pooled_mlx.store import ensure_model
from pooled_mlx.store.paths import cache_folder
from pooled_mlx.store.progress import TerminalBar

if TYPE_CHECKING:
    from pooled_mlx.cli.checks import Outcome
    from pooled_mlx.engine.engine import LocalEngine

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "llguidance", "huggingface-hub", "numpy")
_PRIVATE_FIELDS = ("folder", "label", "sources", "unconfirmed")
_MARKS = {"ok": "ok  ", "note": "note", "failed": "BAD "}


@plainly
def run_deep(args: argparse.Namespace) -> int:
    """Load the model, try it, write the report; 1 when a check failed. Raises `Refused`, `StoreError`."""
    from pooled_mlx.engine.engine import open_engine
    from pooled_mlx.runner.devices import read_device
    from pooled_mlx.runner.start import MlxSource

    settings = load_settings(vars(args)).settings
    facts = read_device()
    card = choose_card(settings, load_user_catalog(), facts)
    try:
        server = server_from(args, places())
    except AddressError as error:
        raise Refused(str(error)) from error
    limit = room_beside(server.health(), server.base_url, card, facts, settings.memory_limit)
    with TerminalBar() as bar:
        ready = ensure_model(card, convert=convert, report=bar, check_fit=check_fit(facts, limit or settings.memory_limit))
    say = (lambda text: print(text, file=sys.stderr)) if args.json else print
    say(f"loading {ready.card.id}; this takes about two minutes")
    began = time.perf_counter()
    engine = open_engine(ready.card, ready.folder, engine_settings(settings, limit_bytes=limit), MlxSource())
    try:
        if not engine.wait_ready():
            reason = str(engine.health()["reason"])
            raise Refused(reason if limit is None else f"{reason} (a server at {server.base_url} holds the rest)")
        load_seconds = time.perf_counter() - began
        say(engine.plan.table())
        outcomes = asyncio.run(_try(engine, say))
        report = make_report(ready.card, facts, engine, outcomes, load_seconds=load_seconds, beside_a_server=limit is not None)
    finally:
        engine.stop()
    report = without_paths(report, [ready.folder])
    path = Path(args.report).expanduser() if args.report else cache_folder() / "reports" / _file_name(ready.card, report)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused(f"the report cannot be written to {path}: {error.strerror}") from error
    if args.json:
        print(text)
    say(f"report: {path}")
    return int(not report["ok"])


async def _try(engine: LocalEngine, say: Any) -> list[Outcome]:
    from pooled_mlx.cli.checks import Checker, deep
    from pooled_mlx.runner.model import forget_peak

    forget_peak()
    outcomes: list[Outcome] = []
    async for outcome in deep(Checker(engine), engine.health()["memory"]["active_bytes"]):
        outcomes.append(outcome)
        say(f"{_MARKS[outcome.state]}  {outcome.name:<13} {outcome.text}")
    return outcomes


def room_beside(server: ServerFacts, url: str, card: ModelCard, facts: DeviceFacts, limit_bytes: int | None) -> int | None:
    """The memory limit beside a server that runs here: what it holds now is not ours. None where none runs.

    Raises `Refused` where the two do not fit, and where that cannot be known.
    """
    if not server.answers:
        return None
    if text := refuse_weights(facts, card.weights_bytes, card.id, limit_bytes):
        raise Refused(text)  # the server is not the reason
    stop = "End it first (Ctrl-C, or pooled-mlx service stop), then run this again"
    held = int(
        max(server.memory.get("active_bytes", 0) + server.memory.get("cache_bytes", 0), server.memory.get("process_bytes", 0))
    )
    if not server.ready or not held:
        raise Refused(f"a server at {url} is {server.state}, and what memory it takes is not known. {stop}")
    left = min(limit_bytes or facts.limit_bytes, facts.limit_bytes - held)
    if left <= 0 or refuse_weights(facts, card.weights_bytes, card.id, left):
        raise Refused(
            f"a server at {url} holds {format_size(held)} with {server.model_card}, and {card.id} does not fit beside it "
            f"({format_size(facts.limit_bytes)} may be used in all). {stop}"
        )
    return left


def make_report(
    card: ModelCard,
    facts: DeviceFacts,
    engine: LocalEngine,
    outcomes: Sequence[Outcome],
    *,
    load_seconds: float,
    beside_a_server: bool,
) -> dict[str, Any]:
    """What is worth knowing of machine, model, plan and checks, as JSON."""
    health = engine.health()
    return {
        "report": "pooled-mlx doctor --deep",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "ok": all(outcome.state != "failed" for outcome in outcomes),
        "versions": versions(),
        "machine": {
            "system": f"macOS {platform.mac_ver()[0]}"
            if sys.platform == "darwin"
            else f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            **asdict(facts),
        },
        "model": {
            "quantization_in_memory": health["model"]["quantization"],
            "chat_format": health["model"]["chat_format"],
            "local_folder": card.folder is not None,
            "load_seconds": round(load_seconds, 1),
            "beside_a_server": beside_a_server,
        },
        "card": {key: value for key, value in asdict(card).items() if key not in _PRIVATE_FIELDS},
        "plan": {**engine.plan.facts(), "limits": asdict(engine.plan.limits), "wired_bytes": health["memory"]["wired_bytes"]},
        "cuts": {item.name: getattr(engine.loop.pool.rule, item.name) for item in fields(engine.loop.pool.rule)},
        "checks": [asdict(outcome) for outcome in outcomes],
    }


def versions() -> dict[str, str]:
    """Our version, Python's, and those of the packages that decide the numbers."""
    found = {"pooled-mlx": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def without_paths(report: Mapping[str, Any], folders: Sequence[Path] = ()) -> dict[str, Any]:
    """The report without paths that name the user: error texts may have some."""
    known = [(str(folder), "MODEL") for folder in folders] + [(str(Path.home()), "~")]

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for path, name in known:
                value = value.replace(path, name)
            return re.sub(r"/(?:Users|home|Volumes)/[^/\s'\"]+", "~", value)
        if isinstance(value, Mapping):
            return {key: clean(entry) for key, entry in value.items()}
        return [clean(entry) for entry in value] if isinstance(value, list | tuple) else value

    return clean(report)


def _file_name(card: ModelCard, report: Mapping[str, Any]) -> str:
    made = re.sub(r"\D", "", report["made"])[:14]
    return f"{card.id}-{made}.json"
