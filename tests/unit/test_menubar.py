"""The menu bar's logic, driven with stand-ins: attach, start, crash, stop, pick, copy; and what the menu says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.mac.facts import Running, ServerFacts, read_health
from pooled_mlx.mac.launchd import LaunchdError
from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.menu import Menu, render_text
from pooled_mlx.mac.menu_model import MODELS_EVERY_SECONDS, NOTE_SECONDS, MenuModel, Parts, read_models
from pooled_mlx.mac.menu_view import ModelChoice, View, build_menu, request_text, state_text, title
from pooled_mlx.mac.runs import Run, unattended
from tests.mac_fakes import GIB, FakeChild, FakeClock, health_body, mac_places

ROOT = Path(__file__).parents[2]
MODELS = [
    {"id": "qwen3.6-35b-moe", "label": "Qwen3.6 35B A3B", "weights_bytes": 19 * GIB, "on_disk": True, "fits": True},
    {"id": "qwen3-1.7b", "label": "Qwen3 1.7B", "weights_bytes": GIB, "on_disk": False, "fits": True},
    {
        "id": "qwen3.8-27b",
        "label": "Qwen3.8 27B",
        "weights_bytes": 15 * GIB,
        "fits": False,
        "why": "it needs 24.0 GiB (weights 15 GiB), this Mac has 16.0 GiB. Choose another one",
    },
]
AGENTS = (("claude", "Claude Code"), ("codex", "Codex"))


class FakeServer(LocalServer):
    """Answers `health` with what the test sets; None: nobody listens."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:8080")
        self.facts: ServerFacts | None = None

    def health(self) -> ServerFacts:
        return self.facts or ServerFacts(state="stopped", reason="nothing listens")


class FakeService:
    def __init__(self) -> None:
        self.installed = False
        self.is_running = False
        self.calls: list[str] = []
        self.fails = ""

    def running(self) -> bool:
        return self.is_running

    def _do(self, call: str) -> None:
        if self.fails:
            raise LaunchdError(self.fails)
        self.calls.append(call)

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def restart(self) -> None:
        self._do("restart")

    def set_model(self, card_id: str) -> None:
        self._do(f"model {card_id}")


class FakeDesktop:
    def __init__(self) -> None:
        self.copied: list[str] = []
        self.opened: list[str] = []
        self.login = False
        self.left = False
        self.fails = ""

    def copy(self, text: str) -> None:
        if self.fails:
            raise OSError(self.fails)
        self.copied.append(text)

    def open(self, target: str) -> None:
        self.opened.append(target)

    def at_login(self) -> bool:
        return self.login

    def set_at_login(self, on: bool) -> None:
        self.login = on

    def quit(self) -> None:
        self.left = True


class FakeCommands:
    def __init__(self) -> None:
        self.listings = 0
        self.fails = ""

    def models(self) -> Any:
        self.listings += 1
        if self.fails:
            raise OSError(self.fails)
        return MODELS

    def connect(self, agent: str) -> str:
        return f"settings of {agent}\n"


class Stage:
    """A menu model with everything around it faked."""

    def __init__(self, home: Path) -> None:
        self.where = mac_places(home)
        self.server = FakeServer()
        self.service = FakeService()
        self.desktop = FakeDesktop()
        self.commands = FakeCommands()
        self.clock = FakeClock()
        self.children: list[FakeChild] = []
        self.launched: list[str | None] = []
        self.terminated: list[int] = []
        self.token: str | None = None
        self.alive: Callable[[Run], bool] = lambda run: True
        self.model = self.fresh()

    def fresh(self) -> MenuModel:
        """A menu bar that has just been started."""
        return MenuModel(
            Parts(
                where=self.where,
                server=self.server,
                launch=self.launch,
                service=self.service,
                desktop=self.desktop,
                commands=self.commands,
                version="0.1.0",
                agents=AGENTS,
                terminate=self.terminated.append,
                alive=lambda run: self.alive(run),
                read_token=lambda: self.token,
                clock=self.clock,
                wall_clock=self.clock,
            )
        )

    def launch(self, card_id: str | None) -> FakeChild:
        self.launched.append(card_id)
        self.children.append(FakeChild(500 + len(self.children)))
        return self.children[-1]

    def up(self, **changes: Any) -> None:
        self.server.facts = read_health(health_body(**changes), now=self.clock.now)

    def down(self) -> None:
        self.server.facts = None

    def poll(self, seconds: float = 1.0) -> Menu:
        self.clock.sleep(seconds)
        return self.model.poll()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def text(menu: Menu, item_id: str) -> str:
    item = menu.find(item_id)
    assert item is not None, f"{item_id} is not in {[item.id for item in menu.walk()]}"
    return item.text


def can(menu: Menu, item_id: str) -> bool:
    item = menu.find(item_id)
    return item is not None and item.action


# --- who starts what


def test_it_starts_a_child_when_nothing_answers(stage: Stage) -> None:
    menu = stage.poll()
    assert stage.launched == [None]
    assert text(menu, "state") == "Starting"
    assert menu.title == "◔"
    stage.up()
    menu = stage.poll()
    assert text(menu, "state") == "Ready · 2 running · 1 queued"
    assert can(menu, "stop")
    assert can(menu, "restart")


def test_it_attaches_to_a_server_that_answers(stage: Stage) -> None:
    stage.up()
    menu = stage.poll()
    assert stage.launched == []
    assert menu.find("stop") is None
    assert "Started elsewhere" in text(menu, "elsewhere")
    stage.down()
    menu = stage.poll()
    assert stage.launched == [], "a server that somebody else ended is not started behind their back"
    assert can(menu, "start")
    stage.model.act("start")
    assert stage.launched == [None]


@pytest.mark.parametrize("state", ["foreign", "silent"])
def test_it_starts_nothing_while_something_else_holds_the_port(stage: Stage, state: str) -> None:
    stage.server.facts = ServerFacts(state=state, reason="what answers there is not pooled-mlx")
    menu = stage.poll()
    assert stage.launched == []
    assert menu.title == "▲"
    assert text(menu, "state") == "What answers there is not pooled-mlx"
    assert not can(menu, "start")
    stage.down()
    stage.poll()
    assert stage.launched == [None]


def test_looking_alone_starts_nothing(stage: Stage) -> None:
    assert text(stage.model.look(), "state") == "Stopped"
    stage.poll()
    assert stage.launched == []


def test_with_a_service_launchd_does_the_work(stage: Stage) -> None:
    stage.service.installed = True
    stage.poll()
    assert stage.launched == []
    assert stage.service.calls == ["start"]
    stage.service.is_running = True
    stage.up()
    stage.poll()
    for action in ("restart", "stop", "pick.qwen3-1.7b"):
        assert can(stage.model.act(action), "restart")
    assert stage.service.calls == ["start", "restart", "stop", "model qwen3-1.7b"]
    assert stage.launched == []


def test_a_service_that_is_starting_is_not_started_twice(stage: Stage) -> None:
    stage.service.installed = stage.service.is_running = True
    stage.poll()
    assert stage.service.calls == []


def test_launchd_is_asked_now_and_then_only(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(stage.service, "running", lambda: bool(asked.append(1)) or True)
    stage.service.installed = True
    stage.up()
    for _ in range(30):
        assert can(stage.poll(), "stop")
    assert len(asked) <= 3


def test_what_launchd_says_is_shown(stage: Stage) -> None:
    stage.service.installed = True
    stage.service.fails = "launchctl kickstart failed with code 5"
    menu = stage.poll()
    assert text(menu, "state") == "launchctl kickstart failed with code 5"
    assert text(stage.model.act("start"), "state") == "launchctl kickstart failed with code 5"
    stage.service.fails = ""
    stage.model.act("start")
    assert stage.service.calls == ["start"]


# --- crashes


def test_a_crashed_server_comes_back_and_the_crash_is_told(stage: Stage) -> None:
    stage.poll()
    stage.up()
    stage.poll()
    stage.down()
    stage.children[0].code = -9
    menu = stage.poll()
    assert menu.title == "▲"
    assert text(menu, "state") == "Crashed, starts again in 1.0 s"
    assert "killed by SIGKILL" in text(menu, "crash")
    assert can(menu, "stop")
    stage.poll()
    assert len(stage.children) == 2
    stage.up()
    assert text(stage.poll(), "state").startswith("Ready")
    day = 24 * 3600
    assert stage.poll(seconds=day + 1).find("crash") is None


def test_a_refusal_ends_the_tries_and_is_told(stage: Stage) -> None:
    stage.poll()
    with unattended(stage.where, "0.1.0", redirect=False) as run:
        run.refuse("the model needs 24.0 GiB, this Mac has 16.0 GiB")
    stage.children[0].code = 0
    menu = stage.poll()
    assert text(menu, "state") == "Refused to start: the model needs 24.0 GiB, this Mac has 16.0 GiB"
    stage.poll(seconds=600)
    assert len(stage.children) == 1
    assert can(menu, "start")
    stage.model.act("start")
    assert len(stage.children) == 2


def test_a_program_that_cannot_be_started_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(card_id: str | None) -> FakeChild:
        raise FileNotFoundError("no such program: pooled-mlx")

    monkeypatch.setattr(stage, "launch", launch)
    stage.model = stage.fresh()
    menu = stage.poll()
    assert text(menu, "problem") == "the server could not be started: no such program: pooled-mlx"
    assert menu.title == "▲"


# --- stop and restart


def test_stop_is_final_until_start(stage: Stage) -> None:
    stage.poll()
    stage.up()
    stage.poll()
    stage.model.act("stop")
    stage.down()
    menu = stage.poll()
    assert text(menu, "state") == "Stopped"
    assert stage.children[0].asked == 1
    stage.poll(seconds=600)
    assert len(stage.children) == 1
    assert menu.find("crash") is None, "a wanted end is no crash"


def test_restart_starts_a_second_child(stage: Stage) -> None:
    stage.poll()
    stage.model.act("restart")
    stage.poll()
    assert len(stage.children) == 2


def test_a_child_of_an_earlier_menu_bar_can_be_stopped_and_restarted(stage: Stage) -> None:
    with unattended(stage.where, "0.1.0", redirect=False):
        stage.up()
        menu = stage.poll()
        assert stage.launched == []
        assert can(menu, "stop")
        stage.model.act("restart")
        assert stage.terminated == [os.getpid()]
        stage.down()
        stage.poll()
        assert stage.launched == [], "the old one has not gone yet"
        stage.alive = lambda run: False
        stage.poll()
        assert stage.launched == [None]


def test_stop_of_a_former_child(stage: Stage) -> None:
    with unattended(stage.where, "0.1.0", redirect=False):
        stage.up()
        stage.poll()
        stage.model.act("stop")
        assert stage.terminated == [os.getpid()]
        stage.alive = lambda run: False
        stage.down()
        stage.poll()
        assert stage.launched == []


# --- models


def test_picking_a_model_restarts_with_it_and_is_remembered(stage: Stage) -> None:
    stage.poll()
    stage.up()
    menu = stage.poll()
    assert [item.checked for item in menu.find("models").children] == [True, False, False]  # pyright: ignore[reportOptionalMemberAccess]
    stage.model.act("pick.qwen3-1.7b")
    stage.down()
    stage.poll()
    assert stage.launched == [None, "qwen3-1.7b"]
    stage.model = stage.fresh()
    stage.poll()
    assert stage.launched[-1] == "qwen3-1.7b"


def test_picking_with_no_server_starts_one(stage: Stage) -> None:
    stage.model.look()
    stage.model.act("pick.qwen3-1.7b")
    assert stage.launched == ["qwen3-1.7b"]


def test_a_model_that_does_not_fit_says_why_and_cannot_be_picked(stage: Stage) -> None:
    menu = stage.poll()
    assert text(menu, "pick.qwen3.8-27b") == "Qwen3.8 27B · 15.0 GiB · needs 24.0 GiB"
    assert not can(menu, "pick.qwen3.8-27b")
    assert text(menu, "pick.qwen3.6-35b-moe") == "Qwen3.6 35B A3B · 19.0 GiB · on disk"
    assert can(menu, "pick.qwen3-1.7b")


def test_the_model_of_somebody_else_s_server_cannot_be_changed(stage: Stage) -> None:
    stage.up()
    assert not can(stage.poll(), "pick.qwen3-1.7b")


def test_the_list_of_models_is_read_now_and_then(stage: Stage) -> None:
    for _ in range(5):
        stage.poll()
    assert stage.commands.listings == 1
    stage.commands.fails = "pooled-mlx models list failed with code 1"
    menu = stage.poll(seconds=MODELS_EVERY_SECONDS)
    assert stage.commands.listings == 2
    assert text(menu, "problem") == "pooled-mlx models list failed with code 1"
    assert menu.find("models") is not None


@pytest.mark.parametrize("listing", [None, 3, {"models": "x"}, [1, {"label": "no id"}]])
def test_odd_listings_have_no_choices(listing: Any) -> None:
    assert read_models(listing) == ()


def test_listings_in_an_object_are_read_too() -> None:
    assert read_models({"models": [{"id": "a"}]}) == (ModelChoice("a", "a"),)


def test_a_damaged_choice_is_forgotten(stage: Stage) -> None:
    stage.where.state.mkdir(parents=True)
    for damage in ("{", "[]", '{"model": 3}'):
        (stage.where.state / "menubar.json").write_text(damage)
        stage.fresh().poll()
        assert stage.launched[-1] is None


# --- copying, opening, leaving


def test_addresses_token_and_settings_are_copied(stage: Stage) -> None:
    stage.token = "secret"
    stage.up()
    stage.poll()
    for action in ("copy.openai", "copy.anthropic", "copy.token", "connect.codex"):
        menu = stage.model.act(action)
    assert stage.desktop.copied == ["http://127.0.0.1:8080/v1", "http://127.0.0.1:8080", "secret", "settings of codex\n"]
    assert text(menu, "note") == "Copied the settings for Codex"
    assert stage.poll(seconds=NOTE_SECONDS).find("note") is None
    assert "secret" not in render_text(stage.model.menu)
    assert stage.server.token == "secret"


def test_no_token_no_item(stage: Stage) -> None:
    assert stage.poll().find("copy.token") is None


def test_what_goes_wrong_is_shown_and_forgotten_at_the_next_click(stage: Stage) -> None:
    stage.up()
    stage.poll()
    stage.desktop.fails = "pbcopy failed"
    assert text(stage.model.act("copy.openai"), "problem") == "pbcopy failed"
    stage.desktop.fails = ""
    assert stage.model.act("copy.openai").find("problem") is None


def test_page_log_login_and_quit(stage: Stage) -> None:
    assert not can(stage.poll(), "page")
    assert text(stage.model.act("log"), "note") == "There is no log yet"
    stage.up()
    assert can(stage.poll(), "page")
    stage.where.logs.mkdir(parents=True)
    stage.where.server_log.write_text("hello")
    stage.model.act("page")
    stage.model.act("log")
    stage.model.act("crash")
    assert stage.desktop.opened == ["http://127.0.0.1:8080/", *[str(stage.where.server_log)] * 2]
    assert stage.model.act("login").find("login").checked  # pyright: ignore[reportOptionalMemberAccess]
    assert not stage.model.act("login").find("login").checked  # pyright: ignore[reportOptionalMemberAccess]
    stage.model.act("quit")
    assert stage.desktop.left
    assert text(stage.model.menu, "quit") == "Quit (the server keeps running)"


def test_an_older_server_offers_a_restart(stage: Stage) -> None:
    stage.poll()
    stage.up(version="0.0.9")
    menu = stage.poll()
    assert text(menu, "upgrade") == "Version 0.0.9 runs, 0.1.0 is installed: restart"
    stage.model.act("upgrade")
    assert stage.children[0].asked == 1


# --- what the menu says


def facts(**changes: Any) -> ServerFacts:
    return read_health(health_body(**changes), now=1_790_000_236.0)


GROWING = {"done_bytes": 4.1 * GIB, "total_bytes": 10 * GIB, "bytes_per_second": 50 * 1024**2, "seconds_left": 121}


@pytest.mark.parametrize(
    ("view", "wanted_title", "state"),
    [
        (View(), "○", "Stopped"),
        (View(child="running"), "◔", "Starting"),
        (View(child="stopping"), "○", "Stopping"),
        (View(child="waiting", restart_seconds=4.2), "▲", "Crashed, starts again in 4.2 s"),
        (View(facts=facts(state="loading", ready=False, progress=GROWING)), "◔ 41 %", "Loading 41 %"),
        (View(facts=facts(state="loading", ready=False)), "◔", "Loading"),
        (
            View(facts=facts(state="downloading", ready=False, progress=GROWING)),
            "◔ 41 %",
            "Downloading 4.1 GiB of 10.0 GiB · 50.0 MiB/s · 2 min 1 s left",
        ),
        (View(facts=facts(state="downloading", ready=False)), "◔", "Downloading"),
        (View(facts=facts(state="failed", ready=False, reason="engine died")), "▲", "Failed: engine died"),
        (View(facts=facts(state="stopping", ready=False)), "○", "Stopping"),
        (View(facts=read_health({"ok": True})), "▲", "Running, but it wants a token that is not known here"),
        (View(facts=facts(requests=[], running=0, queue=0, rates=[])), "●", "Ready"),
        (View(facts=facts()), "● 50 t/s", "Ready · 2 running · 1 queued"),
        (View(facts=facts(rates=[])), "● 61 t/s", "Ready · 2 running · 1 queued"),
        (View(facts=facts(requests=health_body()["requests"][1:], rates=[])), "● 40 %", "Ready · 2 running · 1 queued"),
    ],
)
def test_title_and_first_line(view: View, wanted_title: str, state: str) -> None:
    assert title(view) == wanted_title
    assert state_text(view) == state


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (Running(client="a", state="queued", ahead=2), "a: waiting, 2 ahead"),
        (Running(client="a", state="queued", ahead=0), "a: waiting"),
        (Running(client="a", state="prefill", prefill_done=410, prefill_total=1000), "a: reading 41 % of 1,000 tokens"),
        (Running(client="a", state="decode", generated=1312, tokens_per_second=61.2), "a: 1,312 tokens written, 61 tokens/s"),
        (Running(client="a", state="decode", generated=1), "a: 1 tokens written"),
    ],
)
def test_request_lines(row: Running, wanted: str) -> None:
    assert request_text(row) == wanted


def test_long_texts_are_cut_to_the_width_of_a_menu() -> None:
    menu = build_menu(View(problem="x" * 500 + "\nsecond line", models=(ModelChoice("a", "A", fits=False, why="odd"),)))
    assert max(len(item.text) for item in menu.walk()) == 100
    assert text(menu, "state").endswith("…")
    assert text(menu, "pick.a") == "A · does not fit"


def test_many_requests_are_cut_short() -> None:
    menu = build_menu(View(facts=facts(requests=[health_body()["requests"][2]] * 8)))
    assert [item.id for item in menu.items if item.id.startswith("request")][-2:] == ["request.4", "request.more"]
    assert text(menu, "request.more") == "and 3 more requests"


def test_ids_are_unique_and_stay_while_texts_change() -> None:
    view = View(facts=facts(), models=read_models(MODELS), agents=AGENTS, has_token=True)
    menu = build_menu(view)
    ids = [item.id for item in menu.walk()]
    assert len(ids) == len(set(ids))
    busy = build_menu(replace(view, facts=facts(running=1, served=300, rates=[])))
    assert [item.id for item in busy.walk()] == ids
    assert busy != menu


def documented_view() -> View:
    """The menu in the documentation."""
    return View(
        facts=facts(),
        owner="child",
        child="running",
        models=read_models(MODELS),
        agents=AGENTS,
        at_login=True,
        has_token=True,
        version="0.1.0",
        now=1e9,
    )


def test_the_menu_in_the_documentation_is_the_real_one() -> None:
    page = (ROOT / "docs" / "menubar.md").read_text(encoding="utf-8")
    assert f"```text\n{render_text(build_menu(documented_view()))}\n```" in page
