"""The status page in a real browser: what it shows, that it follows the server, and that it asks nobody else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.connect.registry import profile_of
from pooled_mlx.connect.target import Target
from tests.mac_fakes import GIB, health_body, pool_body
from tests.page.chromium import Browser, Tab
from tests.page.stub_server import StubServer, delta, finish

ANSWER = (
    "A KV cache keeps the keys and values that attention computed for earlier tokens, "
    "so that each new token costs one step instead of reading everything again."
)
SHOTS = Path(__file__).parents[2] / "docs" / "screenshots"


CONTRASTS = """(() => {
    const parse = (color) => {
        const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
        return { rgb: [r, g, b], a };
    };
    const linear = (part) => (part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
    const light = (rgb) => rgb.reduce((sum, part, index) => sum + linear(part / 255) * [.2126, .7152, .0722][index], 0);
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const color = parse(getComputedStyle(node).backgroundColor);
            if (color.a > 0) return color.rgb;
        }
        return [255, 255, 255];
    };
    const selectors = ["#model", "#version", ".tile .name", ".why", ".why[data-miss]", ".tag", ".tag[data-tone=prefill]",
        ".tag[data-tone=write]", "#send", "#tree .age", "#snippet"];
    return selectors.map((selector) => {
        const node = document.querySelector(selector);
        const both = [light(parse(getComputedStyle(node).color).rgb), light(behind(node))].sort((a, b) => b - a);
        return [selector, (both[0] + .05) / (both[1] + .05)];
    });
})()"""
"""The contrast of texts against what is behind them, by the formula of WCAG."""


def show(stub: StubServer, **changes: Any) -> None:
    """From now on the server says this."""
    stub.health = health_body(**changes)


def test_the_first_look(page: Tab) -> None:
    assert page.text("#model") == "Qwen3.6 35B A3B"
    assert page.text("#version") == "version 0.1.0 · up 1 h 12 min"
    assert page.text("#t-load") == "2 running · 1 waiting"
    assert page.text("#t-load-more") == "214 served · 1 failed"
    assert page.text("#t-speed") == "61 tokens/s"
    assert page.text("#t-speed-more") == "1 writing · 1 reading"
    assert page.text("#t-reuse") == "65 %"
    assert page.text("#t-reuse-more") == "19,968 of 30,353 tokens"
    assert page.text("#t-pool") == "5.0 GiB"
    assert page.text("#t-pool-more") == "of 16.0 GiB"
    assert page.text("#t-memory") == "27.0 GiB"
    assert page.text("#t-context") == "131,072 tokens"
    assert page.run("document.title") == "2 running – pooled-mlx"


def test_running_and_waiting_requests_with_prefill_progress(page: Tab) -> None:
    rows = page.run("[...document.querySelectorAll('#running li')].map((row) => row.innerText.replace(/\\s+/g, ' '))")
    assert rows == [
        "claude-cli Messages writing 312 tokens · 61.2 tokens/s · 8.4 s",
        "codex Responses reading 40 % 12,288 of 29,971 tokens, 8,192 reused · 3.1 s",
        "opencode Chat Completions waiting 2 ahead · 1.2 s",
    ]
    widths = page.run(
        "[...document.querySelectorAll('#running li[data-state=prefill] i')]"
        ".map((part) => part.getBoundingClientRect().width / part.parentNode.getBoundingClientRect().width)"
    )
    assert widths == [pytest.approx(8192 / 29971, abs=0.01), pytest.approx(4096 / 29971, abs=0.01)]


def test_it_follows_the_server(page: Tab, stub: StubServer) -> None:
    requests = health_body()["requests"]
    requests[1].update(prefill_done=29971, state="decode", generated=7, tokens_per_second=55.5)
    show(stub, requests=requests[1:2], running=1, queue=0, served=215)
    page.wait("document.querySelectorAll('#running li').length === 1")
    assert "writing 7 tokens · 55.5 tokens/s" in page.text("#running").replace("\n", " ")
    page.wait("document.querySelector('#t-load-more').textContent.startsWith('215 served')")
    show(stub, requests=[], running=0, queue=0, rates=[])
    page.wait("document.querySelector('#state').textContent === 'Ready'")
    assert page.text("#running") == "Nothing runs."
    assert page.run("document.title") == "pooled-mlx"
    assert page.text("#t-speed") == "– tokens/s"


def test_the_last_requests_say_why(page: Tab, stub: StubServer) -> None:
    first, second = page.run("[...document.querySelectorAll('#finished li')].map((row) => row.innerText)")
    assert "19,968 cached" in first
    assert "544 prefilled" in first
    assert "230 generated" in first
    assert "all but the last turn was in the pool" in first
    assert "801 generated, 512 of them thinking" in second
    assert "first request of this conversation: nothing to reuse" in second
    assert page.run("document.querySelectorAll('#finished [data-miss]').length") == 1
    failed = {**health_body()["recent"][0], "finish": "engine_failed", "finished_at": 1_790_000_100.0, "client": "late"}
    show(stub, recent=[*health_body()["recent"], failed])
    page.wait("document.querySelector('#finished li .who').textContent === 'late'")
    assert page.text("#finished li .tag") == "engine failed"
    assert page.run("document.querySelector('#finished li .tag').dataset.tone") == "bad"


def test_a_browser_is_called_one(page: Tab, stub: StubServer) -> None:
    show(stub, recent=[{**health_body()["recent"][0], "client": "Mozilla"}], requests=[])
    page.wait("document.querySelector('#finished .who').textContent === 'browser'")


def test_many_requests_are_folded(page: Tab, stub: StubServer) -> None:
    recent = [{**health_body()["recent"][0], "id": f"r{number}", "finished_at": 1e9 + number} for number in range(30)]
    show(stub, recent=recent)
    page.wait("document.querySelector('#recent-all').textContent === 'Show all 30'")
    assert page.run("document.querySelectorAll('#finished li').length") == 6
    assert page.run("document.querySelector('#finished li').dataset.id") == "r29"
    page.click("#recent-all")
    assert page.run("document.querySelectorAll('#finished li').length") == 30


def test_speed_over_time(page: Tab, stub: StubServer) -> None:
    assert page.text("#chart-top") == "no tokens in this time"
    now = time.time()
    show(stub, rates=[{"t": int(now) - back, "tokens_per_second": 42} for back in range(200, -30, -1)])
    page.wait("document.querySelector('#chart-top').textContent === '50'")
    page.wait("document.querySelector('#t-speed').innerText === '42 tokens/s'")
    curve = page.run("document.querySelector('#chart .curve').getAttribute('d')")
    heights = {point.split(" ")[1] for point in curve.removeprefix("M").split("L")}
    assert {"17.5", "99.0"} <= heights


# --- the pool


def tree(page: Tab) -> list[str]:
    page.wait("document.querySelectorAll('#tree .node').length > 0")
    return page.run(
        "[...document.querySelectorAll('#tree .node')].map((row) => [...row.children].slice(1)"
        ".map((cell) => cell.innerText.trim()).join(' | ').replace(/\\s+/g, ' '))"
    )


def test_the_pool_is_a_tree_of_conversations(page: Tab) -> None:
    assert tree(page) == [
        "claude-cli: system + tools 3 conversations | 16,384 tokens | 768 MiB | 41 hits | now",
        "claude-cli in use | 4,650 tokens | 218 MiB | 37 hits | now",
        "claude-cli | 2,156 tokens | 101 MiB | 12 hits | 21 min ago",
        "claude-cli side request | 116 tokens | 5.4 MiB | 0 hits | 1 h 6 min ago",
        "codex | 10,642 tokens | 499 MiB | 3 hits | 40 s ago",
    ]
    assert page.text("#pool-count") == "4 conversations · 8 segments · 1.6 GiB"


def test_a_branch_opens_to_its_segments_and_stays_as_the_user_left_it(page: Tab, stub: StubServer) -> None:
    tree(page)
    page.click('#tree [data-id="b2"] summary')
    page.wait("document.querySelector('#tree [data-id=\"b2\"] .segments')")
    assert page.text('#tree [data-id="b2"] .note') == "reused 16384 of 18540: edited in turn 4"
    assert page.text('#tree [data-id="b2"] .segments').splitlines() == [
        "16,384–18,020 · prompt · end of a turn · 76.7 MiB",
        "18,020–18,540 · prompt · end of a turn · 24.4 MiB · cannot be resumed at its end",
    ]
    stub.pool = pool_body()
    stub.pool["conversations"][0]["children"][2]["hits"] = 9
    page.wait("document.querySelector('#tree [data-id=\"c1\"] .hits').textContent === '9 hits'")
    assert page.run("document.querySelector('#tree [data-id=\"b2\"] details').open") is True
    page.click("#tree summary")
    page.wait("document.querySelectorAll('#tree details[open] > ul .node').length === 0")
    stub.pool["conversations"][1]["hits"] = 4
    page.wait("document.querySelector('#tree [data-id=\"d2\"] .hits').textContent === '4 hits'")
    assert page.run("document.querySelector('#tree details').open") is False


def test_a_large_pool_starts_folded_and_says_what_it_leaves_out(page: Tab, stub: StubServer) -> None:
    pool = pool_body()
    system, leaf = pool["conversations"][0], pool["conversations"][0]["children"][2]
    system["children"] += [{**leaf, "id": f"x{number}"} for number in range(200)]
    pool["conversation_count"] = 204 + 1234
    stub.pool = pool
    page.wait("document.querySelector('#tree > .empty')")
    assert page.text("#tree > .empty") == "1,234 older conversations not shown."
    assert page.run("document.querySelectorAll('#tree .node').length") == 2
    page.click("#tree summary")
    page.wait("document.querySelectorAll('#tree .node').length === 205")


def test_an_empty_pool(page: Tab, stub: StubServer) -> None:
    stub.pool = {"segments": 0, "conversation_count": 0, "conversations": []}
    page.wait("document.querySelector('#tree').innerText === 'The pool is empty.'")
    assert page.text("#pool-count") == "0 conversations · 0 segments"


# --- states


def test_download_and_load_progress(page: Tab, stub: StubServer) -> None:
    progress = {"done_bytes": 4.1 * GIB, "total_bytes": 10 * GIB, "bytes_per_second": 50 * 1024**2, "seconds_left": 121}
    show(stub, ready=False, state="downloading", progress={"stage": "downloading", **progress}, requests=[], running=0)
    page.wait("document.querySelector('#state').textContent === 'Downloading'")
    assert page.text("#banner").split("\n") == [
        "Downloading the model: 41 %",
        "4.1 GiB of 10.0 GiB · 50.0 MiB/s · 2 min 1 s left",
    ]
    show(stub, ready=False, state="loading", progress=None, reason="The model is loading.")
    page.wait("document.querySelector('#banner').innerText === 'The model is loading.'")
    show(stub)
    page.wait("document.querySelector('#banner').hidden")


def test_a_dead_engine_and_a_server_that_is_gone(page: Tab, stub: StubServer) -> None:
    show(stub, ok=False, ready=False, state="failed", reason="The engine died: out of memory.")
    page.wait("document.querySelector('#banner').innerText === 'The engine died: out of memory.'")
    assert page.run("document.querySelector('#banner').dataset.tone") == "bad"
    stub.silent = True
    page.wait("document.querySelector('#state').textContent === 'Not reachable'")
    assert "has not answered" in page.text("#banner")
    assert page.run("document.querySelector('#main').classList.contains('stale')") is True
    stub.silent = False
    show(stub)
    page.wait("document.querySelector('#state').textContent === 'Working'")
    assert page.run("document.querySelector('#main').classList.contains('stale')") is False


def test_facts_that_are_missing_or_odd_break_nothing(page: Tab, stub: StubServer) -> None:
    stub.health = {"ok": True, "ready": True, "model": None, "requests": None, "recent": "x", "rates": [{}], "memory": None}
    stub.pool = {"segments": None, "conversations": 3, "counters": None}
    page.wait("document.querySelector('#state').textContent === 'Ready'")
    page.wait("document.querySelector('#tree').innerText === 'The pool is empty.'")
    assert page.text("#t-pool") == "–"
    assert page.text("#finished") == "No request yet."


def test_what_clients_send_never_becomes_markup(page: Tab, stub: StubServer) -> None:
    evil = '<img src=x onerror="document.title=1">'
    requests = [{**health_body()["requests"][0], "client": evil}]
    recent = [{**health_body()["recent"][0], "client": evil, "why": evil}]
    pool = pool_body()
    pool["conversations"][1].update(label=evil, client=evil, why=evil)
    stub.pool = pool
    show(stub, requests=requests, recent=recent, model={"id": evil, "label": evil}, reason=evil)
    page.wait("document.querySelector('#model').textContent.startsWith('<img')")
    page.wait("document.querySelector('#tree [data-id=\"d2\"] b').textContent.startsWith('<img')")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.text("#running .who") == evil
    assert page.text("#finished .why") == evil


# --- token


def test_it_asks_for_the_token_and_sends_it(open_page: Callable[..., Tab], stub: StubServer) -> None:
    stub.token = "let-me-in"
    tab = open_page()
    tab.wait("document.querySelector('#token-dialog').open")
    assert tab.text("#state") == "Token needed"
    assert "/pool" not in stub.paths, "nothing is asked that is sure to be refused"
    tab.type("#token", "wrong", enter=True)
    tab.wait("document.querySelector('#token-note').textContent === 'That token was not accepted.'")
    tab.run("document.querySelector('#token').value = ''")
    tab.type("#token", "let-me-in", enter=True)
    tab.wait("document.querySelector('#state').textContent === 'Working'")
    assert tab.run("document.querySelector('#token-dialog').open") is False
    tab.wait("document.querySelectorAll('#tree .node').length > 0")
    tab.open(f"{stub.url}/")
    tab.wait("document.querySelector('#state').textContent === 'Working'")
    assert tab.run("localStorage.length") == 0


def test_the_token_can_wait(open_page: Callable[..., Tab], stub: StubServer) -> None:
    stub.token = "let-me-in"
    tab = open_page()
    tab.wait("document.querySelector('#token-dialog').open")
    tab.click("#token-later")
    tab.wait("!document.querySelector('#token-dialog').open")
    seen = stub.paths.count("/health")
    tab.wait(f"performance.getEntriesByName('{stub.url}/health').length > {seen + 1}")
    assert tab.run("document.querySelector('#token-dialog').open") is False
    tab.click("#banner button")
    tab.wait("document.querySelector('#token-dialog').open")


# --- settings for agents


def test_settings_for_agents_are_shown_and_copied(page: Tab, stub: StubServer, browser: Browser) -> None:
    assert f"OpenAI base URL     {stub.url}/v1" in page.text("#snippet")
    assert "Context             131072 tokens" in page.text("#snippet")
    page.click('[data-agent="curl"]')
    assert f"curl {stub.url}/v1/chat/completions" in page.text("#snippet")
    show(stub, agents=[{"id": "codex", "label": "Codex", "text": "model = 'x'\n<b>"}, {"id": "broken"}])
    page.wait("document.querySelectorAll('#tabs button').length === 3")
    page.click('[data-agent="codex"]')
    assert page.text("#snippet") == "model = 'x'\n<b>"
    page.run("navigator.clipboard.writeText = (words) => { window.copied = words; return Promise.resolve(); }; 1")
    page.click("#copy")
    page.wait("window.copied === \"model = 'x'\\n<b>\"")
    page.wait("document.querySelector('#copy').textContent === 'Copied'")


def test_details(page: Tab) -> None:
    page.wait("document.querySelectorAll('#facts dd').length > 0")
    for _ in range(3):  # what is drawn above may move it away from under the pointer
        page.click("#details summary")
        if page.run("document.querySelector('#details details').open"):
            break
    facts = page.text("#facts").replace("\n", " ")
    assert "Model id pooled/qwen3.6-35b-moe" in facts
    assert "Sampling temperature 0.7, top_k 20" in facts
    assert "Prefill step 2,048 tokens" in facts
    assert "weights 19.0 GiB" in facts


# --- how it looks


@pytest.mark.parametrize("width", [320, 390])
def test_phone_width(open_page: Callable[..., Tab], width: int) -> None:
    tab = open_page(width=width, height=844, touch=True)
    tab.wait("document.querySelectorAll('#tree .node').length > 0")
    assert tab.run("document.documentElement.scrollWidth") == width
    overflowing = tab.run(
        "[...document.querySelectorAll('main *')].filter((node) => !node.closest('pre, #chart, svg')"
        f" && node.getBoundingClientRect().right > {width} + 0.5).map((node) => node.outerHTML.slice(0, 80))"
    )
    assert overflowing == []
    order = tab.run(
        "[...document.querySelectorAll('main section')]"
        ".sort((a, b) => a.getBoundingClientRect().y - b.getBoundingClientRect().y).map((node) => node.id)"
    )
    assert order == ["now", "requests", "speed", "chat", "recent", "pool", "agents", "details"]
    small = tab.run(
        "[...document.querySelectorAll('#send, #copy, .tabs button')]"
        ".filter((node) => node.getBoundingClientRect().height < 28).length"
    )
    assert small == 0


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_are_readable(open_page: Callable[..., Tab], dark: bool) -> None:
    tab = open_page(dark=dark)
    tab.wait("document.querySelectorAll('#tree .node').length > 0")
    ratios = tab.run(CONTRASTS)
    assert [entry for entry in ratios if entry[1] < 4.4] == []
    ground = tab.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(14, 17, 22)" if dark else "rgb(245, 246, 248)")


def test_a_foreign_script_would_not_run(page: Tab) -> None:
    page.run("window.blocked = new Promise((done) => document.addEventListener('securitypolicyviolation', done)); 1")
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.intruder = 1'})); 1")
    assert page.run("window.blocked.then((event) => event.effectiveDirective)") == "script-src-elem"
    assert page.run("window.intruder") is None
    assert page.run("fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')") == "refused"
    assert not [url for url in page.requests if ":9/" in url]
    page.problems.clear()


def test_polling_slows_down_when_hidden(page: Tab, stub: StubServer) -> None:
    page.run("Object.defineProperty(document, 'hidden', {get: () => true}); 1")
    page.run(
        "window.pauses = []; const real = setTimeout;window.setTimeout = (f, ms) => { pauses.push(ms); return real(f, ms); }; 1"
    )
    page.wait("pauses.includes(15000)")
    pool = stub.paths.count("/pool")
    page.run("document.dispatchEvent(new Event('visibilitychange')); 1")
    assert stub.paths.count("/pool") == pool, "a hidden page does not ask for the pool"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("desktop-light", {"height": 1000}),
        ("desktop-dark", {"height": 1000, "dark": True}),
        ("phone", {"width": 390, "height": 844, "touch": True}),
    ],
)
def test_screenshots(
    open_page: Callable[..., Tab], stub: StubServer, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """MAKE_SCREENSHOTS=1 puts them into the documentation."""
    now = int(time.time())
    rates = [
        {"t": now - back, "tokens_per_second": 44 + (back * 7) % 23} for back in range(295, -60, -1) if not 150 < back < 215
    ]
    recent = [{**row, "finished_at": now - 20 * (number + 1)} for number, row in enumerate(health_body()["recent"])]
    target = Target("http://127.0.0.1:8080", "pooled/qwen3.6-35b-moe", 131_072)
    profiles = [profile_of(agent, target) for agent in ("claude", "codex", "opencode", "qwen", "cline", "pi")]
    agents = [{"id": profile.name, "label": profile.title, "text": profile.text} for profile in profiles]
    show(stub, rates=rates, recent=recent, agents=agents)
    usage = {"prompt_tokens": 31, "completion_tokens": 42, "prompt_tokens_details": {"cached_tokens": 16}}
    stub.chat = [delta(reasoning_content="A one-sentence definition is wanted."), delta(content=ANSWER), finish(**usage)]
    tab = open_page(**options)
    tab.wait("document.querySelectorAll('#tree .node').length === 5")
    tab.click("#think")
    tab.type("#question", "What is a KV cache?", enter=True)
    tab.wait("document.querySelector('.said.model .foot')")
    tab.click('[data-agent="codex"]')
    tab.run("document.activeElement.blur(); scrollTo(0, 0); 1")
    assert "pooled-mlx" in tab.text("#snippet")
    path = (SHOTS if os.environ.get("MAKE_SCREENSHOTS") == "1" else tmp_path) / f"{name}.png"
    tab.screenshot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
