"""`pooled-mlx service`: the server as a launchd agent that starts at login and comes back after a crash."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.config import TABLE, TOKEN_ENV
from pooled_mlx.mac.address import AddressError, add_address_options, given_options, server_from
from pooled_mlx.mac.environment import Recorded, record
from pooled_mlx.mac.launchd import Launchctl, LaunchdError
from pooled_mlx.mac.places import Places, places
from pooled_mlx.mac.program import ProgramPathError, check_program, guarded_folder, program_command
from pooled_mlx.mac.runs import last_crash, read_refusal
from pooled_mlx.mac.service import InstallRefusedError, Service
from pooled_mlx.mac.token import TokenFileError, ensure_token

DESCRIPTION = """\
Runs the server as a launchd agent of this user (macOS): it starts at login, is restarted after a crash and stays stopped
after a clean end. A start that cannot succeed (port busy, model too large, damaged file) is not tried again and again: the
reason is kept and shown by `pooled-mlx status` and `pooled-mlx service status`.

launchd starts it without the variables of your terminal: `install` records those that matter (places of models and settings,
hub, proxies, certificates, POOLED_*), prints them, and takes them from the terminal of the next `install` again.

`install` makes a token file that only you can read, unless --no-token is given, and passes everything after `--` to
`pooled-mlx serve`:

  pooled-mlx service install
  pooled-mlx service install --port 8090 -- --model qwen3-1.7b --max-running 2
"""


def add(subparsers: Any) -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "service",
        help="run the server as a launchd agent (macOS)",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser("install", help="write the agent, load it, start the server")
    add_address_options(install)
    install.add_argument("--no-token", action="store_true", help="any key works for programs on this Mac")
    install.add_argument("serve_arguments", nargs="*", metavar="-- SERVE OPTIONS", help="passed to `pooled-mlx serve`")
    for name, text in (
        ("uninstall", "stop the server and remove the agent; token, models and logs stay"),
        ("status", "what launchd and the server say"),
        ("start", "start the installed service"),
        ("stop", "stop it until the next login or `start`"),
        ("restart", "stop and start it, for example after an upgrade"),
    ):
        add_address_options(actions.add_parser(name, help=text))
    parser.set_defaults(run=run)


def run(
    args: argparse.Namespace,
    *,
    platform: str = sys.platform,
    where: Places | None = None,
    launchctl: Launchctl | None = None,
    sleep: Callable[[float], None] = time.sleep,
    write: Callable[[str], None] = print,
    environment: Mapping[str, str] = os.environ,
    program: Sequence[str] | None = None,
) -> int:
    """Run the command; returns the exit code. The keyword arguments are for tests."""
    if platform != "darwin":
        print(
            "pooled-mlx service needs macOS: it writes a launchd agent. "
            "On Linux, run `pooled-mlx serve` under systemd or another supervisor.",
            file=sys.stderr,
        )
        return 1
    where = where or places(platform=platform)
    program = program_command() if program is None else program
    try:
        made = False
        if args.action == "install":
            check_program(program, sys.prefix)
        if args.action == "install" and not args.no_token:
            args.token_file = str(Path(getattr(args, "token_file", None) or where.token_file).expanduser())
            made = ensure_token(Path(args.token_file))
        server = server_from(args, where)
        service = Service(where, launchctl or Launchctl(), server.health, program=program, sleep=sleep)
        if args.action == "install":
            # Which token it wants is said by the arguments.
            recorded = record(environment, Path.home(), without=(TOKEN_ENV, TABLE["token_file"].env))
            if environment.get(TOKEN_ENV):
                wanted = "any key" if args.no_token else f"the token in {args.token_file}"
                print(f"Warning: {TOKEN_ENV} is set here, and the service takes {wanted}: unset it", file=sys.stderr)
            if line := guarded_folder((program[0], sys.prefix, str(Path(__file__).resolve())), Path.home()):
                print(f"Warning: {line}", file=sys.stderr)
            return _install(args, made, service, server.base_url, where, recorded, write)
        if args.action == "uninstall":
            gone = service.uninstall()
            write("The service is removed. Token, models and logs stay." if gone else "No service is installed.")
            return 0
        if args.action == "status":
            return _status(service, server.health(), where, write)
        if not service.installed:
            print("No service is installed: run `pooled-mlx service install`.", file=sys.stderr)
            return 1
        {"start": service.start, "stop": service.stop, "restart": service.restart}[args.action]()
        write({"start": "Started.", "stop": "Asked to stop.", "restart": "Restarted."}[args.action])
        return 0
    except (LaunchdError, TokenFileError, InstallRefusedError, AddressError, ProgramPathError) as error:
        print(f"pooled-mlx service {args.action}: {error}", file=sys.stderr)
        return 1


def _install(
    args: argparse.Namespace,
    token_made: bool,
    service: Service,
    base_url: str,
    where: Places,
    recorded: Recorded,
    write: Callable[[str], None],
) -> int:
    token_file = None if args.no_token else Path(args.token_file)
    passed = [argument for argument in args.serve_arguments if argument != "--"]
    arguments = [*given_options(args, ("host", "port")), *passed]
    done = service.install(arguments, token_file=token_file, environment=recorded.variables)
    write(f"Agent     {done.plist}")
    write(f"Log       {where.server_log}")
    if token_file is not None:
        write(f"Token     {token_file} ({'made, readable by you alone' if token_made else 'kept'})")
    else:
        write("Token     none: any key works for programs on this Mac")
    for number, line in enumerate(recorded.lines()):
        write(f"{'' if number else 'Recorded':<10}{line}")
    for line in recorded.warnings:
        print(f"Warning: {line}", file=sys.stderr)
    if done.headless:
        write("Session   nobody is logged in at the screen: the agent is one that needs no desktop")
    if done.refusal is not None:
        print(f"The server refused to start: {done.refusal.reason}", file=sys.stderr)
        print("It is not tried again. Cure that and run `pooled-mlx service restart`.", file=sys.stderr)
        return 1
    if not done.server.answers:
        print(f"The server does not answer yet ({done.server.reason}): see `pooled-mlx status`.", file=sys.stderr)
        return 1
    write(f"Server    {base_url} is up ({done.server.state}); `pooled-mlx status` shows more")
    return 0


def _status(service: Service, facts: Any, where: Places, write: Callable[[str], None]) -> int:
    status = service.status()
    if not service.installed and not status.loaded:
        write("Service   not installed")
    else:
        running = f"running, pid {status.pid}" if status.running else "loaded, not running" if status.loaded else "not loaded"
        ends = f", last exit {status.last_exit}" if status.last_exit else ""
        starts = f", started {status.runs} times" if status.runs and status.runs > 1 else ""
        write(f"Service   {running}{ends}{starts}")
        write(f"Agent     {where.agent_file()}")
        write(f"Log       {where.server_log}")
    write(f"Server    {facts.state}{f': {facts.reason}' if facts.reason else ''}")
    if facts.version and facts.version != __version__:
        write(f"Version   {facts.version} runs, {__version__} is installed: run `pooled-mlx service restart`")
    refusal = read_refusal(where)
    if refusal is not None and not facts.answers:
        write(f"Refused   {refusal.reason}")
    crash = last_crash(where)
    if crash is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(crash.at))
        write(f"Crash     {at}, {crash.summary}")
        for line in crash.lines[-5:]:
            write(f"          {line}")
    return 0 if facts.ready else 1
