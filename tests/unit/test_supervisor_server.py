"""kill -9 of a server that answers requests: the supervisor brings the HTTP server back, and the crash is on record."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.runs import last_crash, note_exit
from pooled_mlx.mac.supervisor import BACK_OFF_SECONDS, Exit, Supervisor
from tests.mac_fakes import FakeClock, mac_places

ROOT = Path(__file__).parents[2]

SERVER = """
import asyncio, os, sys
from pathlib import Path
from pooled_mlx.api.chat_completions import EDGE
from pooled_mlx.core.events import Text
from pooled_mlx.mac.runs import unattended
from pooled_mlx.server.app import create_app
from pooled_mlx.server.serve import StopSignal, open_sockets, serve
from pooled_mlx.server.settings import ServerSettings
from tests.fakes import FakeEngine
from tests.mac_fakes import mac_places

home, port, held = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "held"

async def main():
    engine = FakeEngine()
    if held:
        engine.hold()
    settings = ServerSettings(port=port)
    app = create_app(engine, {"/v1/chat/completions": EDGE}, settings)
    sockets = open_sockets(settings)
    print("listening", file=out, flush=True)
    served = asyncio.create_task(serve(app, sockets, stop=StopSignal(), handle_signals=True))
    while held and not served.done():
        generation = await engine.next_generation()
        generation.emit(Text("One, "), Text("two, "))
    return await served

out = os.fdopen(os.dup(1), "w")
with unattended(mac_places(home), "0.1.0") as run:
    code = asyncio.run(main())
    run.end(code)
"""


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def chat(port: int, *, stream: bool) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def test_kill_9_under_load(tmp_path: Path, free_port: int, children: list[subprocess.Popen[bytes]]) -> None:
    where, clock = mac_places(tmp_path), FakeClock()

    def launch() -> subprocess.Popen[bytes]:
        kind = "free" if children else "held"
        command = [sys.executable, "-c", SERVER, str(tmp_path), str(free_port), kind]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"listening\n", where.server_log.read_text()
        return child

    def ended(end: Exit) -> None:
        note_exit(where, end.pid, 0 if end.wanted else end.code)

    supervisor = Supervisor(launch, on_exit=ended, clock=clock)
    supervisor.start()
    streams = [chat(free_port, stream=True) for _ in range(3)]
    for response in streams:
        seen = b""
        while b"two, " not in seen:
            seen += response.readline()
    os.kill(children[0].pid, signal.SIGKILL)
    assert children[0].wait(timeout=60) == -signal.SIGKILL
    supervisor.tick()
    assert supervisor.state == "waiting"
    server = LocalServer(f"http://127.0.0.1:{free_port}", timeout_seconds=30)
    assert server.health().state == "stopped"
    crash = last_crash(where)
    assert crash is not None
    assert (crash.pid, crash.signal) == (children[0].pid, "SIGKILL")

    clock.sleep(BACK_OFF_SECONDS[0])
    supervisor.tick()
    assert supervisor.pid == children[1].pid
    assert server.health().answers
    answer = json.loads(chat(free_port, stream=False).read())
    assert answer["choices"][0]["message"]["content"] == "Hello there."
    assert last_crash(where) == crash, "the restart does not hide it"

    supervisor.stop()
    assert children[1].wait(timeout=60) == 0
    supervisor.tick()
    assert supervisor.state == "off"
    assert where.server_log.read_text().count("=== pooled-mlx 0.1.0 starts") == 2
