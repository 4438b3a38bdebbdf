"""The main job on real input: `pooled-mlx serve` with the embedded model, asked as the documentation says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from pooled_mlx.store import Ready

pytestmark = pytest.mark.slow
_START_SECONDS = 300


class Served:
    """A server process that is ready."""

    def __init__(self, process: subprocess.Popen[str], port: int, banner: list[str]) -> None:
        self.process, self.port, self.banner = process, port, banner

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def served(embedded: Ready, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as errors:
        command = [sys.executable, "-m", "pooled_mlx", "serve", "--model", "smollm2-135m", "--port", str(port), "--seed", "7"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        killer = _killer(process)
        try:
            assert process.stdout is not None
            banner: list[str] = []
            for line in process.stdout:
                banner.append(line.rstrip())
                if line.lstrip().startswith("others"):
                    break
            assert banner, f"the server ended: {log.read_text()}"
            yield Served(process, port, banner)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
            killer.cancel()
    assert code == 0, log.read_text()
    lines = log.read_text().splitlines()
    assert not [line for line in lines if " error " in line or "Traceback" in line]
    assert len([line for line in lines if " info request: chat_completions " in line]) == 3


def _killer(process: subprocess.Popen[str]) -> Any:
    import threading

    timer = threading.Timer(_START_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def test_the_banner(served: Served):
    text = "\n".join(served.banner)
    assert "pooled/smollm2-135m" in text
    assert f"{served.url}/v1" in text
    assert "8,192 tokens" in text
    assert "weights 513" in text


def test_the_curl_example(served: Served):
    body = {
        "model": "pooled",
        "messages": [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is a KV cache?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 24,
    }
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=_START_SECONDS, trust_env=False)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {chunk["model"] for chunk in chunks} == {"pooled/smollm2-135m"}
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]).strip()


def test_the_python_example_and_a_warm_turn(served: Served):
    client = OpenAI(base_url=f"{served.url}/v1", api_key="pooled", timeout=_START_SECONDS, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in a few words."}]
    stream = client.chat.completions.create(model="pooled", messages=messages, stream=True, temperature=0, max_tokens=24)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]
    answer = client.chat.completions.create(model="pooled", messages=messages, temperature=0, max_tokens=24)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > answer.usage.prompt_tokens // 2
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_health_says_what_runs(served: Served):
    facts = httpx.get(f"{served.url}/health", timeout=60, trust_env=False).json()
    assert (facts["ok"], facts["ready"], facts["ctx"]) == (True, True, 8192)
    memory = facts["memory"]
    parts = ("weights_bytes", "pool_budget_bytes", "working_bytes", "headroom_bytes")
    assert sum(memory[part] for part in parts) == memory["limit_bytes"]
    assert facts["sampling"]["answer"] == {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "min_p": 0.0}


def test_a_second_server_on_the_port_is_refused(served: Served):
    command = [sys.executable, "-m", "pooled_mlx", "serve", "--port", str(served.port)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_START_SECONDS, cwd=Path.home(), env=dict(os.environ)
    )
    assert done.returncode == 1
    assert f"(pid {served.process.pid}): a pooled-mlx server version" in done.stderr
    assert "with smollm2-135m runs there already" in done.stderr


def test_scripted_answers(embedded: Ready, tmp_path: Path):
    """`serve --replay`: a call that the real parser reads, from a script."""
    script = tmp_path / "answers.jsonl"
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    script.write_text(json.dumps({"match": "weather", "text": call}) + "\n" + json.dumps({"text": "Hello."}) + "\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pooled_mlx", "serve", "--replay", str(script), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    killer = _killer(process)
    try:
        assert process.stdout is not None
        assert any(line.lstrip().startswith("others") for line in process.stdout)
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        body = {
            "messages": [{"role": "user", "content": "weather in Paris?"}],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        }
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=_START_SECONDS, trust_env=False).json()
        (called,) = answer["choices"][0]["message"]["tool_calls"]
        assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("weather", {"city": "Paris"})
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        killer.cancel()


def test_a_reader_that_goes_away_costs_the_banner_only(embedded: Ready, tmp_path: Path):
    """`serve | head`: nobody reads the standard output any more when the banner comes."""
    script = tmp_path / "answers.jsonl"
    script.write_text('{"text": "Hello."}\n')
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pooled_mlx", "serve", "--replay", str(script), "--port", "0"]
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    killer = _killer(process)
    try:
        assert process.stderr is not None
        log = []
        port = 0
        for line in process.stderr:
            log.append(line)
            if " serving " in line:
                port = int(line.split()[-1])
                break
        assert port, "".join(log)
        assert any(" loading " in line and f"http://127.0.0.1:{port}/health" in line for line in log)
        body = {"messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=_START_SECONDS, trust_env=False)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello."
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
        assert "Traceback" not in rest
        assert rest.rstrip().endswith("stopped")
    finally:
        process.kill()
        process.wait(60)
        killer.cancel()
