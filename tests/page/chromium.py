"""A headless Chromium, driven over its debugging pipe: no driver program, no package, no port.

Messages are JSON, each ended by a NUL, on the browser's descriptors 3 (in) and 4 (out).
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 60
WAIT_MS = 30_000
_NAMES = ("chromium", "chromium-browser", "google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def find_chromium() -> str | None:
    """The browser of this machine, None without one."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser process. `tab` opens a page in a context of its own: no cookies or storage are shared."""

    def __init__(self, program: str) -> None:
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._lock = threading.Lock()
        self._profile = tempfile.mkdtemp(prefix="pooled-page-")
        read_commands, self._commands = os.pipe()
        self._events, write_events = os.pipe()
        flags = [
            *["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--no-sandbox"],
            *["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"],
            *["--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio"],
            *["--no-proxy-server", "--force-color-profile=srgb", "about:blank"],
        ]
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_events}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "chromium", program, *flags],
            pass_fds=(read_commands, write_events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_events)
        self._reader = threading.Thread(target=self._read, name="chromium-reader", daemon=True)
        self._reader.start()

    def send(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer. Raises RuntimeError with the browser's own words."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers[number] = answer
        with self._lock:
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        reply = answer.get(timeout=ANSWER_SECONDS)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]

    def tab(self, width: int = 1280, height: int = 900, *, dark: bool = False, touch: bool = False) -> Tab:
        """A fresh page of that size in CSS pixels."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = Tab(self, session, context)
        self._tabs[session] = tab
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.send(f"{domain}.enable")
        scheme = "dark" if dark else "light"
        tab.send("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        tab.send("Emulation.setDeviceMetricsOverride", metrics)
        tab.send("Emulation.setFocusEmulationEnabled", {"enabled": True})
        return tab

    def close(self) -> None:
        """End the browser and remove its profile."""
        with contextlib.suppress(RuntimeError, queue.Empty, OSError):
            self.send("Browser.close")
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._reader.join(timeout=20)
        os.close(self._events)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _read(self) -> None:
        buffer = b""
        while data := os.read(self._events, 1 << 16):
            *messages, buffer = (buffer + data).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                    tab.event(message["method"], message["params"])


class Tab:
    """One page. `requests` are the URLs it asked for, `problems` its exceptions, console errors and policy violations."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.requests: list[str] = []
        self.problems: list[str] = []

    def send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.send(method, parameters, self._session)

    def event(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep what a test may want to know. Called by the reader."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["source"] in ("security", "javascript"):
            self.problems.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        """Go to `url`; returns once the document is there."""
        self.send("Page.navigate", {"url": url})
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Raises AssertionError when it throws."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        reply = self.send("Runtime.evaluate", options)
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return reply["result"].get("value")

    def wait(self, condition: str, within_ms: int = WAIT_MS) -> Any:
        """Wait until a JavaScript expression is true, and return its value. Raises AssertionError after the limit."""
        script = f"""new Promise((done, failed) => {{
            const until = performance.now() + {within_ms};
            (function look() {{
                let value = false;
                try {{ value = {condition}; }} catch (error) {{ value = false; }}
                if (value) done(value);
                else if (performance.now() > until) failed(new Error({json.dumps(f"never true: {condition}")}
                    + "\\n" + document.body.innerText.slice(0, 3000)));
                else setTimeout(look, 20);
            }})();
        }})"""
        for attempt in range(3):
            try:
                return self.run(script)
            except (AssertionError, RuntimeError) as error:
                # A navigation that was under way throws the script away with the old document.
                if attempt == 2 or ("navigated" not in str(error) and "destroyed" not in str(error)):
                    raise AssertionError(str(error)) from None
        raise AssertionError(condition)

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which is scrolled into view first."""
        place = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: 'center'}});"
            "const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", event)

    def type(self, selector: str, words: str, *, enter: bool = False) -> None:
        """Focus an element and type into it."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", {"text": words})
        if enter:
            for kind in ("keyDown", "keyUp"):
                key = {"type": kind, "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
                self.send("Input.dispatchKeyEvent", key)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save a PNG of the page, in its whole length by default."""
        data = self.send("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Close the page and forget its storage."""
        self._browser.send("Target.disposeBrowserContext", {"browserContextId": self._context})
