"""`pooled-mlx status`: what it shows of every state, as text and as JSON, and what it returns."""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pooled_mlx import __version__
from pooled_mlx.mac import status_command
from pooled_mlx.mac.local_server import LocalServer, Reply
from pooled_mlx.mac.runs import note_exit, unattended
from tests.mac_fakes import GIB, FakeClock, health_body, mac_places, pool_body


class Stage:
    """The command over a server whose answers the test sets; None: nobody listens."""

    def __init__(self, home: Path) -> None:
        self.where = mac_places(home)
        self.health: dict[str, Any] | None = health_body(version=__version__)
        self.pool: dict[str, Any] | None = pool_body()
        self.asked: list[str] = []
        self.slept = 0

    def get(self, path: str) -> Reply:
        self.asked.append(path)
        if self.health is None:
            raise ConnectionRefusedError
        return Reply(200, self.health if path == "/health" else self.pool)

    def sleep(self, seconds: float) -> None:
        """Lets two more looks happen, then is Ctrl-C."""
        self.slept += 1
        if self.slept > 2:
            raise KeyboardInterrupt

    def run(self, *words: str, width: int = 130) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        status_command.add(parser.add_subparsers())
        args = parser.parse_args(["status", *words])
        screen = io.StringIO()
        console = Console(file=screen, width=width, color_system=None)
        code = status_command.run(args, where=self.where, sleep=self.sleep, console=console)
        return code, screen.getvalue()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("POOLED_TOKEN", raising=False)
    stage = Stage(tmp_path)
    monkeypatch.setattr(LocalServer, "get", lambda _, path: stage.get(path))
    return stage


def test_wired_memory_is_told_where_there_is_any(stage: Stage) -> None:
    assert "wired" not in stage.run()[1]
    assert stage.health is not None
    stage.health["memory"]["wired_bytes"] = 20 * GIB
    assert "running requests 1.0 GiB · wired 20.0 GiB" in stage.run()[1]


def test_a_working_server(stage: Stage) -> None:
    code, text = stage.run()
    assert code == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == f"● ready http://127.0.0.1:8080 version {__version__} up 1 h 12 min"
    for wanted in (
        "Model Qwen3.6 35B A3B · 4-bit · pooled/qwen3.6-35b-moe",
        "Context 131,072 tokens",
        "Load 2 running · 1 waiting · 214 served · 1 failed · idle",
        "Pool 5.0 GiB of 16.0 GiB 31 %",
        "Memory 27.0 GiB of 48.0 GiB · weights 19.0 GiB · running requests 1.0 GiB",
        "claude-cli messages writing 312 tokens, 61.2 tokens/s 8.4 s",
        "codex responses reading 40 % 12,288 of 29,971 tokens, 8,192 reused 3.1 s",
        "opencode chat_completions waiting 2 ahead 1.2 s",
        "claude-cli in use 21,034 218 MiB 37 3 s ago",
        "claude-cli side request 16,500 5.4 MiB 0 1 h 6 min ago",
    ):
        assert wanted in lines, wanted
    assert "all but the last turn was in the pool" in text
    assert "crash" not in text


def test_the_speed_of_the_last_seconds(stage: Stage) -> None:
    now = int(time.time())
    stage.health = health_body(rates=[{"t": now - back, "tokens_per_second": 33} for back in range(10)])
    assert "33 tokens/s" in stage.run()[1]


def test_nobody_listens(stage: Stage) -> None:
    stage.health = None
    code, text = stage.run()
    assert code == 1
    assert text.splitlines() == ["● not running  http://127.0.0.1:8080", "Start it with `pooled-mlx serve`."]


def test_a_download(stage: Stage) -> None:
    progress = {"done_bytes": 4.1 * GIB, "total_bytes": 10 * GIB, "bytes_per_second": 50 * 1024**2, "seconds_left": 121}
    stage.health = health_body(ready=False, state="downloading", reason="downloading the model", progress=progress, requests=[])
    code, text = stage.run()
    assert code == 3
    assert "● downloading" in text
    assert "41 % 4.1 GiB of 10.0 GiB 50.0 MiB/s 2 min 1 s left" in text
    assert stage.asked == ["/health"]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"ok": True}, 3, "Give it with --token-file or POOLED_TOKEN."),
        ({"hello": 1}, 1, "what answers there is not pooled-mlx"),
        (health_body(ok=False, ready=False, state="failed", reason="out of memory"), 3, "out of memory"),
        (health_body(version="0.0.9"), 0, f"Version {__version__} is installed: restart the server to use it."),
    ],
)
def test_other_states(stage: Stage, body: dict[str, Any], code: int, words: str) -> None:
    stage.health = body
    got, text = stage.run()
    assert (got, words in text) == (code, True)


def test_the_last_crash_and_its_last_words(stage: Stage) -> None:
    stage.where.logs.mkdir(parents=True)
    with unattended(stage.where, "0.1.0", redirect=False):
        stage.where.server_log.write_text("loading\nlibc++abi: terminating due to uncaught exception\n")
        note_exit(stage.where, os.getpid(), -6)
    code, text = stage.run()
    assert code == 0
    assert "killed by SIGABRT" in text
    assert "libc++abi: terminating due to uncaught exception" in text


def test_the_refusal_is_shown_while_nobody_listens(stage: Stage) -> None:
    with unattended(stage.where, "0.1.0", redirect=False, clock=FakeClock(time.time() - 60)) as run:
        run.refuse("port 8080 is used by pid 12")
    stage.health = None
    assert "Refused to start 1 min ago: port 8080 is used by pid 12" in stage.run()[1]
    stage.health = health_body()
    assert "Refused" not in stage.run()[1]


def test_json(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    code, screen = stage.run("--json")
    assert (code, screen) == (0, "")
    seen = json.loads(capsys.readouterr().out)
    assert seen["state"] == "ready"
    assert seen["health"]["running"] == 2
    assert seen["pool"]["segments"] == 8
    assert seen["installed_version"] == __version__
    assert (seen["last_crash"], seen["refusal"]) == (None, None)
    stage.health = None
    assert stage.run("--json")[0] == 1
    seen = json.loads(capsys.readouterr().out)
    assert (seen["state"], seen["health"], seen["pool"]) == ("stopped", None, None)


def test_watching_goes_on_until_ctrl_c(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = stage.run("--watch")
    assert code == 0
    assert stage.asked.count("/health") == 3
    assert text.count("● ready") == 3  # not a terminal: one look after the other, as they come
    stage.slept = 0
    assert stage.run("--watch", "--json")[0] == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["ready"] * 3


def test_what_clients_send_is_never_read_as_markup(stage: Stage) -> None:
    evil = "[red]x[/red] [/]"
    recent = [{**health_body()["recent"][0], "client": evil, "why": evil, "finish": "stop"}]
    requests = [{**health_body()["requests"][0], "client": evil}]
    pool = pool_body()
    pool["conversations"][1]["label"] = evil
    stage.health, stage.pool = health_body(recent=recent, requests=requests, reason=evil), pool
    text = stage.run(width=200)[1]
    assert text.count(evil) == 5


def test_odd_pools_are_left_out(stage: Stage) -> None:
    for pool in (None, [], {"conversations": None}, {"conversations": [3, {"children": 7}], "conversation_count": "x"}):
        stage.pool = pool  # pyright: ignore[reportAttributeAccessIssue]
        assert stage.run()[0] == 0


def test_many_conversations_are_cut_short(stage: Stage) -> None:
    pool = pool_body()
    pool["conversations"] = pool["conversations"] * 5
    pool["conversation_count"] = 123
    stage.pool = pool
    assert "and 115 more conversations" in stage.run()[1]


def test_a_narrow_terminal_breaks_nothing(stage: Stage) -> None:
    code, text = stage.run(width=60)
    assert code == 0
    assert max(len(line) for line in text.splitlines()) <= 60


def test_wrong_settings_are_one_line(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run("--port", "x")[0] == 1
    assert capsys.readouterr().err.startswith("pooled-mlx status: --port: 'x' is not a whole number")
