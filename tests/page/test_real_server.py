"""The page on the real HTTP server: its own headers, its own origin, and web pages of others that try the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from pooled_mlx.core.events import Finished, Prefill, Queued, Reasoning, Text, Usage
from pooled_mlx.page import page_html
from pooled_mlx.server.hooks import Hooks
from tests.api.live import running
from tests.fakes import FakeEngine
from tests.mac_fakes import health_body, pool_body
from tests.page.chromium import Browser, Tab
from tests.page.stub_server import StubServer


class PageEngine(FakeEngine):
    """A fake engine with the facts of a busy one."""

    def health(self) -> dict[str, object]:
        return {**health_body(), "ctx": self.model.context_tokens}

    def pool(self) -> dict[str, object]:
        return pool_body()


class RealServer:
    """A server in a thread of its own."""

    def __init__(self, **settings: object) -> None:
        self.engine = PageEngine()
        self.url = ""
        self._settings = settings
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with running(self.engine, app_options={"hooks": Hooks(page=page_html())}, **self._settings) as live:
            self.url = live.url
            self._up.set()
            await self._end.wait()

    def start(self) -> RealServer:
        self._thread.start()
        assert self._up.wait(timeout=60)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RealServer]]:
    servers: list[RealServer] = []

    def start(**settings: object) -> RealServer:
        servers.append(RealServer(**settings).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[[str], Tab]]:
    tabs: list[Tab] = []

    def open_it(url: str) -> Tab:
        tabs.append(browser.tab())
        tabs[-1].open(url)
        return tabs[-1]

    yield open_it
    for tab in tabs:
        tab.close()


ANSWER = (
    Queued(0),
    Prefill(0, 12, 8),
    Reasoning("A greeting is wanted."),
    Text("Hello "),
    Text("there."),
    Finished("stop", Usage(12, 6, 8, 4)),
)


def test_the_page_works_from_its_own_origin(start_server: Callable[..., RealServer], open_tab: Callable[[str], Tab]) -> None:
    server = start_server()
    server.engine.script(*ANSWER)
    tab = open_tab(f"{server.url}/")
    tab.wait("document.querySelector('#state').textContent === 'Working'")
    tab.wait("document.querySelectorAll('#tree .node').length === 5")
    tab.click("#think")
    tab.type("#question", "Hi", enter=True)
    tab.wait("document.querySelector('.said.model .foot')")
    assert tab.text(".said.model .body") == "Hello there."
    assert tab.run("document.querySelector('.thought').textContent") == "A greeting is wanted."
    assert tab.text(".said.model .foot").startswith("6 tokens · 8 of 12 prompt tokens reused")
    assert server.engine.last.thinking.on
    assert server.engine.last.client.lower().startswith(("mozilla", "chrome", "unknown"))
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith((f"{server.url}/", "data:"))] == []


def test_stop_reaches_the_engine(start_server: Callable[..., RealServer], open_tab: Callable[[str], Tab]) -> None:
    server = start_server()
    server.engine.hold()
    tab = open_tab(f"{server.url}/")
    tab.wait("document.querySelector('#state').textContent === 'Working'")
    tab.type("#question", "Count", enter=True)
    tab.wait("!document.querySelector('#stop').hidden && document.querySelector('#waiting').textContent === 'sent'")

    async def first() -> None:
        generation = await server.engine.next_generation()
        generation.emit(Text("One, "))

    asyncio.run_coroutine_threadsafe(first(), server._loop).result(timeout=60)
    tab.wait("document.querySelector('.said.model .body').innerText === 'One,'")
    tab.click("#stop")
    cancelled = server.engine.generations[0].cancelled.wait()
    assert asyncio.run_coroutine_threadsafe(cancelled, server._loop).result(timeout=60)


def test_a_token_guards_everything_but_the_bare_page(
    start_server: Callable[..., RealServer], open_tab: Callable[[str], Tab]
) -> None:
    server = start_server(token="let-me-in")
    server.engine.script(*ANSWER)
    tab = open_tab(f"{server.url}/")
    tab.wait("document.querySelector('#token-dialog').open")
    assert "Qwen" not in tab.run("document.body.innerText")
    tab.type("#token", "let-me-in", enter=True)
    tab.wait("document.querySelector('#state').textContent === 'Working'")
    tab.type("#question", "Hi", enter=True)
    tab.wait("document.querySelector('.said.model .foot')")
    assert tab.text(".said.model .body") == "Hello there."


FOREIGN = """(async () => {
    const seen = [];
    for (const [name, options] of [
        ["json", {method: "POST", headers: {"Content-Type": "application/json"}, body: BODY}],
        ["plain", {method: "POST", headers: {"Content-Type": "text/plain"}, body: BODY}],
        ["blind", {method: "POST", mode: "no-cors", body: BODY}],
        ["get", {}],
    ]) {
        try {
            const response = await fetch(name === "get" ? "URL/health" : "URL/v1/chat/completions", options);
            seen.push([name, response.type === "opaque" ? "opaque" : response.status]);
        } catch { seen.push([name, "refused"]); }
    }
    return seen;
})()"""


def test_a_web_page_of_another_origin_is_refused(
    start_server: Callable[..., RealServer], open_tab: Callable[[str], Tab], stub: StubServer
) -> None:
    server = start_server()
    tab = open_tab(f"{stub.url}/nothing-here")
    body = "JSON.stringify({messages: [{role: 'user', content: 'hi'}]})"
    seen = tab.run(FOREIGN.replace("BODY", body).replace("URL", server.url))
    assert seen == [["json", "refused"], ["plain", "refused"], ["blind", "opaque"], ["get", "refused"]]
    assert server.engine.requests == []
    assert server.engine.generations == []


def test_the_page_cannot_be_framed_by_another_origin(
    start_server: Callable[..., RealServer], open_tab: Callable[[str], Tab], stub: StubServer
) -> None:
    server = start_server()
    tab = open_tab(f"{stub.url}/nothing-here")
    tab.run(
        f"new Promise((done) => {{ const frame = document.createElement('iframe'); frame.src = '{server.url}/';"
        "frame.onload = () => done(1); document.body.append(frame); })"
    )
    assert any("frame-ancestors" in problem for problem in tab.problems)
