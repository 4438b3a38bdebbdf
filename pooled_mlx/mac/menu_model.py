"""The menu bar without the menu bar: it looks at the server, starts and stops it, and does what the items say.

One thread owns a `MenuModel`: it calls `poll` about once a second and `act` for every click. `menu` may be read from any
thread; it is a value that is replaced as a whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pooled_mlx.mac.facts import ServerFacts
from pooled_mlx.mac.launchd import LaunchdError
from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.menu import Menu
from pooled_mlx.mac.menu_view import ModelChoice, Owner, View, build_menu, with_problem
from pooled_mlx.mac.places import Places, write_private
from pooled_mlx.mac.program import ProgramPathError
from pooled_mlx.mac.runs import Run, is_alive, last_crash, note_exit, read_refusal, read_run
from pooled_mlx.mac.supervisor import Child, Exit, Supervisor

MODELS_EVERY_SECONDS = 300.0
SERVICE_EVERY_SECONDS = 15.0
NOTE_SECONDS = 6.0


class ServiceControl(Protocol):
    """The launchd service, as `mac.service.Service` offers it."""

    @property
    def installed(self) -> bool: ...  # noqa: D102
    def running(self) -> bool: ...  # noqa: D102
    def start(self) -> None: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102
    def restart(self) -> None: ...  # noqa: D102
    def set_model(self, card_id: str) -> None: ...  # noqa: D102


class Desktop(Protocol):
    """What the menu does outside of the server. Every method raises OSError when it cannot."""

    def copy(self, text: str) -> None:
        """Put `text` on the clipboard."""
        ...

    def open(self, target: str) -> None:
        """Open an address or a file."""
        ...

    def at_login(self) -> bool:
        """True when the menu bar starts at login."""
        ...

    def set_at_login(self, on: bool) -> None:
        """Switch that."""
        ...

    def quit(self) -> None:
        """Leave; the server keeps running."""
        ...


class Commands(Protocol):
    """Our own command line. Both raise OSError with a readable message when the command fails."""

    def models(self) -> Any:
        """The decoded output of `models list --json`."""
        ...

    def connect(self, agent: str) -> str:
        """The settings of one agent."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a `MenuModel` works with. `launch` starts a server with the given card id, or the default model for None."""

    where: Places
    server: LocalServer
    launch: Callable[[str | None], Child]
    service: ServiceControl
    desktop: Desktop
    commands: Commands
    version: str
    agents: Sequence[tuple[str, str]] = ()
    terminate: Callable[[int], None] = lambda _: None
    alive: Callable[[Run], bool] = is_alive
    read_token: Callable[[], str | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time


@dataclass(slots=True)
class _State:
    auto_start: bool = True
    start_when_gone: bool = False
    problem: str = ""
    note: str = ""
    note_until: float = 0.0
    models: tuple[ModelChoice, ...] = ()
    models_at: float | None = None
    chosen: str | None = None
    at_login: bool = False
    facts: ServerFacts = field(default_factory=ServerFacts)
    owner: Owner = "nobody"
    service_runs: bool = False
    service_at: float | None = None


class MenuModel:
    """See the module. It attaches to whatever answers `/health` and starts a child only if nothing does."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._state = _State(chosen=_read_choice(parts.where))
        self._supervisor = Supervisor(lambda: parts.launch(self._state.chosen), on_exit=self._child_ended, clock=parts.clock)
        self.menu: Menu = build_menu(self._view())

    def poll(self) -> Menu:
        """Look at everything once and do what is due."""
        state = self._state
        self._parts.server.token = self._parts.read_token()
        self._supervisor.tick()
        state.facts = self._parts.server.health()
        if state.facts.answers or state.facts.state in ("foreign", "silent"):
            state.auto_start = state.auto_start and not state.facts.answers
        elif state.auto_start or state.start_when_gone:
            self._begin()
        self._look_around()
        return self._show()

    def look(self) -> Menu:
        """Look at everything once and start nothing."""
        self._state.auto_start = False
        return self.poll()

    def act(self, item_id: str) -> Menu:
        """Do what an item says. What goes wrong is shown in the menu; nothing is raised."""
        state = self._state
        state.problem = ""
        try:
            self._act(item_id)
        except (OSError, LaunchdError, ProgramPathError) as error:
            state.problem = str(error)
        state.service_at = None
        return self._show()

    def complain(self, text: str) -> None:
        """Show what kept `poll` or `act` from their end, until the next one that gets there."""
        self.menu = with_problem(self.menu, text)

    # --- actions

    def _act(self, item_id: str) -> None:
        verb, _, rest = item_id.partition(".")
        if verb == "start":
            self._start()
        elif verb == "stop":
            self._stop()
        elif verb in ("restart", "upgrade"):
            self._restart()
        elif verb == "pick":
            self._pick(rest)
        elif verb == "copy":
            self._copy(rest)
        elif verb == "connect":
            self._parts.desktop.copy(self._parts.commands.connect(rest))
            self._say(f"Copied the settings for {dict(self._parts.agents).get(rest, rest)}")
        elif verb == "page":
            self._parts.desktop.open(f"{self._parts.server.base_url}/")
        elif verb in ("log", "crash"):
            self._open_log()
        elif verb == "login":
            self._parts.desktop.set_at_login(not self._state.at_login)
            self._state.at_login = self._parts.desktop.at_login()
        elif verb == "quit":
            self._parts.desktop.quit()

    def _begin(self) -> None:
        """Start what should run and does not: the service if it is installed, else a child."""
        state = self._state
        former = read_run(self._parts.where)
        if state.start_when_gone and former is not None and former.ended_at is None and self._parts.alive(former):
            return
        state.auto_start = state.start_when_gone = False
        try:
            if not self._parts.service.installed:
                self._supervisor.start()
            elif not self._parts.service.running():
                self._parts.service.start()
        except LaunchdError as error:
            state.problem = str(error)

    def _start(self) -> None:
        if self._parts.service.installed:
            self._parts.service.start()
        else:
            self._supervisor.start()

    def _stop(self) -> None:
        self._state.auto_start = self._state.start_when_gone = False
        if self._state.owner == "service":
            self._parts.service.stop()
        elif self._state.owner == "former child":
            self._end_former_child()
        else:
            self._supervisor.stop()

    def _restart(self) -> None:
        if self._state.owner == "service":
            self._parts.service.restart()
        elif self._state.owner == "former child":
            self._end_former_child()
            self._state.start_when_gone = True
        else:
            self._supervisor.restart()

    def _pick(self, card_id: str) -> None:
        state = self._state
        state.chosen = card_id
        write_private(_choice_file(self._parts.where), json.dumps({"model": card_id}).encode())
        if self._parts.service.installed:
            self._parts.service.set_model(card_id)
        elif state.owner in ("child", "former child"):
            self._restart()
        elif not state.facts.answers:
            self._supervisor.start()

    def _copy(self, what: str) -> None:
        base = self._parts.server.base_url
        text = {"openai": f"{base}/v1", "anthropic": base, "token": self._parts.read_token() or ""}[what]
        self._parts.desktop.copy(text)
        self._say("Copied the token" if what == "token" else f"Copied {text}")

    def _open_log(self) -> None:
        log = self._parts.where.server_log
        if not log.exists():
            self._say("There is no log yet")
            return
        self._parts.desktop.open(str(log))

    def _end_former_child(self) -> None:
        former = read_run(self._parts.where)
        if former is not None and self._parts.alive(former):
            self._parts.terminate(former.pid)

    # --- looking

    def _owner(self) -> Owner:
        if self._supervisor.pid is not None or self._supervisor.state == "waiting":
            return "child"
        if self._parts.service.installed and (not self._state.facts.answers or self._service_runs()):
            return "service"
        if not self._state.facts.answers:
            return "nobody"
        former = read_run(self._parts.where)
        if former is not None and former.ended_at is None and self._parts.alive(former):
            return "former child"
        return "somebody"

    def _service_runs(self) -> bool:
        """Asked now and then only: it takes a process."""
        state, now = self._state, self._parts.clock()
        if state.service_at is None or now - state.service_at >= SERVICE_EVERY_SECONDS:
            state.service_at = now
            try:
                state.service_runs = self._parts.service.running()
            except LaunchdError as error:
                state.problem = str(error)
        return state.service_runs

    def _look_around(self) -> None:
        state, now = self._state, self._parts.clock()
        if state.models_at is None or now - state.models_at >= MODELS_EVERY_SECONDS:
            state.models_at = now
            try:
                state.models = read_models(self._parts.commands.models())
                state.at_login = self._parts.desktop.at_login()
            except OSError as error:
                state.problem = str(error)

    def _child_ended(self, end: Exit) -> None:
        note_exit(self._parts.where, end.pid, 0 if end.wanted else end.code, self._parts.wall_clock)

    def _say(self, text: str) -> None:
        self._state.note = text
        self._state.note_until = self._parts.clock() + NOTE_SECONDS

    def _show(self) -> Menu:
        self._state.owner = self._owner()
        self.menu = build_menu(self._view())
        return self.menu

    def _view(self) -> View:
        state, parts = self._state, self._parts
        refusal = None if state.facts.answers else read_refusal(parts.where)
        problem = self._supervisor.problem or state.problem or (f"Refused to start: {refusal.reason}" if refusal else "")
        return View(
            facts=state.facts,
            base_url=parts.server.base_url,
            owner=state.owner,
            service_installed=parts.service.installed,
            child=self._supervisor.state,
            restart_seconds=self._supervisor.seconds_to_restart,
            problem=problem,
            crash=last_crash(parts.where, parts.alive),
            models=state.models,
            chosen_model=state.chosen,
            agents=tuple(parts.agents),
            at_login=state.at_login,
            has_token=parts.server.token is not None,
            version=parts.version,
            note=state.note if parts.clock() < state.note_until else "",
            now=parts.wall_clock(),
        )


def read_models(listing: Any) -> tuple[ModelChoice, ...]:
    """The choices in the output of `models list --json`. Entries without an id are left out."""
    rows = listing.get("models") if isinstance(listing, dict) else listing
    choices = []
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            choice = ModelChoice(row["id"], row.get("label") or row["id"])
            size = row.get("weights_bytes")
            choices.append(
                replace(
                    choice,
                    size_bytes=size if isinstance(size, int | float) else None,
                    on_disk=bool(row.get("on_disk")),
                    fits=row.get("fits") is not False,
                    why=row.get("why") or "",
                )
            )
    return tuple(choices)


def _choice_file(where: Places) -> Any:
    return where.state / "menubar.json"


def _read_choice(where: Places) -> str | None:
    try:
        choice = json.loads(_choice_file(where).read_bytes()).get("model")
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    return choice if isinstance(choice, str) else None
