"""Runs real coding agents against a server with scripted answers and checks that each did its work.

    python scripts/agents/run_agents.py --install             # install the agents into build/agents, start the server, run all
    python scripts/agents/run_agents.py --answers FILE.jsonl  # only write the scripted answers, for `serve --replay FILE.jsonl`
    python scripts/agents/run_agents.py --base-url URL        # against such a server

Each agent is started as `pooled-mlx connect AGENT --run` starts it, with a home folder of its own, and is asked to make a
file. It passes when the file is there with the right text and the agent's last words arrived. Prints a table; exits 1 when
an agent that is installed failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from agent_checks import AGENTS, Agent, answers_text  # noqa: E402

from pooled_mlx.connect import profile_of  # noqa: E402
from pooled_mlx.connect.command import find_target  # noqa: E402
from pooled_mlx.connect.target import TEMPORARY, Target  # noqa: E402

NODE_PACKAGE = "node@24"
INSTALL_SECONDS = 900
AGENT_SECONDS = 180
START_SECONDS = 300
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "PI_OFFLINE": "1",
    "PI_SKIP_VERSION_CHECK": "1",
    "PI_TELEMETRY": "0",
    "QWEN_TELEMETRY_ENABLED": "false",
    "QWEN_USAGE_STATISTICS_ENABLED": "false",
}
"""Nothing of this may leave the machine, and no agent may replace itself while it is checked."""


@dataclass(frozen=True)
class Outcome:
    """What came of one agent. `problem` is None when it passed; `installed` False: it was not there to run."""

    agent: Agent
    version: str
    seconds: float
    problem: str | None
    installed: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/agents", help="where the agents are installed")
    parser.add_argument("--install", action="store_true", help="install the agents first (npm, and pip or uv for aider)")
    parser.add_argument("--base-url", help="a running server; without it one is started")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--answers", type=Path, help="write the scripted answers to this file and stop")
    args = parser.parse_args(argv)
    if args.answers:
        args.answers.write_text(answers_text(), encoding="utf-8")
        return 0
    names = args.only.split(",") if args.only else [agent.name for agent in AGENTS]
    chosen = [agent for agent in AGENTS if agent.name in names]
    if unknown := set(names) - {agent.name for agent in chosen}:
        parser.error(f"unknown agents: {', '.join(sorted(unknown))}")
    if args.install:
        install(chosen, args.folder)
    with server(args.base_url) as base_url:
        target = find_target(base_url, os.environ.get("POOLED_TOKEN"), None, None)
        outcomes = []
        for agent in chosen:
            outcomes.append(check(agent, target, args.folder))
            print(progress(outcomes[-1]), file=sys.stderr, flush=True)
    print(table(outcomes))
    return 1 if any(outcome.installed and outcome.problem for outcome in outcomes) else 0


def search_path(folder: Path) -> str:
    """Where the agents are looked for: the folder's own first."""
    return os.pathsep.join([str(folder / "node_modules/.bin"), str(folder / "python/bin"), os.environ.get("PATH", "")])


def install(agents: Sequence[Agent], folder: Path) -> None:
    """Install into `folder`; a failure is reported and leaves that agent out."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "package.json"
    if not manifest.exists():
        manifest.write_text('{"private": true}\n', encoding="utf-8")
    npm = [agent.package for agent in agents if not agent.pypi]
    if npm and not _done(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", NODE_PACKAGE, *npm], folder):
        for package in [NODE_PACKAGE, *npm]:
            _done(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", package], folder)
    for agent in agents:
        if agent.pypi:
            _install_from_pypi(agent.package, folder / "python")


def _install_from_pypi(project: str, environment: Path) -> None:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is not None:
        if environment.exists() or _done([uv, "venv", "-q", "--python", sys.executable, str(environment)], environment.parent):
            _done([uv, "pip", "install", "-q", "--python", str(environment / "bin/python"), project], environment.parent)
    elif environment.exists() or _done([sys.executable, "-m", "venv", str(environment)], environment.parent):
        _done([str(environment / "bin/python"), "-m", "pip", "install", "-q", project], environment.parent)


def _done(command: Sequence[str], folder: Path) -> bool:
    print(f"$ {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        return subprocess.run(command, cwd=folder, check=False, timeout=INSTALL_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"  {error}", file=sys.stderr)
        return False


@contextmanager
def server(base_url: str | None) -> Iterator[str]:
    """The given server, or one with the scripted answers that ends with the block."""
    if base_url is not None:
        yield base_url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="pooled-agents-") as folder:
        answers = Path(folder, "answers.jsonl")
        answers.write_text(answers_text(), encoding="utf-8")
        port = _free_port()
        command = [sys.executable, "-m", "pooled_mlx", "serve", "--replay", str(answers), "--port", str(port)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=env, stdout=sys.stderr, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process)
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(START_SECONDS * 2):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise SystemExit(f"the server was not ready after {START_SECONDS} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started, by its own group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue


def check(agent: Agent, target: Target, folder: Path) -> Outcome:
    """Run one agent once in an empty folder."""
    path = search_path(folder)
    program = shutil.which(agent.program, path=path)
    if program is None:
        return Outcome(agent, "", 0.0, "not installed", installed=False)
    launch = profile_of(agent.profile, target).launch
    assert launch is not None
    with tempfile.TemporaryDirectory(prefix="pooled-agent-") as temporary:
        home, work, settings = (Path(temporary, name) for name in ("home", "work", "settings"))
        for place in (home, work, settings):
            place.mkdir()
        for name, text in launch.files.items():
            (settings / name).parent.mkdir(parents=True, exist_ok=True)
            (settings / name).write_text(text, encoding="utf-8")

        def here(text: str) -> str:
            return text.replace(TEMPORARY, str(settings))

        env = _environment(home, path) | {name: here(value) for name, value in launch.env.items()}
        version = _version(program, env, work)
        command = [program, *map(here, launch.argv[1:]), *agent.arguments(agent.prompt)]
        started = time.monotonic()
        code, output = _run(command, env, work)
        return Outcome(agent, version, time.monotonic() - started, _problem(agent, work, code, output))


def _environment(home: Path, path: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE") if name in os.environ}
    return {**kept, **QUIET, "HOME": str(home), "PATH": path, "TERM": "dumb", "NO_COLOR": "1", "CI": "1"}


def _version(program: str, env: Mapping[str, str], work: Path) -> str:
    code, output = _run([program, "--version"], env, work)
    found = re.search(r"\d+\.\d+\.\d+[\w.-]*", output)
    return found[0] if code == 0 and found else "unknown"


def _run(command: Sequence[str], env: Mapping[str, str], work: Path) -> tuple[int | None, str]:
    """Exit code (None after the time limit) and everything printed."""
    process = subprocess.Popen(
        command,
        cwd=work,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=AGENT_SECONDS)
        return process.returncode, output.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        _stop(process)
        output, _ = process.communicate()
        return None, output.decode("utf-8", "replace")
    finally:
        _stop(process)


def _problem(agent: Agent, work: Path, code: int | None, output: str) -> str | None:
    """What is wrong, None when the agent did its work and said its last words."""
    made = work / agent.file_name
    text = made.read_text(encoding="utf-8", errors="replace").strip() if made.exists() else None
    end = " | ".join(line.strip() for line in output.strip().splitlines()[-4:])[-300:]
    if code is None:
        return f"not finished after {AGENT_SECONDS} s: {end}"
    if text is None:
        return f"the file was not made (exit {code}): {end}"
    if text != agent.word:
        return f"the file holds {text[:60]!r} instead of {agent.word!r}"
    if code != 0:
        return f"exit code {code}: {end}"
    if agent.last_words not in output:
        return f"its last words did not arrive: {end}"
    return None


def progress(outcome: Outcome) -> str:
    """One line while the others still run."""
    return f"{outcome.agent.name}: {outcome.problem or 'passed'} ({outcome.seconds:.1f} s)"


def table(outcomes: Sequence[Outcome]) -> str:
    """The results as a Markdown table."""
    rows = [
        f"| {outcome.agent.name} | {outcome.version or '-'} | {outcome.agent.api} | "
        f"{'passed' if outcome.problem is None else outcome.problem.replace('|', '/')} | {outcome.seconds:.1f} |"
        for outcome in outcomes
    ]
    return "\n".join(["| agent | version | API | result | seconds |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
