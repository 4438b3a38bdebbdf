"""A browser for the whole run, a stub server and a tab for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mac_fakes import pool_body
from tests.page.chromium import Browser, Tab, find_chromium
from tests.page.stub_server import StubServer, serve


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Skips without Chromium, fails under REQUIRE_CHROMIUM=1."""
    program = find_chromium()
    if program is None:
        reason = "no Chromium on this machine (apt-get install chromium)"
        if os.environ.get("REQUIRE_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A server with a working model, live requests and a filled pool."""
    server = StubServer()
    server.pool = pool_body()
    with serve(server):
        yield server


@pytest.fixture
def open_page(browser: Browser, stub: StubServer) -> Iterator[Callable[..., Tab]]:
    """Opens the page; afterwards it must have thrown nothing and asked nobody but its own server."""
    tabs: list[Tab] = []

    def open_it(**options: Any) -> Tab:
        tab = browser.tab(**options)
        tabs.append(tab)
        tab.open(f"{stub.url}/")
        return tab

    yield open_it
    for tab in tabs:
        elsewhere = [url for url in tab.requests if not url.startswith((f"{stub.url}/", "data:"))]
        tab.close()
        assert elsewhere == []
        assert tab.problems == []


@pytest.fixture
def page(open_page: Callable[..., Tab]) -> Tab:
    """The page on a desktop, once it shows the first facts."""
    tab = open_page()
    tab.wait("document.querySelector('#state').textContent === 'Working'")
    return tab
