"""launchd: the agent's property list and the few `launchctl` commands that it takes.

`launchctl` prints for people, so what it says is read tolerantly. Everything that runs a command goes through a `Runner`,
which tests replace.
"""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pooled_mlx.mac.places import SERVICE_LABEL, Places, write_private

LAUNCHCTL = "/bin/launchctl"
THROTTLE_SECONDS = 10
EXIT_SECONDS = 30
_BOOTOUT_TRIES = 80
_BOOTOUT_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a command."""

    code: int
    output: str


class Runner(Protocol):
    """Runs a command to its end."""

    def __call__(self, command: Sequence[str]) -> Ran:
        """Raises OSError when it cannot be started."""
        ...


def run_command(command: Sequence[str]) -> Ran:
    """The real runner: output and errors together, at most a minute."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=60, check=False
    )
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"))


class LaunchdError(Exception):
    """launchctl refused; the message names the command and what it said."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A launchd agent. `keep_alive` restarts it after a crash; `log` takes its output."""

    label: str
    command: Sequence[str]
    log: Path
    keep_alive: bool = True
    environment: Mapping[str, str] | None = None

    def plist(self) -> bytes:
        """The property list, as XML."""
        facts: dict[str, Any] = {
            "Label": self.label,
            "ProgramArguments": list(self.command),
            "RunAtLoad": True,
            "ThrottleInterval": THROTTLE_SECONDS,
            "ExitTimeOut": EXIT_SECONDS,
            # An agent is throttled like a background job unless it says that somebody waits for it.
            "ProcessType": "Interactive",
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
            "Umask": 0o077,
        }
        if self.keep_alive:
            facts["KeepAlive"] = {"SuccessfulExit": False}
        if self.environment:
            facts["EnvironmentVariables"] = dict(self.environment)
        return plistlib.dumps(facts, sort_keys=False)


def serve_agent(program: Sequence[str], where: Places, serve_arguments: Sequence[str]) -> Agent:
    """The agent of the server: `program` starts pooled-mlx, the arguments are those of `serve`."""
    return Agent(SERVICE_LABEL, [*program, "serve", "--service", *serve_arguments], where.launchd_log)


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What launchd knows of an agent. `last_exit` is its own wording, such as "0" or "9: Killed"."""

    loaded: bool
    running: bool = False
    pid: int | None = None
    last_exit: str | None = None
    runs: int | None = None


class Launchctl:
    """The commands, for one user's own domain (`gui/UID`)."""

    def __init__(
        self,
        run: Runner = run_command,
        uid: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._domain = f"gui/{os.getuid() if uid is None else uid}"
        self._sleep = sleep

    def status(self, label: str) -> AgentStatus:
        """What launchd knows of `label`."""
        ran = self._run([LAUNCHCTL, "print", f"{self._domain}/{label}"])
        return parse_print(ran.output) if ran.code == 0 else AgentStatus(loaded=False)

    def load(self, label: str, plist: Path) -> None:
        """Load the agent and start it, after unloading an older one of that name. Raises `LaunchdError`."""
        self.unload(label)
        self._must(["enable", f"{self._domain}/{label}"])
        self._must(["bootstrap", self._domain, str(plist)])

    def unload(self, label: str) -> bool:
        """Stop and unload; waits until launchd has forgotten it. False when it was not loaded. Raises `LaunchdError`."""
        if not self.status(label).loaded:
            return False
        # bootout returns 36 ("operation now in progress") while the process still ends, so its code says little.
        said = self._run([LAUNCHCTL, "bootout", f"{self._domain}/{label}"]).output.strip()
        for _ in range(_BOOTOUT_TRIES):
            if not self.status(label).loaded:
                return True
            self._sleep(_BOOTOUT_PAUSE_SECONDS)
        raise LaunchdError(f"launchd has not let go of {label} after {_BOOTOUT_TRIES * _BOOTOUT_PAUSE_SECONDS:g} s: {said}")

    def start(self, label: str) -> None:
        """Start a loaded agent that does not run. Raises `LaunchdError`."""
        self._must(["kickstart", f"{self._domain}/{label}"])

    def stop(self, label: str) -> None:
        """Ask it to end. It leaves with code 0, so launchd does not start it again. Raises `LaunchdError`."""
        self._must(["kill", "SIGTERM", f"{self._domain}/{label}"])

    def restart(self, label: str) -> None:
        """End it and start it. Raises `LaunchdError`."""
        self._must(["kickstart", "-k", f"{self._domain}/{label}"])

    def _must(self, arguments: list[str]) -> None:
        ran = self._run([LAUNCHCTL, *arguments])
        if ran.code != 0:
            said = ran.output.strip() or "no reason given"
            raise LaunchdError(f"launchctl {' '.join(arguments)} failed with code {ran.code}: {said}")


def parse_print(text: str) -> AgentStatus:
    """The facts in the output of `launchctl print`."""
    found = {
        match["key"]: match["value"].strip()
        for match in re.finditer(r"^\t(?P<key>state|pid|last exit code|runs) = (?P<value>.*)$", text, re.MULTILINE)
    }
    pid, runs = found.get("pid", ""), found.get("runs", "")
    signal = re.search(r"^\tlast terminating signal = (.*)$", text, re.MULTILINE)
    exit_text = found.get("last exit code")
    return AgentStatus(
        loaded=True,
        running=found.get("state") == "running",
        pid=int(pid) if pid.isdigit() else None,
        last_exit=signal.group(1).strip() if signal else None if exit_text == "(never exited)" else exit_text,
        runs=int(runs) if runs.isdigit() else None,
    )


def write_agent(agent: Agent, where: Places) -> Path:
    """Write the plist where launchd looks for it, and make the folder of its log."""
    path = where.agent_file(agent.label)
    agent.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, agent.plist())
    return path
