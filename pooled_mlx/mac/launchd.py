"""launchd: the agent's property list and the few `launchctl` commands that it takes.

`launchctl` prints for people, so what it says is read tolerantly. Everything that runs a command goes through a `Runner`,
which tests replace.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pooled_mlx.mac.places import SERVICE_LABEL, Places, write_private
from pooled_mlx.mac.supervisor import STOP_SECONDS

LAUNCHCTL = "/bin/launchctl"
THROTTLE_SECONDS = 10
HEADLESS_SESSION = "Background"
"""The session type of agents that launchd keeps in `user/UID`, where no desktop is needed."""
BOOTOUT_SECONDS = STOP_SECONDS + 10.0
_PAUSE_SECONDS = 0.5
_COMMAND_SECONDS = STOP_SECONDS + 30.0


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a command."""

    code: int
    output: str


class Runner(Protocol):
    """Runs a command to its end."""

    def __call__(self, command: Sequence[str]) -> Ran:
        """Raises `LaunchdError` when it cannot be started or does not end."""
        ...


class LaunchdError(Exception):
    """launchctl refused or did not end; the message names the command and what it said."""


def run_command(command: Sequence[str]) -> Ran:
    """The real runner: output and errors together. Raises `LaunchdError` when it takes longer than a server may to stop."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchdError(f"{' '.join(command)} did not end within {_COMMAND_SECONDS:g} s") from None
    except OSError as error:
        raise LaunchdError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Agent:
    """A launchd agent. `keep_alive` restarts it after a crash; `log` takes its output.

    `headless`: for a session without a desktop, such as that of somebody who came by SSH.
    """

    label: str
    command: Sequence[str]
    log: Path
    keep_alive: bool = True
    environment: Mapping[str, str] | None = None
    headless: bool = False

    def plist(self) -> bytes:
        """The property list, as XML."""
        facts: dict[str, Any] = {
            "Label": self.label,
            "ProgramArguments": list(self.command),
            "RunAtLoad": True,
            "ThrottleInterval": THROTTLE_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            # An agent is throttled like a background job unless it says that somebody waits for it.
            "ProcessType": "Interactive",
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
            "Umask": 0o077,
        }
        if self.keep_alive:
            facts["KeepAlive"] = {"SuccessfulExit": False}
        if self.headless:
            facts["LimitLoadToSessionType"] = HEADLESS_SESSION
        if self.environment:
            facts["EnvironmentVariables"] = dict(self.environment)
        return plistlib.dumps(facts, sort_keys=False)


def serve_agent(
    program: Sequence[str],
    where: Places,
    serve_arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    headless: bool = False,
) -> Agent:
    """The agent of the server: `program` starts pooled-mlx, the arguments are those of `serve`."""
    command = [*program, "serve", "--service", *serve_arguments]
    return Agent(SERVICE_LABEL, command, where.launchd_log, environment=environment, headless=headless)


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What launchd knows of an agent. `last_exit` is its own wording, such as "0" or "9: Killed"."""

    loaded: bool
    running: bool = False
    pid: int | None = None
    last_exit: str | None = None
    runs: int | None = None


class Launchctl:
    """The commands, for one user's own domains: `gui/UID` while there is a desktop session, `user/UID` without one."""

    def __init__(
        self,
        run: Runner = run_command,
        uid: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        uid = os.getuid() if uid is None else uid
        self._run = run
        self._desktop, self._headless = f"gui/{uid}", f"user/{uid}"
        self._sleep = sleep

    def has_desktop(self) -> bool:
        """True while this user is logged in at the screen; agents for the desktop cannot be loaded otherwise."""
        return self._run([LAUNCHCTL, "print", self._desktop]).code == 0

    def status(self, label: str) -> AgentStatus:
        """What launchd knows of `label`."""
        return self._find(label)[1]

    def load(self, label: str, plist: Path) -> None:
        """Load the agent and start it, after unloading an older one of that name. Raises `LaunchdError`."""
        self.unload(label)
        headless = plistlib.loads(plist.read_bytes()).get("LimitLoadToSessionType") == HEADLESS_SESSION
        domain = self._headless if headless else self._desktop
        self._must(["enable", f"{domain}/{label}"])
        self._must(["bootstrap", domain, str(plist)])

    def unload(self, label: str) -> bool:
        """Stop and unload; waits until launchd has forgotten it. False when it was not loaded. Raises `LaunchdError`."""
        domain, status = self._find(label)
        if not status.loaded:
            return False
        # bootout returns 36 ("operation now in progress") while the process still ends, so its code says little.
        said = self._run([LAUNCHCTL, "bootout", f"{domain}/{label}"]).output.strip()
        if self._wait(lambda: not self.status(label).loaded):
            return True
        raise LaunchdError(f"launchd has not let go of {label} after {BOOTOUT_SECONDS:g} s: {said}")

    def start(self, label: str) -> None:
        """Start a loaded agent that does not run. Raises `LaunchdError`."""
        self._must(["kickstart", self._target(label)])

    def stop(self, label: str) -> None:
        """Ask it to end. It leaves with code 0, so launchd does not start it again. Raises `LaunchdError`."""
        self._must(["kill", "SIGTERM", self._target(label)])

    def restart(self, label: str) -> None:
        """End it and start it; it is killed only when it has not ended in its time. Raises `LaunchdError`."""
        if self.status(label).running:
            self.stop(label)
            if not self._wait(lambda: not self.status(label).running):
                self._must(["kickstart", "-k", self._target(label)])
                return
        self.start(label)

    def _wait(self, done: Callable[[], bool]) -> bool:
        """Whether it came true while launchd waits for an agent to end, and a little longer."""
        for _ in range(int(BOOTOUT_SECONDS / _PAUSE_SECONDS)):
            if done():
                return True
            self._sleep(_PAUSE_SECONDS)
        return False

    def _find(self, label: str) -> tuple[str, AgentStatus]:
        """The domain that has `label`, that of the desktop where none has, and what is known of it there."""
        for domain in (self._desktop, self._headless):
            ran = self._run([LAUNCHCTL, "print", f"{domain}/{label}"])
            if ran.code == 0:
                return domain, parse_print(ran.output)
        return self._desktop, AgentStatus(loaded=False)

    def _target(self, label: str) -> str:
        return f"{self._find(label)[0]}/{label}"

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
    """Write the plist where launchd looks for it, and make the folder of its log. Raises `LaunchdError` where it may not."""
    path = where.agent_file(agent.label)
    try:
        agent.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, agent.plist())
    except PermissionError as error:
        folder = agent.log.parent if error.filename and Path(error.filename).is_relative_to(agent.log.parent) else path.parent
        raise LaunchdError(
            f"{folder} cannot be written to: another user owns it, which sudo can have done. "
            f'Make it yours: sudo chown -R "$USER" {shlex.quote(str(folder))}'
        ) from error
    return path
