"""The thin shell that draws the menu with rumps. The module is handed in, so that tests can stand in for it.

Polling and clicks run on a worker thread, since a slow server must not freeze the menu; drawing happens on rumps' own
timer, which runs on the main thread as AppKit wants.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from pooled_mlx.mac.menu import Item, Menu
from pooled_mlx.mac.menu_model import MenuModel

POLL_SECONDS = 1.0
DRAW_SECONDS = 0.5


class Worker:
    """Owns the model: polls it, and does clicks as they come."""

    def __init__(self, model: MenuModel, poll_seconds: float = POLL_SECONDS) -> None:
        self._model = model
        self._poll_seconds = poll_seconds
        self._clicks: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="menubar-worker", daemon=True)

    @property
    def menu(self) -> Menu:
        """The menu as it was last built."""
        return self._model.menu

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def click(self, item_id: str) -> None:
        """An item was chosen."""
        self._clicks.put(item_id)

    def close(self) -> None:
        """Do the clicks that wait and end."""
        self._clicks.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._model.poll()
        while True:
            try:
                click = self._clicks.get(timeout=self._poll_seconds)
            except queue.Empty:
                self._model.poll()
                continue
            if click is None:
                return
            self._model.act(click)


class RumpsShell:
    """Draws a menu. `read` gives the menu to show, `click` takes the id of a chosen item."""

    def __init__(self, rumps: Any, read: Callable[[], Menu], click: Callable[[str], None]) -> None:
        self._rumps = rumps
        self._read = read
        self._click = click
        self._shape: Any = None
        self._drawn: Menu | None = None
        self._entries: dict[str, Any] = {}
        self._leaving = threading.Event()
        self.app = rumps.App("pooled-mlx", title="○", quit_button=None)
        self._timer = rumps.Timer(lambda _: self.draw(), DRAW_SECONDS)

    def run(self) -> None:
        """Show the menu until `quit`."""
        self.draw()
        self._timer.start()
        self.app.run()

    def quit(self) -> None:
        """End `run`. Safe to call on any thread: AppKit is left by the timer, on its own one."""
        self._leaving.set()

    def draw(self) -> None:
        """Bring what is on the screen up to date. An open menu is not rebuilt while only texts change."""
        if self._leaving.is_set():
            self._rumps.quit_application()
            return
        menu = self._read()
        if menu == self._drawn:
            return
        self.app.title = menu.title
        if menu.shape != self._shape:
            self._entries = {}
            self.app.menu.clear()
            self.app.menu.update([self._entry(item) for item in menu.items])
            self._shape = menu.shape
        for item in menu.walk():
            entry = self._entries.get(item.id)
            if entry is not None:
                entry.title = item.text
                entry.state = 1 if item.checked else 0
        self._drawn = menu

    def _entry(self, item: Item) -> Any:
        if item.separator:
            return self._rumps.separator
        callback = (lambda _: self._click(item.id)) if item.action else None
        # rumps finds entries by their first title; ids are unique where texts may not be.
        entry = self._rumps.MenuItem(item.id, callback=callback)
        self._entries[item.id] = entry
        for child in item.children:
            entry.add(self._entry(child))
        return entry
