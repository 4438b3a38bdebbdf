"""The chat box: streaming, thinking, stop, errors, and what it sends."""

from __future__ import annotations

import threading

from tests.page.chromium import Tab
from tests.page.stub_server import StubServer, delta, finish

USAGE = {
    "prompt_tokens": 31,
    "completion_tokens": 42,
    "total_tokens": 73,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def last(page: Tab, part: str) -> str:
    return page.run(f"[...document.querySelectorAll('.said.model {part}')].at(-1).innerText")


def test_an_answer_streams(page: Tab, stub: StubServer) -> None:
    more, end = threading.Event(), threading.Event()
    stub.chat = [delta(role="assistant", content=""), delta(content="A KV cache "), more, delta(content="stores keys."), end]
    stub.chat.append(finish(**USAGE))
    page.type("#question", "What is a KV cache?", enter=True)
    page.wait("document.querySelector('.said.model .body')?.innerText === 'A KV cache'")
    assert page.run("document.querySelector('#stop').hidden") is False
    assert page.run("document.querySelector('#send').hidden") is True
    more.set()
    page.wait("document.querySelector('.said.model .body').innerText === 'A KV cache stores keys.'")
    end.set()
    page.wait("document.querySelector('.said.model .foot')")
    assert last(page, ".foot").startswith("42 tokens · 16 of 31 prompt tokens reused · first token ")
    assert page.text(".said.user") == "What is a KV cache?"
    assert page.run("document.querySelector('#question').value") == ""
    assert page.run("document.querySelector('#stop').hidden") is True
    assert stub.asked == [
        {
            "model": "pooled/qwen3.6-35b-moe",
            "messages": [{"role": "user", "content": "What is a KV cache?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]


def test_thinking_is_shown_apart_and_sent_back(page: Tab, stub: StubServer) -> None:
    answer = threading.Event()
    stub.chat = [delta(reasoning_content="The user wants "), delta(reasoning_content="a greeting."), answer]
    stub.chat += [delta(content="Hello."), finish(**USAGE)]
    page.click("#think")
    page.type("#question", "Greet me", enter=True)
    page.wait("document.querySelector('.thought')?.innerText === 'The user wants a greeting.'")
    assert page.run("document.querySelector('.said.model details').open") is True
    assert page.text("#waiting") == "thinking"
    answer.set()
    page.wait("document.querySelector('.said.model .foot')")
    assert last(page, ".body") == "Hello."
    assert page.run("document.querySelector('.said.model details').open") is False
    stub.chat = [delta(content="Again."), finish()]
    page.click("#think")
    page.type("#question", "Once more", enter=True)
    page.wait("document.querySelectorAll('.said.model .foot').length === 2")
    assert stub.asked[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert stub.asked[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert stub.asked[1]["messages"] == [
        {"role": "user", "content": "Greet me"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "The user wants a greeting."},
        {"role": "user", "content": "Once more"},
    ]


def test_stop_closes_the_connection_and_keeps_what_came(page: Tab, stub: StubServer) -> None:
    stub.chat = [delta(content="One, two, "), threading.Event()]
    page.type("#question", "Count", enter=True)
    page.wait("document.querySelector('.said.model .body')?.innerText === 'One, two,'")
    page.click("#stop")
    page.wait("document.querySelector('.said.model .foot')")
    assert last(page, ".foot").startswith("stopped · first token")
    assert stub.gone.wait(timeout=30)
    stub.chat = [delta(content="three"), finish()]
    page.type("#question", "Go on", enter=True)
    page.wait("document.querySelectorAll('.said.model .foot').length === 2")
    assert [message["role"] for message in stub.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert stub.asked[1]["messages"][1]["content"] == "One, two, "


def test_progress_before_the_first_token(page: Tab, stub: StubServer) -> None:
    first, second = threading.Event(), threading.Event()
    stub.chat = [": queued, 2 ahead\n\n", first, ": prefill 41%\n\n", second, delta(content="Hi"), finish()]
    page.type("#question", "Hello", enter=True)
    page.wait("document.querySelector('#waiting').textContent === 'queued, 2 ahead'")
    first.set()
    page.wait("document.querySelector('#waiting').textContent === 'reading 41%'")
    second.set()
    page.wait("document.querySelector('.said.model .foot')")
    assert page.text("#waiting") == ""


def test_pieces_are_put_together_wherever_they_are_cut(page: Tab, stub: StubServer) -> None:
    data = (delta(content="Grüße 🙂 ").replace("\\ud83d\\ude42", "🙂") + delta(content="a\nb") + finish()).encode()
    cut, other = data.index("🙂".encode()) + 2, len(data) - 9
    stub.chat = [data[:cut], data[cut:other], data[other:]]
    page.type("#question", "x", enter=True)
    page.wait("document.querySelector('.said.model .foot')")
    assert last(page, ".body") == "Grüße 🙂 a\nb"


def test_errors_are_shown_and_the_failed_turn_is_not_sent_again(page: Tab, stub: StubServer) -> None:
    stub.chat_status, stub.chat_error = 400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum."}}
    page.type("#question", "too long", enter=True)
    page.wait("document.querySelector('.said.model .error')")
    assert last(page, ".error") == "prompt is too long: 9 tokens > 8 maximum."
    stub.chat_status = 200
    stub.chat = [delta(content="Par"), 'data: {"error": {"message": "the engine failed this request"}}\n\n']
    page.type("#question", "second", enter=True)
    page.wait("document.querySelectorAll('.said.model .error').length === 2")
    assert last(page, ".error") == "the engine failed this request"
    assert last(page, ".body") == "Par"
    stub.chat = [delta(content="cut")]
    page.type("#question", "third", enter=True)
    page.wait("document.querySelectorAll('.said.model .error').length === 3")
    assert last(page, ".error") == "The answer broke off."
    assert stub.asked[1]["messages"] == [{"role": "user", "content": "second"}]


def test_a_cut_answer_says_so(page: Tab, stub: StubServer) -> None:
    stub.chat = [delta(content="and so on"), finish("length")]
    page.type("#question", "Write", enter=True)
    page.wait("document.querySelector('.said.model .foot')")
    assert last(page, ".foot").startswith("cut at the token limit")


def test_code_is_set_apart_and_nothing_is_markup(page: Tab, stub: StubServer) -> None:
    text = "Look:\n```python\nprint('<b>')\n```\n<b>bold</b> & done"
    stub.chat = [delta(content=text), finish()]
    page.type("#question", "<i>me</i>", enter=True)
    page.wait("document.querySelector('.said.model .foot')")
    assert page.text(".said.model pre") == "print('<b>')"
    assert last(page, ".body p:last-child") == "<b>bold</b> & done"
    assert page.text(".said.user") == "<i>me</i>"
    assert page.run("document.querySelectorAll('.said b, .said i').length") == 0


def test_clear_begins_anew(page: Tab, stub: StubServer) -> None:
    stub.chat = [delta(content="Hi"), finish()]
    page.type("#question", "one", enter=True)
    page.wait("document.querySelector('.said.model .foot')")
    page.click("#clear")
    assert page.run("document.querySelectorAll('.said').length") == 0
    page.type("#question", "two", enter=True)
    page.wait("document.querySelector('.said.model .foot')")
    assert stub.asked[1]["messages"] == [{"role": "user", "content": "two"}]


def test_shift_enter_is_a_new_line_and_empty_is_not_sent(page: Tab, stub: StubServer) -> None:
    page.type("#question", "   ", enter=True)
    page.click("#send")
    page.run(
        "document.querySelector('#question').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', shiftKey: true, cancelable: true}))"
    )
    assert stub.asked == []
    assert page.run("document.querySelectorAll('.said').length") == 0


def test_the_chat_sends_the_token(page: Tab, stub: StubServer) -> None:
    stub.token = "let-me-in"
    page.wait("document.querySelector('#token-dialog').open")
    page.type("#token", "let-me-in", enter=True)
    page.wait("!document.querySelector('#token-dialog').open")
    stub.chat = [delta(content="Hi"), finish()]
    page.type("#question", "one", enter=True)
    page.wait("document.querySelector('.said.model .foot')")
    assert stub.authorizations == ["Bearer let-me-in"]
