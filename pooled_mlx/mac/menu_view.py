"""What the menu shows: a pure function from what is known to a `Menu`."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Literal

from pooled_mlx.mac.facts import Running, ServerFacts
from pooled_mlx.mac.menu import Item, Menu, line
from pooled_mlx.mac.runs import Crash
from pooled_mlx.mac.supervisor import SupervisorState
from pooled_mlx.mac.words import bytes_text, count_text, percent_text, plural, seconds_text

SHOWN_REQUESTS = 5
LONGEST_LINE = 100
SHOWN_CRASH_SECONDS = 24 * 3600.0

Owner = Literal["nobody", "child", "former child", "service", "somebody"]
"""Who runs the server: nobody yet, this menu bar, an earlier one, launchd, or somebody in a terminal."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One card of the catalog, as `pooled-mlx models list --json` gives it. `why` says why it does not fit."""

    id: str
    label: str
    size_bytes: float | None = None
    on_disk: bool = False
    fits: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Everything the menu depends on."""

    facts: ServerFacts = field(default_factory=ServerFacts)
    base_url: str = "http://127.0.0.1:8080"
    owner: Owner = "nobody"
    service_installed: bool = False
    child: SupervisorState = "off"
    restart_seconds: float = 0.0
    problem: str = ""
    crash: Crash | None = None
    models: tuple[ModelChoice, ...] = ()
    chosen_model: str | None = None
    agents: tuple[tuple[str, str], ...] = ()
    at_login: bool = False
    has_token: bool = False
    version: str = ""
    note: str = ""
    now: float = 0.0


def build_menu(view: View) -> Menu:
    """The menu for what is known now."""
    groups = {
        "state": _state_group(view),
        "requests": _request_group(view),
        "server": _server_group(view),
        "copy": _copy_group(view),
        "open": [Item("page", "Open status page", action=view.facts.answers), Item("log", "Open log")],
        "leave": [Item("login", "Launch at login", checked=view.at_login), Item("quit", _quit_text(view))],
    }
    items: list[Item] = []
    for name, group in groups.items():
        if items and group:
            items.append(line(name))
        items += group
    return Menu(title(view), tuple(items))


def with_problem(menu: Menu, text: str) -> Menu:
    """`menu` with `text` above everything, for what went wrong while the next menu was made."""
    return Menu("▲", (_note("problem", text), *(item for item in menu.items if item.id != "problem")))


def title(view: View) -> str:
    """The few characters in the menu bar itself."""
    facts = view.facts
    if facts.ready:
        decoding = [request for request in facts.requests if request.state == "decode"]
        prefilling = [request for request in facts.requests if request.state == "prefill"]
        speed = _speed(facts)
        if decoding and speed:
            return f"● {speed:.0f} t/s"
        if prefilling:
            return f"● {percent_text(prefilling[0].prefill_done, prefilling[0].prefill_total)}".rstrip()
        return "●"
    if facts.state in ("downloading", "loading"):
        return f"◔ {_progress_percent(facts)}".rstrip()
    if _wrong(view):
        return "▲"
    return "◔" if view.child == "running" else "○"


def state_text(view: View) -> str:
    """The first line of the menu."""
    facts = view.facts
    if facts.ready:
        parts = [f"{facts.running} running"] if facts.running else []
        parts += [f"{facts.queued} queued"] if facts.queued else []
        return " · ".join(["Ready", *parts])
    if facts.state == "downloading":
        return f"Downloading {_download_text(facts)}".rstrip()
    if facts.state == "loading":
        return f"Loading {_progress_percent(facts)}".rstrip()
    if facts.state == "locked":
        return "Running, but it wants a token that is not known here"
    if facts.answers:
        return f"{facts.state.capitalize()}{f': {facts.reason}' if facts.reason else ''}"
    if view.child == "waiting":
        return f"Crashed, starts again in {seconds_text(view.restart_seconds)}"
    if view.child in ("running", "stopping"):
        return "Starting" if view.child == "running" else "Stopping"
    if view.problem:
        return view.problem
    if facts.state in ("foreign", "silent"):
        return facts.reason.capitalize()
    return "Stopped"


def _state_group(view: View) -> list[Item]:
    facts = view.facts
    items = [_note("state", state_text(view))]
    if facts.model_label:
        parts = [facts.model_label]
        if facts.quantization and facts.quantization != "none":
            parts.append(facts.quantization)
        if facts.context_tokens:
            parts.append(f"{count_text(facts.context_tokens)} tokens")
        items.append(_note("model", " · ".join(parts)))
    pool, budget = facts.memory.get("pool_bytes"), facts.memory.get("pool_budget_bytes")
    figures = [f"{speed:.0f} tokens/s"] if (speed := _speed(facts)) else []
    if pool is not None and budget:
        figures.append(f"pool {bytes_text(pool)} of {bytes_text(budget)}")
    if figures:
        items.append(_note("figures", " · ".join(figures)))
    if facts.version and view.version and facts.version != view.version:
        items.append(
            Item(
                "upgrade",
                f"Version {facts.version} runs, {view.version} is installed: restart",
                action=view.owner in ("child", "former child", "service"),
            )
        )
    if view.problem and state_text(view) != view.problem:
        items.append(_note("problem", view.problem))
    if view.crash is not None and view.now - view.crash.at < SHOWN_CRASH_SECONDS:
        at = time.strftime("%H:%M", time.localtime(view.crash.at))
        how = view.crash.summary.split(": ", 1)[1]
        items.append(Item("crash", f"Last crash {at}: {how}"))
    if view.note:
        items.append(_note("note", view.note))
    return items


def _request_group(view: View) -> list[Item]:
    rows = view.facts.requests
    items = [_note(f"request.{number}", request_text(row)) for number, row in enumerate(rows[:SHOWN_REQUESTS])]
    if len(rows) > SHOWN_REQUESTS:
        items.append(_note("request.more", f"and {plural(len(rows) - SHOWN_REQUESTS, 'more request')}"))
    return items


def request_text(row: Running) -> str:
    """One request, in one line."""
    if row.state == "queued":
        return f"{row.client}: waiting{f', {row.ahead} ahead' if row.ahead else ''}"
    if row.state == "prefill":
        share = percent_text(row.prefill_done, row.prefill_total)
        return f"{row.client}: reading {share} of {count_text(row.prefill_total)} tokens"
    speed = f", {row.tokens_per_second:.0f} tokens/s" if row.tokens_per_second else ""
    return f"{row.client}: {count_text(row.generated)} tokens written{speed}"


def _server_group(view: View) -> list[Item]:
    facts = view.facts
    ours = view.owner in ("child", "former child", "service")
    up = facts.answers or view.child in ("running", "stopping", "waiting")
    items: list[Item] = []
    if not up:
        items.append(Item("start", "Start server", action=facts.state == "stopped"))
    elif ours:
        items += [Item("stop", "Stop server"), Item("restart", "Restart server")]
    else:
        items.append(_note("elsewhere", "Started elsewhere: stop it where it was started"))
    if view.models:
        items.append(_model_menu(view, may_pick=ours or not up))
    return items


def _model_menu(view: View, may_pick: bool) -> Item:
    current = view.facts.model_card or view.chosen_model
    children = []
    for model in view.models:
        parts = [model.label]
        if model.size_bytes:
            parts.append(bytes_text(model.size_bytes))
        if not model.fits:
            parts.append(_why_short(model.why))
        elif model.on_disk:
            parts.append("on disk")
        children.append(
            Item(
                f"pick.{model.id}",
                " · ".join(parts),
                action=may_pick and (model.fits or model.id == current),
                checked=model.id == current,
            )
        )
    return Item("models", "Model", action=False, children=tuple(children))


def _copy_group(view: View) -> list[Item]:
    items = [
        Item("copy.openai", f"Copy base URL ({view.base_url}/v1)"),
        Item("copy.anthropic", f"Copy base URL for Anthropic clients ({view.base_url})"),
    ]
    if view.has_token:
        items.append(Item("copy.token", "Copy token"))
    if view.agents:
        children = tuple(Item(f"connect.{agent}", label) for agent, label in view.agents)
        items.append(Item("agents", "Copy settings for", action=False, children=children))
    return items


def _quit_text(view: View) -> str:
    return "Quit (the server keeps running)" if view.facts.answers else "Quit"


def _why_short(why: str) -> str:
    """The first number of a long explanation: `needs 24.0 GiB`."""
    found = re.search(r"needs [\d.,]+ [KMGT]i?B", why)
    return found.group() if found else "does not fit"


def _note(item_id: str, text: str) -> Item:
    first = text.splitlines()[0] if text else text
    return Item(item_id, first if len(first) <= LONGEST_LINE else f"{first[: LONGEST_LINE - 1]}…", action=False)


def _wrong(view: View) -> bool:
    return (
        view.facts.state in ("failed", "foreign", "silent", "locked")
        or view.child in ("waiting", "ended")
        or bool(view.problem)
    )


def _speed(facts: ServerFacts) -> float | None:
    if facts.tokens_per_second:
        return facts.tokens_per_second
    speeds = [row.tokens_per_second for row in facts.requests if row.state == "decode" and row.tokens_per_second]
    return sum(speeds) or None


def _progress_percent(facts: ServerFacts) -> str:
    return percent_text(facts.progress.done_bytes, facts.progress.total_bytes) if facts.progress else ""


def _download_text(facts: ServerFacts) -> str:
    progress = facts.progress
    if progress is None or progress.done_bytes is None:
        return ""
    parts = [f"{bytes_text(progress.done_bytes)} of {bytes_text(progress.total_bytes)}"]
    if progress.bytes_per_second:
        parts.append(f"{bytes_text(progress.bytes_per_second)}/s")
    if progress.seconds_left is not None:
        parts.append(f"{seconds_text(progress.seconds_left)} left")
    return " · ".join(parts)
