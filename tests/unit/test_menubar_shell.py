"""The rumps shell with a stand-in for rumps, the desktop, the child process, and the command itself."""

from __future__ import annotations

import argparse
import json
import plistlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.mac import menubar_command
from pooled_mlx.mac.desktop import MacDesktop, OwnCommands, launch_server, run_command
from pooled_mlx.mac.menu import Item, Menu, line
from pooled_mlx.mac.menu_model import MenuModel
from pooled_mlx.mac.program import UV_INSTALL
from pooled_mlx.mac.rumps_shell import RumpsShell, Worker
from tests.appkit_fakes import FakeMac
from tests.mac_fakes import mac_places


class FakeMenu(dict[str, Any]):
    """A `rumps.Menu`: entries in their order, filed under the titles they had when they were put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def add(self, entry: Any) -> None:
        self.made += 1
        self[entry.title if isinstance(entry, FakeEntry) else f"separator {self.made}"] = entry

    def insert_before(self, existing: str, entry: Any) -> None:
        rest = list(self.items())[list(self).index(existing) :]
        for key, _ in rest:
            del self[key]
        self.add(entry)
        self.update(rest)


class FakeEntry(FakeMenu):
    """A `rumps.MenuItem`."""

    def __init__(self, title: str, callback: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.title = title
        self.callback = callback
        self.state = 0

    def set_callback(self, callback: Callable[[Any], None] | None) -> None:
        self.callback = callback


class FakeRumps:
    """The part of rumps that is used."""

    separator = object()
    MenuItem = FakeEntry

    def __init__(self) -> None:
        self.quits = 0
        rumps = self

        class App:
            def __init__(self, name: str, title: str, quit_button: Any) -> None:
                assert quit_button is None
                self.name, self.title, self.menu = name, title, FakeMenu()
                rumps.app = self

            def run(self) -> None:
                pass

        self.App = App
        self.app: Any = None

    def quit_application(self) -> None:
        self.quits += 1

    def texts(self) -> list[str]:
        rows: list[str] = []

        def walk(entries: FakeMenu, depth: int) -> None:
            for entry in entries.values():
                if entry is self.separator:
                    rows.append("-")
                    continue
                rows.append("  " * depth + ("x " if entry.state else "") + entry.title + ("" if entry.callback else " (grey)"))
                walk(entry, depth + 1)

        walk(self.app.menu, 0)
        return rows


def menu(state: str = "Ready", title: str = "●", extra: tuple[Item, ...] = ()) -> Menu:
    models = Item("models", "Model", action=False, children=(Item("pick.a", "Same"), Item("pick.b", "Same", checked=True)))
    return Menu(title, (Item("state", state, action=False), line("1"), models, *extra, line("2"), Item("quit", "Quit")))


def shell_for(menus: list[Menu], folder: Path) -> tuple[FakeRumps, FakeMac, RumpsShell, list[str]]:
    rumps, mac, clicks = FakeRumps(), FakeMac(folder), []
    return rumps, mac, RumpsShell(rumps, mac.appkit, mac.foundation, lambda: menus[-1], clicks.append), clicks


def test_the_menu_is_drawn(tmp_path: Path) -> None:
    rumps, mac, shell, clicks = shell_for([menu()], tmp_path)
    shell.run()
    assert rumps.app.title == "●"
    assert rumps.texts() == ["Ready (grey)", "-", "Model (grey)", "  Same", "  x Same", "-", "Quit"]
    rumps.app.menu["models"]["pick.b"].callback(None)
    rumps.app.menu["quit"].callback(None)
    assert clicks == ["pick.b", "quit"]
    assert mac.timers[0][1] <= 1


def test_what_stays_is_changed_in_place_and_what_is_new_gets_its_place(tmp_path: Path) -> None:
    menus = [menu()]
    rumps, _, shell, _ = shell_for(menus, tmp_path)
    shell.draw()
    before = dict(rumps.app.menu)
    menus.append(menu("1 running", "● 61 t/s", extra=(Item("stop", "Stop server"),)))
    shell.draw()
    shell.draw()
    assert rumps.app.title == "● 61 t/s"
    assert rumps.texts() == ["1 running (grey)", "-", "Model (grey)", "  Same", "  x Same", "Stop server", "-", "Quit"]
    assert all(rumps.app.menu[key] is entry for key, entry in before.items())
    menus.append(menu())
    shell.draw()
    assert dict(rumps.app.menu) == before


def test_quit_is_done_by_the_timer_and_not_by_the_calling_thread(tmp_path: Path) -> None:
    rumps, mac, shell, _ = shell_for([menu()], tmp_path)
    shell.run()
    shell.quit()
    assert rumps.quits == 0
    mac.tick()
    assert rumps.quits == 1


class CountingModel(MenuModel):
    """Counts what the worker asks of it."""

    def __init__(self) -> None:
        self.polled = threading.Semaphore(0)
        self.acts: list[str] = []
        self.menu = menu()

    def poll(self) -> Menu:
        self.polled.release()
        return self.menu

    def act(self, item_id: str) -> Menu:
        self.acts.append(item_id)
        return self.menu


def test_the_worker_polls_and_clicks_in_order() -> None:
    model = CountingModel()
    worker = Worker(model, poll_seconds=0.001)
    worker.start()
    for _ in range(3):
        assert model.polled.acquire(timeout=30)
    for click in ("a", "b", "c"):
        worker.click(click)
    worker.close()
    assert model.acts == ["a", "b", "c"]
    assert worker.menu is model.menu


def test_a_worker_outlives_what_it_did_not_expect_and_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    model = CountingModel()
    failures = [subprocess.TimeoutExpired("launchctl", 60), ValueError("odd")]

    def act(item_id: str) -> Menu:
        if failures:
            raise failures.pop()
        return CountingModel.act(model, item_id)

    model.act = act  # pyright: ignore[reportAttributeAccessIssue]
    worker = Worker(model, poll_seconds=1e6)
    worker.start()
    worker.click("a")
    worker.click("b")
    worker.close()
    assert (worker.menu.title, worker.menu.items[0].text) == (
        "▲",
        "TimeoutExpired: Command 'launchctl' timed out after 60 seconds",
    )
    assert [item.id for item in worker.menu.items].count("problem") == 1
    assert "ValueError: odd" in caplog.text
    worker = Worker(model, poll_seconds=0.001)
    worker.start()
    worker.click("c")
    worker.close()
    assert model.acts == ["c"]


class Commands:
    """Records commands and answers them."""

    def __init__(self, output: bytes = b"") -> None:
        self.seen: list[tuple[list[str], bytes | None]] = []
        self.output = output

    def __call__(self, command: Sequence[str], data: bytes | None = None) -> bytes:
        self.seen.append((list(command), data))
        return self.output


def test_clipboard_and_open(tmp_path: Path) -> None:
    run, left = Commands(), []
    desktop = MacDesktop(mac_places(tmp_path), ["pooled-mlx"], lambda: left.append(1), run)
    desktop.copy("http://127.0.0.1:8080/v1")
    desktop.open("http://127.0.0.1:8080/")
    desktop.quit()
    assert run.seen == [
        (["/usr/bin/pbcopy"], b"http://127.0.0.1:8080/v1"),
        (["/usr/bin/open", "http://127.0.0.1:8080/"], None),
    ]
    assert left == [1]


def test_the_login_item(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    desktop = MacDesktop(where, ["/usr/local/bin/pooled-mlx"], lambda: None, Commands(), ["--port", "8090"])
    assert not desktop.at_login()
    desktop.set_at_login(True)
    assert desktop.at_login()
    facts = plistlib.loads(where.agent_file("pooled-mlx.menubar").read_bytes())
    assert facts["ProgramArguments"] == ["/usr/local/bin/pooled-mlx", "menubar", "--port", "8090"]
    assert facts["RunAtLoad"] is True
    assert "KeepAlive" not in facts, "a menu bar that was quit stays away"
    desktop.set_at_login(False)
    desktop.set_at_login(False)
    assert not desktop.at_login()


def test_our_own_commands() -> None:
    run = Commands(b'[{"id": "a"}]')
    commands = OwnCommands(["pooled-mlx"], ["--port", "8090"], run)
    assert commands.models() == [{"id": "a"}]
    assert commands.connect("codex") == '[{"id": "a"}]'
    assert [command for command, _ in run.seen] == [
        ["pooled-mlx", "models", "list", "--all", "--json"],
        ["pooled-mlx", "connect", "codex", "--port", "8090"],
    ]
    run.output = b"oops"
    with pytest.raises(OSError, match="did not print JSON"):
        commands.models()


def test_a_failing_command_speaks_its_last_line() -> None:
    script = "import sys; print('Traceback'); print('no model fits', file=sys.stderr); sys.exit(2)"
    with pytest.raises(OSError, match="no model fits"):
        run_command([sys.executable, "-c", script])
    with pytest.raises(OSError, match="failed with code 3"):
        run_command([sys.executable, "-c", "import sys; sys.exit(3)"])
    assert run_command([sys.executable, "-c", "import sys; print(sys.stdin.read())"], b"hello") == b"hello\n"


def test_a_real_child_has_its_own_session_and_its_output_in_the_log(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    script = "import os, sys; print(os.getsid(0) == os.getpid(), sys.argv[1:])"
    child = launch_server([sys.executable, "-c", script], where, ["--port", "8090"], "qwen3-1.7b")
    assert child.wait(timeout=60) == 0
    wanted = f"True {['serve', '--service', '--model', 'qwen3-1.7b', '--port', '8090']}\n"
    assert where.launchd_log.read_text() == wanted
    child = launch_server([sys.executable, "-c", script], where, [], None)
    assert child.wait(timeout=60) == 0
    assert where.launchd_log.read_text() == wanted + f"True {['serve', '--service']}\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("POOLED_TOKEN", raising=False)
    monkeypatch.setattr("pooled_mlx.mac.menubar_command.OwnCommands", lambda *_: Listing())
    return tmp_path


class Listing:
    def models(self) -> Any:
        return json.loads('[{"id": "smollm2-135m", "label": "SmolLM2 135M", "fits": true}]')

    def connect(self, agent: str) -> str:
        return agent


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    menubar_command.add(parser.add_subparsers())
    return parser.parse_args(["menubar", *words])


def test_the_menu_as_text_on_any_system(home: Path, free_port: int) -> None:
    written: list[str] = []
    args = parse("--text", "--port", str(free_port))
    assert menubar_command.run(args, platform="linux", where=mac_places(home), write=written.append) == 0
    assert "[Stopped]" in written[0]
    assert "SmolLM2 135M" in written[0]
    assert f"http://127.0.0.1:{free_port}/v1" in written[0]


def test_the_agents_are_those_of_connect(home: Path) -> None:
    from pooled_mlx.connect.registry import AGENTS, profile_of
    from pooled_mlx.connect.target import Target

    target = Target("http://127.0.0.1:8080", "pooled/x", 8192)
    assert [name for name, _ in menubar_command.AGENTS] == list(AGENTS)
    where = mac_places(home)
    assert menubar_command.connect_options(parse(), where, target.base_url) == ["--url", target.base_url]
    where.token_file.parent.mkdir(parents=True, exist_ok=True)
    where.token_file.write_text("x")
    wanted = ["--url", target.base_url, "--token-file", str(where.token_file)]
    assert menubar_command.connect_options(parse(), where, target.base_url) == wanted
    assert menubar_command.connect_options(parse("--token-file", "/t"), where, target.base_url)[-1] == "/t"
    assert profile_of("codex", target).text


def test_elsewhere_and_without_rumps_it_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert menubar_command.run(parse(), platform="linux", where=mac_places(home)) == 1
    assert "needs macOS" in capsys.readouterr().err

    def missing() -> Any:
        raise ImportError("No module named 'rumps'", name="rumps")

    assert menubar_command.run(parse(), platform="darwin", where=mac_places(home), load=missing) == 1
    errors = capsys.readouterr().err
    assert errors == f"pooled-mlx menubar: rumps is not installed. Run {UV_INSTALL}\n"


def test_wrong_settings_are_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        menubar_command.run(
            parse("--port", "99999"), platform="darwin", where=mac_places(home), load=lambda: (FakeRumps(), None, None)
        )
        == 1
    )
    assert capsys.readouterr().err.startswith("pooled-mlx menubar: --port: 99999 must be between")


def test_the_whole_menu_bar_shows_and_quits(home: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rumps, mac = FakeRumps(), FakeMac(home)
    launched: list[list[str]] = []

    class Idle:
        pid = 4711

        def poll(self) -> None:
            return None

    def launch(program: Sequence[str], where: Any, arguments: Sequence[str], model: str | None) -> Any:
        launched.append(list(arguments))
        return Idle()

    monkeypatch.setattr("pooled_mlx.mac.menubar_command.launch_server", launch)
    workers: list[Worker] = []
    real = Worker

    def worker(model: MenuModel) -> Worker:
        workers.append(real(model, poll_seconds=0.001))
        return workers[-1]

    monkeypatch.setattr("pooled_mlx.mac.menubar_command.Worker", worker)

    def wait_until_started(self: Any) -> None:
        workers[0].click("quit")
        workers[0].close()
        mac.tick()

    monkeypatch.setattr(rumps.App, "run", wait_until_started)
    args = parse("--port", str(free_port))
    modules = (rumps, mac.appkit, mac.foundation)
    assert menubar_command.run(args, platform="darwin", where=mac_places(home), load=lambda: modules) == 0
    assert launched == [["--port", str(free_port)]]
    assert rumps.quits == 1


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_importing_the_menu_bar_loads_neither_mlx_nor_a_web_framework() -> None:
    code = (
        "import sys, pooled_mlx.mac.menubar_command, pooled_mlx.mac.service_command, pooled_mlx.mac.status_command\n"
        "print([name for name in ('mlx', 'mlx_lm', 'quart', 'hypercorn', 'pydantic', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"
