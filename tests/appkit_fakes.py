"""Stand-ins for the parts of AppKit and Foundation that rumps and the menu bar use, so that rumps' real code runs anywhere.

Objects are alive as long as Python holds them; methods have the names that pyobjc gives them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = Path(__file__).parents[1] / "build" / "mac" / "rumps"
"""Where `scripts/mac_wheels.py` lays rumps down, if the package index can be reached."""


class NSObject:
    """`alloc().init()` as pyobjc spells it."""

    @classmethod
    def alloc(cls) -> Any:
        return cls.__new__(cls)

    def init(self) -> Any:
        return self


class NSMenuItem(NSObject):
    def initWithTitle_action_keyEquivalent_(self, title: str, action: Any, key: str) -> Any:
        self.text, self.action, self.on, self.submenu, self.is_separator = title, action, 0, None, False
        return self

    @classmethod
    def separatorItem(cls) -> Any:
        item = cls.alloc().initWithTitle_action_keyEquivalent_("", None, "")
        item.is_separator = True
        return item

    def title(self) -> str:
        return self.text

    def setTitle_(self, title: str) -> None:
        self.text = title

    def state(self) -> int:
        return self.on

    def setState_(self, state: int) -> None:
        self.on = state

    def setAction_(self, action: Any) -> None:
        self.action = action

    def setTarget_(self, target: Any) -> None:
        self.target = target

    def setImage_(self, image: Any) -> None:
        assert image is None

    def setSubmenu_(self, menu: Any) -> None:
        self.submenu = menu

    def click(self) -> None:
        """What AppKit does when it is chosen."""
        assert self.action == "callback:", f"{self.text} is grey"
        self.target.callback_(self)


class NSMenu(NSObject):
    def init(self) -> Any:
        self.items: list[NSMenuItem] = []
        return self

    def addItem_(self, item: NSMenuItem) -> None:
        assert item not in self.items
        self.items.append(item)

    def insertItem_atIndex_(self, item: NSMenuItem, index: int) -> None:
        assert item not in self.items
        self.items.insert(index, item)

    def indexOfItem_(self, item: NSMenuItem) -> int:
        return self.items.index(item)

    def removeItem_(self, item: NSMenuItem) -> None:
        self.items.remove(item)

    def removeAllItems(self) -> None:
        self.items.clear()

    def texts(self, depth: int = 0) -> list[str]:
        """What is on the screen: `-` for separators, grey and marked entries told."""
        rows: list[str] = []
        for item in self.items:
            grey = "" if item.action else " (grey)"
            rows.append("-" if item.is_separator else "  " * depth + ("x " if item.on else "") + item.text + grey)
            if item.submenu is not None:
                rows += item.submenu.texts(depth + 1)
        return rows


class NSStatusItem(NSObject):
    def init(self) -> Any:
        self.text, self.menu = "", None
        return self

    def title(self) -> str:
        return self.text

    def setTitle_(self, title: str) -> None:
        self.text = title

    def image(self) -> None:
        return None

    def setImage_(self, image: Any) -> None:
        pass

    def setHighlightMode_(self, on: bool) -> None:
        pass

    def setMenu_(self, menu: NSMenu) -> None:
        self.menu = menu


class _Anything:
    """Takes any call and returns itself."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def __call__(self, *_: Any) -> Any:
        return self


class FakeMac:
    """The modules, and what was done with them. `loop` is called where AppKit would run its main loop."""

    def __init__(self, support: Path, loop: Callable[[FakeMac], None] = lambda _: None) -> None:
        self.calls: list[str] = []
        self.policy: int | None = None
        self.timers: list[tuple[Callable[[Any], None], float, str]] = []
        self.status_item: NSStatusItem | None = None
        self.terminated = 0
        mac = self

        class Application(NSObject):
            def setActivationPolicy_(self, policy: int) -> bool:
                mac.policy = policy
                mac.calls.append("policy")
                return True

            def activateIgnoringOtherApps_(self, on: bool) -> None:
                mac.calls.append("activate")

            def setDelegate_(self, delegate: Any) -> None:
                pass

            def terminate_(self, sender: Any) -> None:
                mac.terminated += 1

        class Bar(NSObject):
            def statusItemWithLength_(self, length: float) -> NSStatusItem:
                mac.calls.append("status item")
                item = mac.status_item = NSStatusItem.alloc().init()
                return item

        class Timer(NSObject):
            @classmethod
            def timerWithTimeInterval_repeats_block_(cls, seconds: float, repeats: bool, block: Any) -> Any:
                assert repeats
                timer = cls.alloc().init()
                timer.seconds, timer.block = seconds, block
                return timer

        class RunLoop(NSObject):
            def addTimer_forMode_(self, timer: Any, mode: str) -> None:
                mac.timers.append((timer.block, timer.seconds, mode))

        class Paths:
            def objectAtIndex_(self, index: int) -> str:
                return str(support)

        application, run_loop, bar = Application(), RunLoop(), Bar()
        Application.sharedApplication = staticmethod(lambda: application)  # pyright: ignore[reportAttributeAccessIssue]
        RunLoop.mainRunLoop = staticmethod(lambda: run_loop)  # pyright: ignore[reportAttributeAccessIssue]
        Bar.systemStatusBar = staticmethod(lambda: bar)  # pyright: ignore[reportAttributeAccessIssue]
        other = {"NSDate", "NSMutableDictionary", "NSString", "NSUserDefaults", "NSAlert", "NSImage", "NSSlider", "NSSize"}
        other |= {"NSWorkspace", "NSWorkspaceWillSleepNotification", "NSWorkspaceDidWakeNotification", "NSData"}
        other |= {"NSKeyDown", "NSCommandKeyMask", "NSMakeRect", "NSLog", "NSUserNotification"}
        names: dict[str, Any] = {name: _Anything() for name in other}
        names |= {
            "NSObject": NSObject,
            "NSMenu": NSMenu,
            "NSMenuItem": NSMenuItem,
            "NSTextField": type("NSTextField", (NSObject,), {}),
            "NSSecureTextField": type("NSSecureTextField", (NSObject,), {}),
            "NSApplication": Application,
            "NSApplicationActivationPolicyAccessory": 1,
            "NSStatusBar": Bar,
            "NSTimer": Timer,
            "NSRunLoop": RunLoop,
            "NSRunLoopCommonModes": "kCFRunLoopCommonModes",
            "NSDefaultRunLoopMode": "kCFRunLoopDefaultMode",
            "NSSearchPathForDirectoriesInDomains": lambda *_: Paths(),
            "NSUserNotificationCenter": type("Center", (), {"defaultUserNotificationCenter": staticmethod(lambda: None)}),
        }
        helper = ModuleType("PyObjCTools.AppHelper")
        helper.__dict__.update(installMachInterrupt=lambda: None, runEventLoop=lambda: loop(mac))
        tools = ModuleType("PyObjCTools")
        tools.__dict__.update(AppHelper=helper)
        self.modules = {"PyObjCTools": tools, "PyObjCTools.AppHelper": helper}
        for name in ("AppKit", "Foundation"):
            self.modules[name] = ModuleType(name)
            self.modules[name].__dict__.update(names)

    @property
    def appkit(self) -> Any:
        return self.modules["AppKit"]

    @property
    def foundation(self) -> Any:
        return self.modules["Foundation"]

    def tick(self) -> None:
        """Time goes on: every timer fires once."""
        for block, _, _ in self.timers:
            block(None)

    @contextmanager
    def real_rumps(self, folder: Path) -> Iterator[Any]:
        """rumps from its unpacked sources in `folder`, on these modules."""
        before = dict(sys.modules)
        sys.modules.update(self.modules)
        sys.path.insert(0, str(folder))
        try:
            import rumps  # pyright: ignore[reportMissingImports]

            yield rumps
        finally:
            sys.path.remove(str(folder))
            for name in [name for name in sys.modules if name.split(".")[0] == "rumps" or name in self.modules]:
                del sys.modules[name]
            sys.modules.update({name: before[name] for name in before if name.split(".")[0] == "rumps" or name in self.modules})
