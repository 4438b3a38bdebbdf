"""The thin shell that draws the menu with rumps. The modules are handed in, so that tests can stand in for them.

Polling and clicks run on a worker thread, since a slow server must not freeze the menu; drawing happens on a timer of the
main thread, as AppKit wants, also while the menu is open.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pooled_mlx.mac.menu import Item, Menu
from pooled_mlx.mac.menu_model import MenuModel

POLL_SECONDS = 1.0
DRAW_SECONDS = 0.5

_log = logging.getLogger("pooled.menubar")


class Worker:
    """Owns the model: polls it, and does clicks as they come. A round that fails is logged, and the next one is tried."""

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
        self._try(self._model.poll)
        while True:
            try:
                click = self._clicks.get(timeout=self._poll_seconds)
            except queue.Empty:
                self._try(self._model.poll)
                continue
            if click is None:
                return
            self._try(lambda item_id=click: self._model.act(item_id))

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            _log.exception("the menu bar could not do its work")
            self._model.complain(f"{type(error).__name__}: {error}")


class RumpsShell:
    """Draws a menu. `read` gives the menu to show, `click` takes the id of a chosen item.

    `rumps`, `appkit` and `foundation` are the modules of those names. An entry is made once for each id and used again
    whenever that id is shown: rumps keeps every entry that was ever made in a table of its own.
    """

    def __init__(
        self, rumps: Any, appkit: Any, foundation: Any, read: Callable[[], Menu], click: Callable[[str], None]
    ) -> None:
        self._rumps, self._appkit, self._foundation = rumps, appkit, foundation
        self._read = read
        self._click = click
        self._drawn: Menu | None = None
        self._entries: dict[str, Any] = {}
        self._actions: dict[str, bool] = {}
        self._keys: dict[str, str] = {}
        self._shown: dict[str, list[str]] = {}
        self._leaving = threading.Event()
        # A program without a place in the Dock and without a menu of its own, before anything of it is on the screen.
        application = appkit.NSApplication.sharedApplication()
        application.setActivationPolicy_(appkit.NSApplicationActivationPolicyAccessory)
        self.app = rumps.App("pooled-mlx", title="○", quit_button=None)

    def run(self) -> None:
        """Show the menu until `quit`."""
        self.draw()
        # rumps' own timer stands still while a menu is open: AppKit then runs the main loop in another mode.
        timer = self._foundation.NSTimer.timerWithTimeInterval_repeats_block_(DRAW_SECONDS, True, self._tick)
        self._foundation.NSRunLoop.mainRunLoop().addTimer_forMode_(timer, self._foundation.NSRunLoopCommonModes)
        self.app.run()

    def quit(self) -> None:
        """End `run`. Safe to call on any thread: AppKit is left by the timer, on its own one."""
        self._leaving.set()

    def draw(self) -> None:
        """Bring what is on the screen up to date. What stays on it is changed in place, so that an open menu stays usable."""
        if self._leaving.is_set():
            self._rumps.quit_application()
            return
        menu = self._read()
        if menu == self._drawn:
            return
        if self.app.title != menu.title:
            self.app.title = menu.title
        self._arrange("", self.app.menu, menu.items)
        self._drawn = menu

    def _tick(self, _: Any) -> None:
        try:
            self.draw()
        except Exception:  # an error that leaves a callback of AppKit ends the process
            _log.exception("the menu cannot be drawn")

    def _arrange(self, parent: str, level: Any, items: Sequence[Item]) -> None:
        """Make the entries of one level those of `items`: remove what is gone, put what is new into its place."""
        shown = self._shown.setdefault(parent, [])
        wanted = [item.id for item in items]
        for item_id in [item_id for item_id in shown if item_id not in wanted]:
            self._remove(level, shown, item_id)
        for place, item in enumerate(items):
            if place >= len(shown) or shown[place] != item.id:
                if item.id in shown:
                    self._remove(level, shown, item.id)
                self._insert(level, shown, place, item)
            if not item.separator:
                self._update(self._entries[item.id], item)

    def _remove(self, level: Any, shown: list[str], item_id: str) -> None:
        del level[self._keys.pop(item_id)]
        shown.remove(item_id)

    def _insert(self, level: Any, shown: list[str], place: int, item: Item) -> None:
        entry = self._rumps.separator if item.separator else self._entry(item)
        before = set(level)
        if place < len(shown):
            level.insert_before(self._keys[shown[place]], entry)
        else:
            level.add(entry)
        (self._keys[item.id],) = set(level) - before
        shown.insert(place, item.id)

    def _entry(self, item: Item) -> Any:
        entry = self._entries.get(item.id)
        if entry is None:
            entry = self._entries[item.id] = self._rumps.MenuItem(item.id)
            self._actions[item.id] = False
        # rumps files an entry under the title that it has when it is put into a menu; ids are unique where texts may not be.
        entry.title = item.id
        return entry

    def _update(self, entry: Any, item: Item) -> None:
        entry.title = item.text
        entry.state = 1 if item.checked else 0
        if self._actions[item.id] != item.action:
            self._actions[item.id] = item.action
            entry.set_callback((lambda _: self._click(item.id)) if item.action else None)
        if item.children or item.id in self._shown:
            self._arrange(item.id, entry, item.children)
