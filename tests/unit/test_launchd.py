"""The launchd agent and `pooled-mlx service`, against a stand-in of launchctl."""

from __future__ import annotations

import argparse
import plistlib
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.mac import service_command
from pooled_mlx.mac.launchd import (
    Agent,
    AgentStatus,
    Launchctl,
    LaunchdError,
    parse_print,
    run_command,
    serve_agent,
    write_agent,
)
from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.places import SERVICE_LABEL
from pooled_mlx.mac.program import check_program, guarded_folder, program_command
from pooled_mlx.mac.runs import Refusal, read_refusal, unattended
from pooled_mlx.mac.service import Service
from pooled_mlx.mac.supervisor import STOP_SECONDS
from pooled_mlx.mac.token import TokenFileError, ensure_token, read_token
from tests.mac_fakes import FakeClock, FakeLaunchd, health_body, mac_places


def test_the_plist_restarts_on_a_crash_and_not_on_a_clean_end(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    path = write_agent(serve_agent(["/opt/homebrew/bin/pooled-mlx"], where, ["--port", "8090"]), where)
    facts = plistlib.loads(path.read_bytes())
    assert path == tmp_path / "Library" / "LaunchAgents" / "pooled-mlx.serve.plist"
    assert facts["Label"] == SERVICE_LABEL
    assert facts["ProgramArguments"] == ["/opt/homebrew/bin/pooled-mlx", "serve", "--service", "--port", "8090"]
    assert facts["KeepAlive"] == {"SuccessfulExit": False}
    assert facts["RunAtLoad"] is True
    assert facts["ThrottleInterval"] == 10
    assert facts["ProcessType"] == "Interactive"
    assert facts["StandardErrorPath"] == str(tmp_path / "Library" / "Logs" / "pooled-mlx" / "launchd.log")
    assert facts["Umask"] == 0o077
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert where.logs.is_dir()


def test_an_agent_without_keep_alive_has_no_such_key() -> None:
    facts = plistlib.loads(Agent("x", ["a"], Path("/l"), keep_alive=False, environment={"A": "1"}).plist())
    assert "KeepAlive" not in facts
    assert facts["EnvironmentVariables"] == {"A": "1"}


def test_arguments_are_kept_apart_whatever_is_in_them() -> None:
    odd = ["a b", 'c"d', "e&<f>", "ü"]
    assert plistlib.loads(Agent("x", odd, Path("/l")).plist())["ProgramArguments"] == odd


PRINT = """gui/501/pooled-mlx.serve = {
\tactive count = 0
\tpath = /Users/somebody/Library/LaunchAgents/pooled-mlx.serve.plist
\ttype = LaunchAgent
\tstate = not running

\tprogram = /opt/homebrew/bin/pooled-mlx
\tenvironment = {
\t\tstate = running
\t\tpid = 1
\t}

\truns = 7
\tlast terminating signal = Killed: 9
}
"""


def test_launchctl_print_is_read_at_its_own_level_only() -> None:
    assert parse_print(PRINT) == AgentStatus(loaded=True, running=False, pid=None, last_exit="Killed: 9", runs=7)


def test_launchctl_print_of_a_running_agent() -> None:
    text = PRINT.replace("\tstate = not running", "\tstate = running\n\tpid = 812").replace(
        "last terminating signal = Killed: 9", "last exit code = (never exited)"
    )
    assert parse_print(text) == AgentStatus(loaded=True, running=True, pid=812, last_exit=None, runs=7)


def test_load_replaces_an_older_agent_and_waits_until_it_is_gone(tmp_path: Path) -> None:
    where, launchd, clock = mac_places(tmp_path), FakeLaunchd(), FakeClock()
    launchctl = Launchctl(launchd, uid=501, sleep=clock.sleep)
    path = write_agent(serve_agent(["p"], where, []), where)
    launchctl.load(SERVICE_LABEL, path)
    launchd.slow_bootouts = 3
    before = clock.now
    launchctl.load(SERVICE_LABEL, path)
    assert clock.now > before
    assert [command[0] for command in launchd.commands if command[0] != "print"] == [
        "enable",
        "bootstrap",
        "bootout",
        "enable",
        "bootstrap",
    ]
    assert ["enable", f"gui/501/{SERVICE_LABEL}"] in launchd.commands


def test_an_agent_that_never_leaves_is_an_error_with_a_bound(tmp_path: Path) -> None:
    where, launchd, clock = mac_places(tmp_path), FakeLaunchd(), FakeClock()
    launchctl = Launchctl(launchd, uid=501, sleep=clock.sleep)
    launchctl.load(SERVICE_LABEL, write_agent(serve_agent(["p"], where, []), where))
    launchd.slow_bootouts = 10_000
    with pytest.raises(LaunchdError, match=r"has not let go of pooled-mlx\.serve after 100 s"):
        launchctl.unload(SERVICE_LABEL)


def test_a_refusing_launchctl_is_quoted(tmp_path: Path) -> None:
    launchd = FakeLaunchd()
    launchd.refuse = "kickstart"
    with pytest.raises(LaunchdError, match="kickstart gui/501/x failed with code 5: Kickstart failed: 5"):
        Launchctl(launchd, uid=501).start("x")


def test_the_real_runner_joins_output_and_errors() -> None:
    ran = run_command([sys.executable, "-c", "import sys; print('a', flush=True); print('b', file=sys.stderr); sys.exit(3)"])
    assert (ran.code, ran.output.split()) == (3, ["a", "b"])


def test_the_token_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "config" / "token"
    assert ensure_token(path) is True
    token = read_token(path)
    assert len(token) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_token(path) is False
    assert read_token(path) == token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(mode)
    with pytest.raises(TokenFileError, match=f"mode {mode:04o}, must be 0600"):
        ensure_token(path)


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(TokenFileError, match="is empty"):
        read_token(path)


def test_a_link_is_not_followed_when_the_token_is_made(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere", tmp_path / "token"
    link.symlink_to(target)
    with pytest.raises((TokenFileError, OSError)):
        ensure_token(link)
    assert not target.exists()


def test_the_console_script_is_preferred_since_it_survives_upgrades(tmp_path: Path) -> None:
    script = tmp_path / "pooled-mlx"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert program_command(str(script)) == [str(script)]
    assert program_command("/x/pooled_mlx/__main__.py", "/usr/bin/python3") == ["/usr/bin/python3", "-m", "pooled_mlx"]


class Stage:
    """`pooled-mlx service` over a fake launchd and a server whose answers the test sets."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where = mac_places(home)
        self.launchd = FakeLaunchd(self.on_start)
        self.clock = FakeClock()
        self.lines: list[str] = []
        self.body: dict[str, Any] | None = None
        self.after_start: dict[str, Any] | None = health_body()
        self.refusal: str | None = None
        self.environment: dict[str, str] = {}
        self.program = ["/opt/pooled/bin/pooled-mlx"]
        monkeypatch.setattr(LocalServer, "get", self.get)
        monkeypatch.delenv("POOLED_TOKEN", raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))

    def get(self, path: str) -> Any:
        from pooled_mlx.mac.local_server import Reply

        if self.body is None:
            raise ConnectionRefusedError
        return Reply(200, self.body)

    def on_start(self, _: dict[str, Any]) -> None:
        self.body = self.after_start
        if self.refusal:
            with unattended(self.where, "0.1.0", redirect=False) as run:
                run.refuse(self.refusal)

    def run(self, *words: str, platform: str = "darwin") -> int:
        parser = argparse.ArgumentParser()
        service_command.add(parser.add_subparsers(dest="command"))
        args = parser.parse_args(["service", *words])
        return service_command.run(
            args,
            platform=platform,
            where=self.where,
            launchctl=Launchctl(self.launchd, uid=501, sleep=self.clock.sleep),
            sleep=self.clock.sleep,
            write=self.lines.append,
            environment=self.environment,
            program=self.program,
        )

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_install_makes_token_and_agent_and_starts_it(stage: Stage) -> None:
    assert stage.run("install", "--port", "8090", "--", "--model", "qwen3-1.7b") == 0
    arguments = stage.launchd.loaded[SERVICE_LABEL]["ProgramArguments"]
    start = arguments.index("serve")
    assert arguments[start:] == [
        *["serve", "--service", "--port", "8090", "--model", "qwen3-1.7b"],
        *["--token-file", str(stage.where.token_file)],
    ]
    assert read_token(stage.where.token_file)
    assert "made, readable by you alone" in stage.text
    assert "http://127.0.0.1:8090 is up (ready)" in stage.text


def test_install_records_the_variables_that_launchd_drops(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.environment = {
        **{"HF_HOME": "/Volumes/models/hf", "HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://me:pw@proxy:3128"},
        **{"POOLED_MLX_MAX_RUNNING": "2", "POOLED_TOKEN": "other", "TERM": "xterm", "PWD": "/x"},
    }
    assert stage.run("install") == 0
    assert stage.launchd.loaded[SERVICE_LABEL]["EnvironmentVariables"] == {
        "HF_HOME": "/Volumes/models/hf",
        "HTTPS_PROXY": "http://me:pw@proxy:3128",
        "HF_TOKEN": "hf_secret",
        "POOLED_MLX_MAX_RUNNING": "2",
    }
    errors = capsys.readouterr().err
    assert "Recorded  HF_HOME=/Volumes/models/hf\n          HTTPS_PROXY=http://…@proxy:3128" in stage.text
    assert "          HF_TOKEN=…\n          POOLED_MLX_MAX_RUNNING=2" in stage.text
    assert "HF_HOME=/Volumes/models/hf is on a disk that may not be there yet" in errors
    assert f"POOLED_TOKEN is set here, and the service takes the token in {stage.where.token_file}" in errors
    assert "secret" not in stage.text + errors
    assert "pw@" not in stage.text + errors


def test_another_model_leaves_the_recorded_variables_as_they_are(stage: Stage) -> None:
    stage.environment = {"HF_HOME": "/models"}
    assert stage.run("install") == 0
    launchctl = Launchctl(stage.launchd, uid=501, sleep=stage.clock.sleep)
    look = LocalServer("http://127.0.0.1:8080").health
    Service(stage.where, launchctl, look, program=stage.program, sleep=stage.clock.sleep).set_model("qwen3-1.7b")
    assert stage.launchd.loaded[SERVICE_LABEL]["EnvironmentVariables"] == {"HF_HOME": "/models"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("/Users/me/.cache/uv/archive-v0/3fJ/bin/pooled-mlx", "uv tool install --managed-python 'pooled-mlx[menubar]'"),
        ("/Users/me/Library/Caches/pipx/ab12/bin/pooled-mlx", "pipx install 'pooled-mlx[menubar]'"),
        ("/Users/me/.local/pipx/.cache/1a9611a0edad48b/bin/pooled-mlx", "pipx install 'pooled-mlx[menubar]'"),
    ],
)
def test_a_program_in_a_cache_is_not_installed(
    stage: Stage, capsys: pytest.CaptureFixture[str], program: str, words: str
) -> None:
    stage.program = [program]
    assert stage.run("install") == 1
    errors = capsys.readouterr().err
    assert words in errors
    assert program in errors
    assert stage.launchd.loaded == {}
    assert not stage.where.token_file.exists()


@pytest.mark.parametrize(
    "program", ["/Users/me/.local/share/uv/tools/pooled-mlx/bin/pooled-mlx", "/Users/me/.local/pipx/venvs/pooled-mlx/bin/x"]
)
def test_tools_that_stay_are_installed(program: str) -> None:
    check_program([program])


def test_without_a_desktop_session_the_agent_needs_none(stage: Stage) -> None:
    stage.launchd.desktop = False
    assert stage.run("install") == 0
    assert stage.launchd.loaded[SERVICE_LABEL]["LimitLoadToSessionType"] == "Background"
    assert ["bootstrap", "user/501", str(stage.where.agent_file())] in stage.launchd.commands
    assert "nobody is logged in at the screen" in stage.text
    for action in ("stop", "start", "restart"):
        assert stage.run(action) == 0
    assert stage.launchd.commands[-1] == ["kickstart", f"user/501/{SERVICE_LABEL}"]
    stage.launchd.desktop = True
    assert stage.run("status") == 0
    assert "running, pid 4242" in stage.text
    stage.lines.clear()
    assert stage.run("install") == 0, "with a desktop session it becomes an agent of that one"
    assert "LimitLoadToSessionType" not in stage.launchd.loaded[SERVICE_LABEL]
    assert stage.launchd.domains[SERVICE_LABEL] == "gui/501"
    assert "Session" not in stage.text


def test_a_folder_that_root_owns_is_one_line_with_the_cure(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pooled_mlx.mac.launchd.write_private", refuse)
    assert stage.run("install") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{stage.where.agents} cannot be written to" in line
    assert f'sudo chown -R "$USER" {stage.where.agents}' in line


@pytest.mark.parametrize("folder", ["Documents/work", "Desktop", "Downloads/x", "Library/Mobile Documents/y"])
def test_a_folder_that_macos_guards_is_told(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / ".venv" / "bin" / "pooled-mlx"
    line = guarded_folder((str(tmp_path / "tools"), str(path)), tmp_path)
    assert line is not None
    assert line.startswith(f"{path} is below {tmp_path}")
    assert guarded_folder((str(tmp_path / "Documents2" / "x"), "/opt/homebrew/bin/x"), tmp_path) is None


def test_a_command_that_does_not_end_is_an_error_of_launchd(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> Any:
        assert timeout > STOP_SECONDS, "kickstart -k waits until the old process is gone"
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(LaunchdError, match="launchctl print x did not end within 120 s"):
        run_command(["launchctl", "print", "x"])


def test_a_missing_launchctl_is_an_error_of_launchd() -> None:
    with pytest.raises(LaunchdError, match="/nowhere/launchctl cannot be started: No such file"):
        run_command(["/nowhere/launchctl", "print"])


def test_nobody_is_killed_before_its_engine_had_a_minute() -> None:
    from pooled_mlx.cli.running import ENGINE_SECONDS, LOADER_SECONDS
    from pooled_mlx.mac.launchd import BOOTOUT_SECONDS
    from pooled_mlx.server.settings import ServerSettings

    streams = ServerSettings().stop_grace_seconds + 5 + 1
    assert ENGINE_SECONDS >= 60
    assert streams + LOADER_SECONDS + ENGINE_SECONDS <= STOP_SECONDS < BOOTOUT_SECONDS
    assert plistlib.loads(Agent("x", ["a"], Path("/l")).plist())["ExitTimeOut"] == STOP_SECONDS


def test_install_again_keeps_the_token(stage: Stage) -> None:
    assert stage.run("install") == 0
    token = read_token(stage.where.token_file)
    assert stage.run("install") == 0
    assert read_token(stage.where.token_file) == token
    assert "(kept)" in stage.text


def test_install_without_token(stage: Stage) -> None:
    assert stage.run("install", "--no-token") == 0
    assert not stage.where.token_file.exists()
    assert "--token-file" not in stage.launchd.loaded[SERVICE_LABEL]["ProgramArguments"]


def test_install_reports_a_refusal_and_fails(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.after_start = None
    stage.refusal = "the model needs 24.0 GB and this Mac has 16.0 GB"
    assert stage.run("install") == 1
    errors = capsys.readouterr().err
    assert "The server refused to start: the model needs 24.0 GB and this Mac has 16.0 GB" in errors
    assert "service restart" in errors


def test_install_says_when_there_is_no_sign_of_life(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.after_start = None
    assert stage.run("install") == 1
    assert "does not answer yet (nothing listens on http://127.0.0.1:8080)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "words"),
    [(health_body(), "a pooled-mlx server that is not the service"), ({"hello": 1}, "what answers there is not pooled-mlx")],
)
def test_install_does_not_fight_for_a_busy_port(
    stage: Stage, capsys: pytest.CaptureFixture[str], body: dict[str, Any], words: str
) -> None:
    stage.body = body
    assert stage.run("install") == 1
    assert words in capsys.readouterr().err
    assert stage.launchd.loaded == {}
    assert not stage.where.agent_file().exists()


def test_uninstall_keeps_token_and_logs(stage: Stage) -> None:
    stage.run("install")
    stage.where.server_log.write_text("hello\n")
    assert stage.run("uninstall") == 0
    assert stage.launchd.loaded == {}
    assert not stage.where.agent_file().exists()
    assert stage.where.token_file.exists()
    assert stage.where.server_log.exists()
    assert stage.run("uninstall") == 0
    assert stage.lines[-1] == "No service is installed."


def test_status_of_a_running_service_names_an_older_version(stage: Stage) -> None:
    stage.after_start = health_body(version="0.0.9")
    stage.run("install")
    stage.lines.clear()
    assert stage.run("status") == 0
    assert "running, pid 4242, last exit 0, started 3 times" in stage.text
    assert "0.0.9 runs" in stage.text
    assert "service restart" in stage.text


def test_status_shows_the_refusal_and_the_last_crash(stage: Stage) -> None:
    stage.where.server_log.parent.mkdir(parents=True)
    with unattended(stage.where, "0.1.0", redirect=False) as run:
        stage.where.server_log.write_text("libc++abi: terminating\n")
        run.end(1)
    with unattended(stage.where, "0.1.0", redirect=False) as run:
        run.refuse("port 8080 is busy")
    assert stage.run("status") == 1
    assert "Service   not installed" in stage.text
    assert "Refused   port 8080 is busy" in stage.text
    assert "exit code 1" in stage.text
    assert "libc++abi: terminating" in stage.text


def test_start_stop_restart(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run("start") == 1
    assert "run `pooled-mlx service install`" in capsys.readouterr().err
    stage.run("install")
    assert stage.run("stop") == 0
    assert SERVICE_LABEL not in stage.launchd.running
    assert stage.run("start") == 0
    assert SERVICE_LABEL in stage.launchd.running
    assert stage.run("restart") == 0
    assert stage.launchd.commands[-1] == ["kickstart", f"gui/501/{SERVICE_LABEL}"]


def test_restart_asks_first_and_kills_only_what_does_not_end(stage: Stage) -> None:
    stage.run("install")
    stage.launchd.commands.clear()
    assert stage.run("restart") == 0
    told = [command for command in stage.launchd.commands if command[0] != "print"]
    assert told == [["kill", "SIGTERM", f"gui/501/{SERVICE_LABEL}"], ["kickstart", f"gui/501/{SERVICE_LABEL}"]]
    stage.launchd.resists = True
    before = stage.clock.now
    assert stage.run("restart") == 0
    assert stage.clock.now - before > STOP_SECONDS
    assert stage.launchd.commands[-1] == ["kickstart", "-k", f"gui/501/{SERVICE_LABEL}"]


def test_start_loads_an_agent_that_launchd_has_forgotten(stage: Stage) -> None:
    stage.run("install")
    stage.launchd.loaded.clear()
    stage.launchd.running.clear()
    assert stage.run("start") == 0
    assert SERVICE_LABEL in stage.launchd.running


def test_a_refusing_launchd_is_one_line_and_code_1(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.launchd.refuse = "bootstrap"
    assert stage.run("install") == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("pooled-mlx service install: launchctl bootstrap gui/501")


def test_a_loose_token_file_stops_the_install(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.where.token_file.parent.mkdir(parents=True)
    stage.where.token_file.write_text("x")
    stage.where.token_file.chmod(0o644)
    assert stage.run("install") == 1
    assert "chmod 600" in capsys.readouterr().err
    assert stage.launchd.loaded == {}


def test_elsewhere_the_command_says_that_it_needs_a_mac(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run("install", platform="linux") == 1
    assert "needs macOS" in capsys.readouterr().err
    assert stage.launchd.commands == []


def test_a_refused_start_exits_0_so_that_launchd_does_not_loop(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tests.mac_fakes import mac_places\n"
        "from pooled_mlx.mac.runs import unattended\n"
        f"with unattended(mac_places(Path({str(tmp_path)!r})), '0.1.0') as run:\n"
        "    sys.exit(run.refuse('the disk is full'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0
    refusal = read_refusal(where)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "the disk is full"
    assert "refused to start: the disk is full" in where.server_log.read_text()


def test_the_commands_in_the_documentation_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")
    lines = [line.strip().split("  #")[0].split() for line in page.splitlines() if line.startswith("    pooled-mlx service")]
    assert len(lines) >= 7
    parser = argparse.ArgumentParser()
    service_command.add(parser.add_subparsers())
    for words in lines:
        parser.parse_args(words[1:])
