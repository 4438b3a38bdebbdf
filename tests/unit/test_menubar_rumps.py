"""The shell on the real code of rumps, over stand-ins for AppKit: no entry is lost or left behind, an open menu lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.mac.facts import read_health
from pooled_mlx.mac.menu import Menu
from pooled_mlx.mac.menu_model import read_models
from pooled_mlx.mac.menu_view import View, build_menu
from pooled_mlx.mac.rumps_shell import DRAW_SECONDS, RumpsShell
from tests.appkit_fakes import SOURCES, FakeMac
from tests.mac_fakes import GIB, health_body

pytestmark = pytest.mark.skipif(
    not SOURCES.is_dir(), reason="the sources of rumps are not here: scripts/mac_wheels.py fetches them from the package index"
)

MODELS = read_models([{"id": f"m{number}", "label": "Same", "weights_bytes": GIB} for number in range(4)])
AGENTS = (("claude", "Claude Code"), ("codex", "Codex"))


class Stage:
    def __init__(self, rumps: Any, mac: FakeMac) -> None:
        self.rumps, self.mac = rumps, mac
        self.menus: list[Menu] = [build_menu(View())]
        self.clicks: list[str] = []
        self.shell = RumpsShell(rumps, mac.appkit, mac.foundation, lambda: self.menus[-1], self.clicks.append)

    @property
    def registry(self) -> dict[Any, Any]:
        """Every entry that rumps ever made is kept here."""
        return self.rumps.rumps.NSApp._ns_to_py_and_callback

    @property
    def on_screen(self) -> list[str]:
        return self.shell.app.menu._menu.texts()

    def show(self, menu: Menu) -> list[str]:
        self.menus.append(menu)
        self.shell.draw()
        return self.on_screen


@pytest.fixture
def mac(tmp_path: Path) -> FakeMac:
    return FakeMac(tmp_path)


@pytest.fixture
def stage(mac: FakeMac) -> Iterator[Stage]:
    with mac.real_rumps(SOURCES) as rumps:
        yield Stage(rumps, mac)


def busy(requests: int, models: int = 4, **more: Any) -> Menu:
    rows = (health_body()["requests"] * 3)[:requests]
    facts = read_health(health_body(requests=rows), now=1_000.0)
    return build_menu(View(facts=facts, owner="child", models=MODELS[:models], agents=AGENTS, has_token=True, **more))


def drawn(menu: Menu) -> list[str]:
    """What `menu` must look like."""

    def rows(items: Any, depth: int) -> list[str]:
        found = []
        for item in items:
            grey = "" if item.action else " (grey)"
            found.append("-" if item.separator else "  " * depth + ("x " if item.checked else "") + item.text + grey)
            found += rows(item.children, depth + 1)
        return found

    return rows(menu.items, 0)


def test_every_menu_is_drawn_whatever_stood_there_before(stage: Stage) -> None:
    menus = [build_menu(View()), *(busy(count) for count in (0, 1, 6, 2)), busy(1, models=2), busy(0, problem="no room")]
    for first in menus:
        for second in menus:
            stage.show(first)
            assert stage.show(second) == drawn(second)


def test_a_thousand_rebuilds_leave_a_constant_number_of_items(stage: Stage) -> None:
    sizes = set()
    for number in range(1000):
        stage.show(busy(number % 8, models=1 + number % 4, problem="no room" if number % 3 else ""))
        if number >= 24:  # each combination has been there
            sizes.add(len(stage.registry))
    assert len(sizes) == 1
    assert sizes.pop() < 60


def test_what_stays_keeps_its_entry_so_that_an_open_submenu_stays_open(stage: Stage) -> None:
    def entries() -> dict[str, Any]:
        return {item.text: item for item in stage.shell.app.menu._menu.items if not item.is_separator}

    stage.show(busy(0))
    before = entries()
    stage.show(busy(3))
    after = entries()
    assert all(after[text] is before[text] for text in ("Model", "Copy token", "Open log", "Quit (the server keeps running)"))
    assert after["Model"].submenu is before["Model"].submenu


def test_clicks_reach_the_id_and_an_entry_that_turns_grey_takes_none(stage: Stage) -> None:
    stage.show(busy(0))
    items = {item.text: item for item in stage.shell.app.menu._menu.items}
    items["Stop server"].click()
    items["Model"].submenu.items[2].click()
    assert stage.clicks == ["stop", "pick.m2"]
    stage.show(build_menu(View(facts=read_health(health_body(), now=1_000.0), owner="somebody", models=MODELS)))
    with pytest.raises(AssertionError, match="is grey"):
        items["Model"].submenu.items[2].click()


def test_it_has_no_place_in_the_dock_and_an_open_menu_lives(stage: Stage, mac: FakeMac) -> None:
    stage.shell.run()
    assert mac.policy == mac.appkit.NSApplicationActivationPolicyAccessory
    assert mac.calls.index("policy") < mac.calls.index("status item")
    ((_, seconds, mode),) = mac.timers
    assert (seconds, mode) == (DRAW_SECONDS, mac.foundation.NSRunLoopCommonModes)
    stage.menus.append(busy(2))
    mac.tick()
    assert stage.on_screen == drawn(busy(2))
    assert mac.status_item is not None
    assert mac.status_item.title() == stage.menus[-1].title
    stage.shell.quit()
    mac.tick()
    assert mac.terminated == 1


def test_a_drawing_that_fails_is_logged_and_tried_again(stage: Stage, mac: FakeMac, caplog: pytest.LogCaptureFixture) -> None:
    stage.shell.run()
    stage.menus.append(None)  # pyright: ignore[reportArgumentType]
    mac.tick()
    assert "the menu cannot be drawn" in caplog.text
    stage.menus.append(busy(1))
    mac.tick()
    assert stage.on_screen == drawn(busy(1))
