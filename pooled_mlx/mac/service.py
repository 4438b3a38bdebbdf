"""The launchd service: install it, remove it, say how it is. The command line and the menu bar both use this."""

from __future__ import annotations

import plistlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pooled_mlx.mac.facts import ServerFacts
from pooled_mlx.mac.launchd import AgentStatus, Launchctl, serve_agent, write_agent
from pooled_mlx.mac.places import SERVICE_LABEL, Places, write_private
from pooled_mlx.mac.runs import Refusal, read_refusal

START_CHECKS = 40
START_PAUSE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` did. `server` is the first sign of life; `refusal` says why there is none.

    `headless`: there is no desktop session, so it was installed for sessions without one.
    """

    plist: Path
    server: ServerFacts
    refusal: Refusal | None
    headless: bool


class Service:
    """The service of this user. `look` asks the server at the address it will have."""

    def __init__(
        self,
        where: Places,
        launchctl: Launchctl,
        look: Callable[[], ServerFacts],
        *,
        program: Sequence[str],
        sleep: Callable[[float], None],
    ) -> None:
        self._where = where
        self._launchctl = launchctl
        self._look = look
        self._program = program
        self._sleep = sleep

    @property
    def installed(self) -> bool:
        """True when the plist is in its place."""
        return self._where.agent_file().exists()

    def install(
        self, serve_arguments: Sequence[str], *, token_file: Path | None, environment: Mapping[str, str] | None = None
    ) -> Installed:
        """Write the plist, load it, and wait a few seconds for a sign of life.

        Raises `LaunchdError`, or `InstallRefusedError` when another server holds the address.
        """
        if not self._launchctl.status(SERVICE_LABEL).running:
            before = self._look()
            if before.state in ("foreign", "silent"):
                raise InstallRefusedError(f"{before.reason}; free the port or install with --port")
            if before.answers:
                raise InstallRefusedError(
                    "a pooled-mlx server that is not the service answers there already "
                    f"(version {before.version or 'unknown'}): stop it, or install with --port"
                )
        arguments = list(serve_arguments)
        if token_file is not None:
            arguments += ["--token-file", str(token_file)]
        self._where.refusal.unlink(missing_ok=True)
        headless = not self._launchctl.has_desktop()
        agent = serve_agent(self._program, self._where, arguments, environment, headless=headless)
        plist = write_agent(agent, self._where)
        self._launchctl.load(SERVICE_LABEL, plist)
        server, refusal = self._first_sign()
        return Installed(plist, server, refusal, headless)

    def uninstall(self) -> bool:
        """Stop it and remove the plist; False when there was none. The token, models and logs stay. Raises `LaunchdError`."""
        loaded = self._launchctl.unload(SERVICE_LABEL)
        plist = self._where.agent_file()
        existed = plist.exists()
        plist.unlink(missing_ok=True)
        return existed or loaded

    def status(self) -> AgentStatus:
        """What launchd knows."""
        return self._launchctl.status(SERVICE_LABEL)

    def running(self) -> bool:
        """True while launchd keeps the server's process."""
        return self.status().running

    def set_model(self, card_id: str) -> None:
        """Serve another model from now on: the plist is rewritten and loaded again. Raises `LaunchdError`."""
        plist = self._where.agent_file()
        facts = plistlib.loads(plist.read_bytes())
        facts["ProgramArguments"] = with_option(facts["ProgramArguments"], "--model", card_id)
        write_private(plist, plistlib.dumps(facts, sort_keys=False))
        self._where.refusal.unlink(missing_ok=True)
        self._launchctl.load(SERVICE_LABEL, plist)

    def start(self) -> None:
        """Start it, loading it first if need be. Raises `LaunchdError`."""
        if self.status().loaded:
            self._launchctl.start(SERVICE_LABEL)
        else:
            self._launchctl.load(SERVICE_LABEL, self._where.agent_file())

    def stop(self) -> None:
        """Stop it until the next login or start. Raises `LaunchdError`."""
        if self.status().running:
            self._launchctl.stop(SERVICE_LABEL)

    def restart(self) -> None:
        """Stop it and start it, for example after an upgrade. Raises `LaunchdError`."""
        if self.status().loaded:
            self._launchctl.restart(SERVICE_LABEL)
        else:
            self.start()

    def _first_sign(self) -> tuple[ServerFacts, Refusal | None]:
        facts = self._look()
        for _ in range(START_CHECKS):
            refusal = read_refusal(self._where)
            if refusal is not None or facts.answers:
                return facts, refusal
            self._sleep(START_PAUSE_SECONDS)
            facts = self._look()
        return facts, read_refusal(self._where)


def with_option(arguments: Sequence[str], name: str, value: str) -> list[str]:
    """`arguments` with the option set to `value`, in both of its spellings."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == name:
            skip = True
        elif not argument.startswith(f"{name}="):
            kept.append(argument)
    return [*kept, name, value]


class InstallRefusedError(Exception):
    """The service would not get its address."""
