"""The Mac's clipboard, `open`, login item and our own command line, for the menu bar."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pooled_mlx.mac.launchd import Agent, write_agent
from pooled_mlx.mac.places import Places
from pooled_mlx.mac.program import check_program

MENUBAR_LABEL = "pooled-mlx.menubar"
COMMAND_SECONDS = 60.0

Run = Callable[[Sequence[str], bytes | None], bytes]
"""Runs a command with the given input and returns its output; raises OSError with its error text when it fails."""


def run_command(command: Sequence[str], data: bytes | None = None) -> bytes:
    """The real `Run`."""
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not end within {COMMAND_SECONDS:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(lines[-1] if lines else f"{' '.join(command)} failed with code {done.returncode}")
    return done.stdout


def menubar_agent(
    program: Sequence[str], where: Places, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Agent:
    """The agent of the menu bar, for login and for the app. One that was quit stays away."""
    command, log = [*program, "menubar", *arguments], where.logs / "menubar.log"
    return Agent(MENUBAR_LABEL, command, log, keep_alive=False, environment=environment)


class MacDesktop:
    """`leave` ends the menu bar."""

    def __init__(
        self,
        where: Places,
        program: Sequence[str],
        leave: Callable[[], None],
        run: Run = run_command,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._where = where
        self._agent = menubar_agent(program, where, arguments, environment)
        self._leave = leave
        self._run = run

    def copy(self, text: str) -> None:
        """Put `text` on the clipboard."""
        self._run(["/usr/bin/pbcopy"], text.encode())

    def open(self, target: str) -> None:
        """Open an address in the browser or a file in its program."""
        self._run(["/usr/bin/open", target], None)

    def at_login(self) -> bool:
        """True when the login item is there."""
        return self._where.agent_file(MENUBAR_LABEL).exists()

    def set_at_login(self, on: bool) -> None:
        """Write or remove the login item. launchd reads it at the next login; this menu bar is not started twice.

        Raises `LaunchdError`, and `ProgramPathError` when there would be nothing to start.
        """
        if on:
            check_program(self._agent.command)
            write_agent(self._agent, self._where)
        else:
            self._where.agent_file(MENUBAR_LABEL).unlink(missing_ok=True)

    def quit(self) -> None:
        """Leave."""
        self._leave()


class OwnCommands:
    """`pooled-mlx models list --json` and `pooled-mlx connect AGENT`, as commands: the menu bar imports neither."""

    def __init__(self, program: Sequence[str], connect_options: Sequence[str] = (), run: Run = run_command) -> None:
        self._program = program
        self._options = connect_options
        self._run = run

    def models(self) -> Any:
        """The decoded list. Raises OSError."""
        output = self._run([*self._program, "models", "list", "--all", "--json"], None)
        try:
            return json.loads(output)
        except ValueError:
            raise OSError("pooled-mlx models list --json did not print JSON") from None

    def connect(self, agent: str) -> str:
        """The settings of one agent. Raises OSError."""
        return self._run([*self._program, "connect", agent, *self._options], None).decode("utf-8", "replace")


def launch_server(
    program: Sequence[str],
    where: Places,
    arguments: Sequence[str],
    model: str | None,
    environment: Mapping[str, str] = os.environ,
) -> subprocess.Popen[bytes]:
    """Start `pooled-mlx serve --service` as a child with a session of its own: it outlives the menu bar. Raises OSError."""
    where.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [*program, "serve", "--service", *(["--model", model] if model else []), *arguments]
    with _appending(where.launchd_log) as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )


def _appending(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
