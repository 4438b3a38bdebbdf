"""The app that Spotlight finds, its icon, and what cannot show a menu bar item."""

from __future__ import annotations

import argparse
import os
import plistlib
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx import __version__
from pooled_mlx.mac import menubar_command
from pooled_mlx.mac.app_bundle import undrawable, write_app
from pooled_mlx.mac.desktop import MENUBAR_LABEL, menubar_agent
from pooled_mlx.mac.icon import SIZES, icns, png
from pooled_mlx.mac.launchd import Launchctl
from tests.mac_fakes import FakeLaunchd, mac_places


class Stage:
    """`pooled-mlx menubar install` in a home folder of its own."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.where, self.launchd = home, mac_places(home), FakeLaunchd()
        self.lines: list[str] = []
        self.obstacle: str | None = None
        self.program = str(home / "tools" / "bin" / "pooled-mlx")
        for name in list(os.environ):
            if (
                name.startswith(("HF_", "POOLED_", "PIP_", "UV_", "XDG_", "SSL_", "REQUESTS_", "CURL_"))
                or "PROXY" in name.upper()
            ):
                monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        monkeypatch.setattr(menubar_command, "program_command", lambda: [self.program])

    def run(self, *words: str) -> int:
        parser = argparse.ArgumentParser()
        menubar_command.add(parser.add_subparsers())
        return menubar_command.run(
            parser.parse_args(["menubar", *words]),
            platform="darwin",
            where=self.where,
            load=lambda: (None, None, None),
            write=self.lines.append,
            obstacle=lambda: self.obstacle,
            launchctl=Launchctl(self.launchd, uid=501, sleep=lambda _: None),
            home=self.home,
        )

    @property
    def app(self) -> Path:
        return self.home / "Applications" / "pooled-mlx.app"

    @property
    def agent(self) -> dict[str, Any]:
        return plistlib.loads((self.app / "Contents" / "Resources" / f"{MENUBAR_LABEL}.plist").read_bytes())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_the_app_has_what_macos_wants(stage: Stage) -> None:
    assert stage.run("install", "--port", "8090") == 0
    info = plistlib.loads((stage.app / "Contents" / "Info.plist").read_bytes())
    assert info["CFBundleIdentifier"] == "pooled-mlx.menubar"
    assert info["CFBundlePackageType"] == "APPL"
    assert info["CFBundleShortVersionString"] == __version__
    assert info["LSUIElement"] is True
    launcher = stage.app / "Contents" / "MacOS" / info["CFBundleExecutable"]
    assert os.access(launcher, os.X_OK)
    assert (stage.app / "Contents" / "Resources" / f"{info['CFBundleIconFile']}.icns").read_bytes() == icns()
    assert stage.agent["ProgramArguments"] == [stage.program, "menubar", "--port", "8090"]
    assert stage.agent["EnvironmentVariables"] == {
        "XDG_CONFIG_HOME": str(stage.home / "config"),
        "PATH": os.environ["PATH"],
    }
    assert not stage.where.agent_file(MENUBAR_LABEL).exists()
    assert stage.where.logs.is_dir()
    assert str(stage.app) in stage.lines[0]


@pytest.mark.parametrize(("loaded", "last"), [(True, "kickstart"), (False, "bootstrap")])
def test_the_launcher_asks_launchd_once(stage: Stage, loaded: bool, last: str) -> None:
    """The real script, with a stand-in for launchctl in its place."""
    assert stage.run("install") == 0
    launchctl, said = stage.home / "launchctl", stage.home / "said"
    launchctl.write_text(f'#!/bin/sh\necho "$@" >> "{said}"\n[ "$1" != kickstart ] || exit {0 if loaded else 113}\n')
    launchctl.chmod(0o755)
    launcher = stage.app / "Contents" / "MacOS" / "pooled-mlx-menubar"
    launcher.write_text(launcher.read_text().replace("/bin/launchctl", str(launchctl)))
    subprocess.run([str(launcher)], check=True, cwd="/")
    said_lines = said.read_text().splitlines()
    domain = f"gui/{os.getuid()}"
    assert said_lines[0] == f"enable {domain}/{MENUBAR_LABEL}"
    assert said_lines[-1].startswith(f"{last} {domain}")
    if not loaded:
        assert Path(said_lines[-1].split()[-1]).resolve() == stage.app / "Contents" / "Resources" / f"{MENUBAR_LABEL}.plist"


def test_install_again_ends_the_old_one_and_keeps_the_login_item(stage: Stage) -> None:
    assert stage.run("install", "--login") == 0
    item = stage.where.agent_file(MENUBAR_LABEL)
    assert plistlib.loads(item.read_bytes()) == stage.agent
    Launchctl(stage.launchd, uid=501).load(MENUBAR_LABEL, item)
    assert stage.run("install", "--port", "8091") == 0
    assert stage.launchd.loaded == {}
    assert plistlib.loads(item.read_bytes())["ProgramArguments"][-2:] == ["--port", "8091"]
    assert stage.run("uninstall") == 0
    assert not stage.app.exists()
    assert not item.exists()
    assert stage.run("uninstall") == 0
    assert stage.lines[-1] == "No app is installed."


def test_an_app_that_is_not_ours_stays(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    (stage.app / "Contents").mkdir(parents=True)
    for action in ("install", "uninstall"):
        assert stage.run(action) == 1
        assert "was not made by pooled-mlx: move it away" in capsys.readouterr().err
    assert stage.app.exists()


def test_a_python_that_cannot_show_it_installs_nothing_and_says_so(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.obstacle = undrawable("Python", lambda: "26.1")
    for words in ((), ("install",)):
        assert stage.run(*words) == 1
        error = capsys.readouterr().err
        assert "macOS 26 shows no menu bar item of this Python" in error
        assert "uv tool install --managed-python 'pooled-mlx[menubar]'" in error
    assert not stage.app.exists()
    assert stage.run("uninstall") == 0, "what an older macOS showed can still be removed"


def test_a_program_in_a_cache_gets_no_app(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.program = "/Users/me/.cache/uv/archive-v0/x/bin/pooled-mlx"
    assert stage.run("install", "--login") == 1
    assert "runs from the cache of uvx" in capsys.readouterr().err
    assert not stage.app.exists()


def test_wrong_settings_are_told_now(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run("install", "--port", "99999") == 1
    assert "--port: 99999 must be between" in capsys.readouterr().err
    assert not stage.app.exists()


@pytest.mark.parametrize(
    ("framework", "macos", "shows"),
    [
        ("Python", "26.0", False),
        ("Python3", "27.1.2", False),
        ("Python", "15.7", True),
        ("", "26.6", True),
        ("Python", "", True),
    ],
)
def test_which_pythons_can_show_it(framework: str, macos: str, shows: bool) -> None:
    assert (undrawable(framework, lambda: macos) is None) is shows


def test_the_icon_is_a_valid_file_of_square_pictures() -> None:
    data = icns()
    assert data[:4] == b"icns"
    assert struct.unpack(">I", data[4:8])[0] == len(data)
    place, found = 8, []
    while place < len(data):
        kind, length = data[place : place + 4], struct.unpack(">I", data[place + 4 : place + 8])[0]
        picture = data[place + 8 : place + length]
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        found.append((kind, struct.unpack(">II", picture[16:24])))
        place += length
    assert found == [(kind, (edge, edge)) for kind, edge in SIZES]


def test_a_picture_has_transparent_corners_and_a_drawing() -> None:
    edge = 32
    picture = png(edge)
    start = picture.index(b"IDAT") + 4
    length = struct.unpack(">I", picture[start - 8 : start - 4])[0]
    assert struct.unpack(">I", picture[start + length : start + length + 4])[0] == zlib.crc32(
        picture[start - 4 : start + length]
    )
    rows = zlib.decompress(picture[start : start + length])
    pixels = [rows[row * (4 * edge + 1) + 1 :][: 4 * edge] for row in range(edge)]
    assert pixels[0][:4] == bytes(4)
    assert len({row[column : column + 4] for row in pixels for column in range(0, 4 * edge, 4)}) == 3


@pytest.mark.skipif(shutil.which("plutil") is None, reason="plutil is only on macOS")
def test_macos_accepts_the_property_lists(tmp_path: Path) -> None:
    app = write_app(tmp_path, menubar_agent(["pooled-mlx"], mac_places(tmp_path), []))
    for path in (app / "Contents" / "Info.plist", *(app / "Contents" / "Resources").glob("*.plist")):
        subprocess.run(["plutil", "-lint", str(path)], check=True, capture_output=True)
