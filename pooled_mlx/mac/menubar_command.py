"""`pooled-mlx menubar`: the server in the Mac's menu bar."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.mac.address import AddressError, add_address_options, given_options, server_from
from pooled_mlx.mac.app_bundle import remove_app, undrawable, write_app
from pooled_mlx.mac.desktop import MENUBAR_LABEL, MacDesktop, OwnCommands, launch_server, menubar_agent
from pooled_mlx.mac.environment import record
from pooled_mlx.mac.launchd import Launchctl, LaunchdError, write_agent
from pooled_mlx.mac.menu import render_text
from pooled_mlx.mac.menu_model import MenuModel, Parts
from pooled_mlx.mac.places import Places, places
from pooled_mlx.mac.program import UV_INSTALL, ProgramPathError, check_program, guarded_folder, program_command
from pooled_mlx.mac.rumps_shell import RumpsShell, Worker
from pooled_mlx.mac.service import Service

DESCRIPTION = """\
Shows the server in the menu bar (macOS, with the extra `pooled-mlx[menubar]`): state, speed, cache, progress; starts, stops
and restarts it, picks the model, copies addresses and the settings of agents, opens the status page and the log.

It attaches to a server that answers already and starts one only if none does. With an installed service it uses launchd.
A server that crashes is started again, with growing pauses. Quitting the menu bar leaves the server running.

`install` makes an app that Spotlight finds and that runs the menu bar with this Python; `install --login` starts it at login
too; `uninstall` removes both. On macOS 26 a Python of Homebrew or python.org cannot show it: one that uv installs can.
"""

AGENTS = (
    ("claude", "Claude Code"),
    ("codex", "Codex"),
    ("opencode", "opencode"),
    ("qwen", "Qwen Code"),
    ("cline", "Cline"),
    ("continue", "Continue"),
    ("aider", "aider"),
    ("pi", "pi"),
    ("open-webui", "Open WebUI"),
    ("litellm", "LiteLLM"),
    ("curl", "curl"),
)
"""What `pooled-mlx connect` knows, and how the menu calls it."""


def add(subparsers: Any) -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "menubar",
        help="show the server in the menu bar (macOS)",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("install", "uninstall"),
        help="make the app ~/Applications/pooled-mlx.app, or remove it; without an action the menu bar is shown",
    )
    add_address_options(parser)
    parser.add_argument("--text", action="store_true", help="print the menu as text once, start nothing, on any system")
    parser.add_argument("--login", action="store_true", help="with install: also at login")
    parser.set_defaults(run=run)


def load_modules() -> tuple[Any, Any, Any]:
    """rumps, AppKit and Foundation. Raises ImportError."""
    rumps, appkit, foundation = (importlib.import_module(name) for name in ("rumps", "AppKit", "Foundation"))
    return rumps, appkit, foundation


def run(
    args: argparse.Namespace,
    *,
    platform: str = sys.platform,
    where: Places | None = None,
    load: Callable[[], tuple[Any, Any, Any]] = load_modules,
    write: Callable[[str], None] = print,
    obstacle: Callable[[], str | None] = undrawable,
    launchctl: Launchctl | None = None,
    home: Path | None = None,
) -> int:
    """Run the command; returns the exit code. The keyword arguments are for tests."""
    where = where or places(platform=platform)
    try:
        if args.text:
            write(render_text(make_model(args, where, lambda: None).look()))
            return 0
        if platform != "darwin":
            raise RefusedError("it needs macOS. Elsewhere use `pooled-mlx status --watch` or the status page")
        if args.action == "uninstall":
            write(uninstall(where, launchctl or Launchctl(), home or Path.home()))
            return 0
        if problem := obstacle():
            raise RefusedError(problem)
        try:
            modules = load()
        except ImportError as error:
            raise RefusedError(f"{error.name or 'rumps'} is not installed. Run {UV_INSTALL}") from error
        if args.action == "install":
            for line in install(args, where, launchctl or Launchctl(), home or Path.home()):
                write(line)
        else:
            show(args, where, *modules)
    except (AddressError, LaunchdError, ProgramPathError, RefusedError, OSError) as error:
        print(f"pooled-mlx menubar: {error}", file=sys.stderr)
        return 1
    return 0


class RefusedError(Exception):
    """The menu bar cannot be shown here; the message says why and what to do."""


def install(args: argparse.Namespace, where: Places, launchctl: Launchctl, home: Path) -> Iterator[str]:
    """Make the app, and the login item if it is wished or there; yields the lines to print.

    Raises `LaunchdError`, `ProgramPathError`, `AddressError` and OSError.
    """
    server_from(args, where)  # wrong settings are refused now, not where nobody reads it
    program = program_command()
    check_program(program, sys.prefix)
    recorded = record(os.environ, home)
    agent = menubar_agent(program, where, given_options(args), recorded.variables)
    agent.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    launchctl.unload(agent.label)
    yield f"App       {write_app(home, agent)}"
    yield f"Runs      {' '.join(agent.command)}"
    yield f"Log       {agent.log}"
    for number, line in enumerate(recorded.lines()):
        yield f"{'' if number else 'Recorded':<10}{line}"
    for line in (*recorded.warnings, guarded_folder((program[0], sys.prefix, str(Path(__file__).resolve())), home)):
        if line:
            yield f"Warning   {line}"
    if args.login or where.agent_file(agent.label).exists():
        yield f"At login  {write_agent(agent, where)}"
    yield "Start it from Spotlight (pooled-mlx) or with: open -a pooled-mlx"


def uninstall(where: Places, launchctl: Launchctl, home: Path) -> str:
    """Remove app and login item and end the menu bar; the server keeps running. Raises `LaunchdError` and OSError."""
    launchctl.unload(MENUBAR_LABEL)
    item = where.agent_file(MENUBAR_LABEL)
    there = item.exists()
    item.unlink(missing_ok=True)
    there = remove_app(home) or there
    return "App and login item are removed. A server that runs keeps running." if there else "No app is installed."


def show(args: argparse.Namespace, where: Places, rumps: Any, appkit: Any, foundation: Any) -> None:
    """Show the menu until the user quits it."""
    leave: list[Callable[[], None]] = []
    model = make_model(args, where, lambda: leave[0]())
    worker = Worker(model)
    shell = RumpsShell(rumps, appkit, foundation, lambda: worker.menu, worker.click)
    leave.append(shell.quit)
    worker.start()
    shell.run()


def make_model(args: argparse.Namespace, where: Places, leave: Callable[[], None]) -> MenuModel:
    """The model over the real parts. Raises `AddressError`."""
    server = server_from(args, where)
    program = program_command()
    options = given_options(args)
    service = Service(where, Launchctl(), server.health, program=program, sleep=time.sleep)
    return MenuModel(
        Parts(
            where=where,
            server=server,
            launch=lambda card: launch_server(program, where, options, card),
            service=service,
            desktop=MacDesktop(where, program, leave, arguments=options, environment=record(os.environ, Path.home()).variables),
            commands=OwnCommands(program, connect_options(args, where, server.base_url)),
            version=__version__,
            agents=AGENTS,
            terminate=lambda pid: os.kill(pid, signal.SIGTERM),
            read_token=lambda: _token(args, where),
        )
    )


def connect_options(args: argparse.Namespace, where: Places, base_url: str) -> list[str]:
    """The flags with which `pooled-mlx connect` finds this server and its token."""
    token_file = getattr(args, "token_file", None) or (where.token_file if where.token_file.exists() else None)
    return ["--url", base_url, *(["--token-file", str(token_file)] if token_file else [])]


def _token(args: argparse.Namespace, where: Places) -> str | None:
    try:
        return server_from(args, where).token
    except AddressError:
        return None
