"""The app that starts the menu bar from Spotlight and the Finder: a few small files, written for this user.

The app holds no program. Where an app's process is another program than the one in its bundle, macOS 26 gives it no place in
the menu bar, and a Python in a bundle of ours is just that. So the app asks launchd to run the menu bar, as the login item
does; both are one agent, which runs once however often it is started.
"""

from __future__ import annotations

import platform
import plistlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from pooled_mlx import __version__
from pooled_mlx.mac.desktop import MENUBAR_LABEL
from pooled_mlx.mac.icon import icns
from pooled_mlx.mac.launchd import LAUNCHCTL, Agent
from pooled_mlx.mac.places import write_private
from pooled_mlx.mac.program import UV_INSTALL

APP_NAME = "pooled-mlx.app"
BUNDLE_ID = "pooled-mlx.menubar"
EXECUTABLE = "pooled-mlx-menubar"
LEAST_MACOS = "14.0"
FIRST_MACOS_WITHOUT_FRAMEWORKS = 26

_LAUNCHER = f"""\
#!/bin/sh
# Starts the menu bar by launchd: the one that is loaded already, else the one described beside this file.
user="gui/$(/usr/bin/id -u)"
{LAUNCHCTL} enable "$user/{MENUBAR_LABEL}"
{LAUNCHCTL} kickstart "$user/{MENUBAR_LABEL}" 2>/dev/null && exit 0
exec {LAUNCHCTL} bootstrap "$user" "$(dirname "$0")/../Resources/{MENUBAR_LABEL}.plist"
"""


def app_folder(home: Path) -> Path:
    """Where the app is: Spotlight finds it there, and no password is needed to write it."""
    return home / "Applications" / APP_NAME


def write_app(home: Path, agent: Agent) -> Path:
    """Write the app, or write it anew, to run `agent`; returns its folder. Raises OSError."""
    app = app_folder(home)
    remove_app(home)
    contents = app / "Contents"
    contents.mkdir(parents=True)
    (contents / "Info.plist").write_bytes(plistlib.dumps(_info(), sort_keys=False))
    (contents / "MacOS").mkdir()
    launcher = contents / "MacOS" / EXECUTABLE
    launcher.write_text(_LAUNCHER, encoding="utf-8")
    launcher.chmod(0o755)
    (contents / "Resources").mkdir()
    (contents / "Resources" / "icon.icns").write_bytes(icns())
    write_private(contents / "Resources" / f"{agent.label}.plist", agent.plist())
    return app


def remove_app(home: Path) -> bool:
    """Remove the app; False when there was none. Raises OSError, also for an app of that name that is not ours."""
    app = app_folder(home)
    if not app.exists():
        return False
    try:
        ours = plistlib.loads((app / "Contents" / "Info.plist").read_bytes()).get("CFBundleIdentifier") == BUNDLE_ID
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise OSError(f"{app} is there and was not made by pooled-mlx: move it away")
    shutil.rmtree(app)
    return True


def _info() -> dict[str, object]:
    return {
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundlePackageType": "APPL",
        "CFBundleIdentifier": BUNDLE_ID,
        "CFBundleName": "pooled-mlx",
        "CFBundleDisplayName": "pooled-mlx",
        "CFBundleExecutable": EXECUTABLE,
        "CFBundleIconFile": "icon",
        "CFBundleShortVersionString": __version__,
        "CFBundleVersion": __version__,
        "LSMinimumSystemVersion": LEAST_MACOS,
        "LSUIElement": True,
        "NSHighResolutionCapable": True,
    }


def undrawable(
    framework: str = getattr(sys, "_framework", ""), macos: Callable[[], str] = lambda: platform.mac_ver()[0]
) -> str | None:
    """Why this Python cannot show a menu bar item, and what can; None when it can.

    A framework build of Python (Homebrew, python.org) is an app of its own, `Python.app`, to which macOS 26 gives no place in
    the menu bar, without a word. Pythons that uv installs are plain programs, and are shown.
    """
    major = macos().partition(".")[0]
    if not framework or not major.isdigit() or int(major) < FIRST_MACOS_WITHOUT_FRAMEWORKS:
        return None
    return (
        f"macOS {major} shows no menu bar item of this Python ({sys.executable}), because it is a framework build, as those of "
        f"Homebrew and python.org are. Run {UV_INSTALL}, and then its pooled-mlx menubar; the server, `status` and the status "
        "page work with any Python."
    )
