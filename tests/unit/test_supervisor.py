"""The supervisor: restarts after a crash, pauses that grow, a clean end left alone; also with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pooled_mlx.mac.local_server import LocalServer
from pooled_mlx.mac.supervisor import BACK_OFF_SECONDS, STABLE_SECONDS, STOP_SECONDS, Exit, Supervisor
from tests.mac_fakes import FakeChild, FakeClock


class Stage:
    """A supervisor over fake children, with everything a test wants to look at."""

    def __init__(self, *, resists: bool = False, fails: int = 0) -> None:
        self.clock = FakeClock()
        self.children: list[FakeChild] = []
        self.exits: list[Exit] = []
        self.fails = fails
        self.resists = resists
        self.supervisor = Supervisor(self.launch, on_exit=self.exits.append, clock=self.clock)

    def launch(self) -> FakeChild:
        if self.fails:
            self.fails -= 1
            raise FileNotFoundError("pooled-mlx")
        child = FakeChild(100 + len(self.children), resists=self.resists)
        self.children.append(child)
        return child

    def crash(self, code: int = -9) -> None:
        self.children[-1].code = code
        self.supervisor.tick()


def test_a_crashed_child_comes_back_after_a_pause() -> None:
    stage = Stage()
    stage.supervisor.start()
    stage.crash()
    assert stage.supervisor.state == "waiting"
    assert stage.supervisor.pid is None
    assert stage.supervisor.seconds_to_restart == BACK_OFF_SECONDS[0]
    stage.clock.sleep(BACK_OFF_SECONDS[0])
    stage.supervisor.tick()
    assert stage.supervisor.state == "running"
    assert stage.supervisor.pid == 101
    assert stage.exits == [Exit(100, -9, wanted=False)]


def test_pauses_grow_to_the_last_one_and_start_anew_after_a_healthy_life() -> None:
    stage = Stage()
    stage.supervisor.start()
    pauses = []
    for _ in range(len(BACK_OFF_SECONDS) + 2):
        stage.crash()
        pauses.append(stage.supervisor.seconds_to_restart)
        stage.clock.sleep(pauses[-1])
        stage.supervisor.tick()
    assert pauses == [*BACK_OFF_SECONDS, BACK_OFF_SECONDS[-1], BACK_OFF_SECONDS[-1]]
    stage.clock.sleep(STABLE_SECONDS)
    stage.crash()
    assert stage.supervisor.seconds_to_restart == BACK_OFF_SECONDS[0]
    assert stage.supervisor.crashes_in_a_row == 1


def test_a_clean_end_is_left_alone() -> None:
    stage = Stage()
    stage.supervisor.start()
    stage.crash(code=0)
    stage.clock.sleep(3600)
    stage.supervisor.tick()
    assert stage.supervisor.state == "ended"
    assert len(stage.children) == 1
    stage.supervisor.start()
    assert stage.supervisor.state == "running"


def test_stop_asks_first_and_kills_after_the_grace_time() -> None:
    stage = Stage(resists=True)
    stage.supervisor.start()
    stage.supervisor.stop()
    stage.clock.sleep(STOP_SECONDS - 1)
    stage.supervisor.tick()
    assert (stage.children[0].asked, stage.children[0].killed) == (1, 0)
    stage.clock.sleep(1)
    stage.supervisor.tick()
    assert stage.children[0].killed == 1
    stage.supervisor.tick()
    assert stage.supervisor.state == "off"
    assert stage.exits == [Exit(100, -9, wanted=True)]


def test_stop_ends_a_pause_too() -> None:
    stage = Stage()
    stage.supervisor.start()
    stage.crash()
    stage.supervisor.stop()
    stage.clock.sleep(3600)
    stage.supervisor.tick()
    assert stage.supervisor.state == "off"
    assert len(stage.children) == 1


def test_restart_waits_for_the_old_child() -> None:
    stage = Stage(resists=True)
    stage.supervisor.start()
    stage.supervisor.restart()
    stage.supervisor.tick()
    assert stage.supervisor.state == "stopping"
    assert len(stage.children) == 1
    stage.children[0].code = 0
    stage.supervisor.tick()
    assert stage.supervisor.state == "running"
    assert len(stage.children) == 2


def test_start_while_stopping_means_restart() -> None:
    stage = Stage(resists=True)
    stage.supervisor.start()
    stage.supervisor.stop()
    stage.supervisor.start()
    stage.children[0].code = 0
    stage.supervisor.tick()
    assert stage.supervisor.state == "running"
    assert stage.supervisor.pid == 101


def test_start_twice_starts_once() -> None:
    stage = Stage()
    stage.supervisor.start()
    stage.supervisor.start()
    assert len(stage.children) == 1


def test_a_program_that_cannot_be_started_is_told_and_tried_again() -> None:
    stage = Stage(fails=1)
    stage.supervisor.start()
    assert stage.supervisor.state == "waiting"
    assert "pooled-mlx" in stage.supervisor.problem
    stage.clock.sleep(BACK_OFF_SECONDS[0])
    stage.supervisor.tick()
    assert stage.supervisor.state == "running"
    assert stage.supervisor.problem == ""


STUB = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"data: first\\n\\n")
            self.wfile.flush()
            import threading
            threading.Event().wait(60)
        data = json.dumps({"ok": True, "ready": True, "state": "ready", "version": "0.1.0", "model": {"id": "x"}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.daemon_threads = True
print("listening", server.server_address[1], flush=True)
server.serve_forever()
"""


def test_kill_9_under_load_brings_a_real_server_back(tmp_path: Path) -> None:
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    started: list[subprocess.Popen[bytes]] = []
    ports: list[int] = [0]

    def launch() -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, str(script), str(ports[-1])], stdout=subprocess.PIPE)
        started.append(child)
        assert child.stdout is not None
        ports.append(int(child.stdout.readline().split()[1]))
        return child

    clock = FakeClock()
    supervisor = Supervisor(launch, clock=clock)
    try:
        supervisor.start()
        port = ports[-1]
        server = LocalServer(f"http://127.0.0.1:{port}", timeout_seconds=10)
        assert server.health().ready
        with socket.create_connection(("127.0.0.1", port), timeout=10) as busy:
            busy.sendall(b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            received = b""
            while b"data: first" not in received:
                received += busy.recv(4096)
            os.kill(started[0].pid, signal.SIGKILL)
            assert busy.recv(4096) == b""
        assert started[0].wait(timeout=10) == -9
        assert server.health().state == "stopped"
        supervisor.tick()
        assert supervisor.state == "waiting"
        clock.sleep(BACK_OFF_SECONDS[0])
        supervisor.tick()
        assert ports[-1] == port
        assert server.health().ready
        supervisor.stop()
        assert started[1].wait(timeout=10) == -signal.SIGTERM
        supervisor.tick()
        assert supervisor.state == "off"
        assert server.health().state == "stopped"
    finally:
        for child in started:
            if child.poll() is None:
                child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.mark.parametrize("code", [1, 70, -6, -11])
def test_every_bad_end_counts_as_a_crash(code: int) -> None:
    stage = Stage()
    stage.supervisor.start()
    stage.crash(code)
    assert stage.supervisor.state == "waiting"
