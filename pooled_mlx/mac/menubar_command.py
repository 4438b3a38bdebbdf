"""`pooled-mlx menubar`: the server in the Mac's menu bar."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.mac.address import AddressError, add_address_options, given_options, server_from
from pooled_mlx.mac.desktop import MacDesktop, OwnCommands, launch_server
from pooled_mlx.mac.launchd import Launchctl
from pooled_mlx.mac.menu import render_text
from pooled_mlx.mac.menu_model import MenuModel, Parts
from pooled_mlx.mac.places import Places, places
from pooled_mlx.mac.program import program_command
from pooled_mlx.mac.rumps_shell import RumpsShell, Worker
from pooled_mlx.mac.service import Service

DESCRIPTION = """\
Shows the server in the menu bar (macOS, `pip install 'pooled-mlx[menubar]'`): state, speed, cache, progress; starts, stops
and restarts it, picks the model, copies addresses and the settings of agents, opens the status page and the log.

It attaches to a server that answers already and starts one only if none does. With an installed service it uses launchd.
A server that crashes is started again, with growing pauses. Quitting the menu bar leaves the server running.
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
    add_address_options(parser)
    parser.add_argument("--text", action="store_true", help="print the menu as text once, start nothing, on any system")
    parser.set_defaults(run=run)


def run(
    args: argparse.Namespace,
    *,
    platform: str = sys.platform,
    where: Places | None = None,
    load_rumps: Callable[[], Any] = lambda: importlib.import_module("rumps"),
    write: Callable[[str], None] = print,
) -> int:
    """Run the command; returns the exit code. The keyword arguments are for tests."""
    where = where or places(platform=platform)
    try:
        if args.text:
            write(render_text(make_model(args, where, lambda: None).look()))
            return 0
        if platform != "darwin":
            print(
                "pooled-mlx menubar needs macOS. Elsewhere use `pooled-mlx status --watch` or the status page.", file=sys.stderr
            )
            return 1
        try:
            rumps = load_rumps()
        except ImportError:
            print("pooled-mlx menubar needs rumps: run pip install 'pooled-mlx[menubar]'", file=sys.stderr)
            return 1
        show(args, where, rumps)
    except AddressError as error:
        print(f"pooled-mlx menubar: {error}", file=sys.stderr)
        return 1
    return 0


def show(args: argparse.Namespace, where: Places, rumps: Any) -> None:
    """Show the menu until the user quits it."""
    leave: list[Callable[[], None]] = []
    model = make_model(args, where, lambda: leave[0]())
    worker = Worker(model)
    shell = RumpsShell(rumps, lambda: worker.menu, worker.click)
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
            desktop=MacDesktop(where, program, leave, arguments=options),
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
