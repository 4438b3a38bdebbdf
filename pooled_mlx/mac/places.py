"""The folders and files that the service, the menu bar and `status` share."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVICE_LABEL = "pooled-mlx.serve"
"""The launchd label, which is also the name of the plist."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are. Nothing is created before it is needed."""

    logs: Path
    state: Path
    agents: Path
    config: Path

    @property
    def server_log(self) -> Path:
        """Standard output and error of a server that runs without a terminal."""
        return self.logs / "server.log"

    @property
    def launchd_log(self) -> Path:
        """What a service says before it takes over its own log: usually nothing."""
        return self.logs / "launchd.log"

    @property
    def run_record(self) -> Path:
        """The run that is under way, or how the last one ended."""
        return self.state / "run.json"

    @property
    def last_crash(self) -> Path:
        """The last run that ended badly."""
        return self.state / "last-crash.json"

    @property
    def refusal(self) -> Path:
        """Why the last start was refused for good."""
        return self.state / "refusal.json"

    @property
    def token_file(self) -> Path:
        """The token of the service."""
        return self.config / "token"

    def agent_file(self, label: str = SERVICE_LABEL) -> Path:
        """The plist of a launchd agent."""
        return self.agents / f"{label}.plist"


def places(home: Path | None = None, platform: str = sys.platform, environment: Mapping[str, str] = os.environ) -> Places:
    """The folders of this user: the system's usual ones on a Mac, those of XDG elsewhere and for the settings."""
    home = home or Path.home()
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pooled-mlx"
    if platform == "darwin":
        library = home / "Library"
        return Places(
            logs=library / "Logs" / "pooled-mlx",
            state=library / "Application Support" / "pooled-mlx",
            agents=library / "LaunchAgents",
            config=config,
        )
    state = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "pooled-mlx"
    return Places(logs=state / "logs", state=state, agents=state / "LaunchAgents", config=config)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` in one step, readable by this user alone; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
