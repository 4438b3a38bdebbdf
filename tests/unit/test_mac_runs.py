"""What is kept of a server that nobody watched: its log, its crash, its refusal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pooled_mlx.mac.logs import OutputLog, rotate, rotated, tail
from pooled_mlx.mac.runs import Run, is_alive, last_crash, note_exit, read_refusal, read_run, unattended
from tests.mac_fakes import FakeClock, mac_places

ROOT = Path(__file__).parents[2]


def run_server(home: Path, body: str, *, kill: int | None = None) -> int:
    """Run `body` as the inside of an unattended run, in a process of its own; its return code."""
    code = (
        "import os, signal, sys, threading\n"
        "from pathlib import Path\n"
        "from tests.mac_fakes import mac_places\n"
        "from pooled_mlx.mac.runs import unattended\n"
        f"with unattended(mac_places(Path({str(home)!r})), '0.1.0') as run:\n"
    ) + "".join(f"    {line}\n" for line in body.splitlines())
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if kill is not None:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.send_signal(kill)
        return process.wait(timeout=60)


def test_the_last_words_of_an_aborting_library_are_shown(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    code = run_server(tmp_path, "os.write(2, b'[METAL] Command buffer execution failed: Out of Memory\\n')\nos.abort()")
    assert code == -signal.SIGABRT
    crash = last_crash(where)
    assert crash is not None
    assert "[METAL] Command buffer execution failed: Out of Memory" in "\n".join(crash.lines)
    assert "Fatal Python error: Aborted" in "\n".join(crash.lines)
    assert crash.summary == f"pid {crash.pid} (version 0.1.0): ended without a word"


def test_a_crash_survives_the_restart_that_follows_it(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    run_server(tmp_path, "os.write(2, b'out of memory\\n')\nos.kill(os.getpid(), signal.SIGKILL)")
    first = read_run(where)
    assert run_server(tmp_path, "print('second life')") == 0
    crash = last_crash(where)
    assert crash is not None
    assert first is not None
    assert crash.pid == first.pid
    assert crash.lines[-1] == "out of memory"
    second = read_run(where)
    assert second is not None
    assert second.exit_code == 0
    assert "second life" in where.server_log.read_text()


def test_an_exception_is_a_crash_with_its_traceback(tmp_path: Path) -> None:
    assert run_server(tmp_path, "raise ValueError('bad weights')") == 1
    crash = last_crash(mac_places(tmp_path))
    assert crash is not None
    assert crash.exit_code == 1
    assert "ValueError: bad weights" in "\n".join(crash.lines)


@pytest.mark.parametrize(
    ("body", "code", "crashed"),
    [
        ("sys.exit(0)", 0, False),
        ("sys.exit(None)", 0, False),
        ("sys.exit(70)", 70, True),
        ("sys.exit('port busy')", 1, True),
        ("run.end(3)", 0, True),
        ("sys.exit(run.refuse('no room'))", 0, False),
    ],
)
def test_ends(tmp_path: Path, body: str, code: int, crashed: bool) -> None:
    assert run_server(tmp_path, body) == code
    where = mac_places(tmp_path)
    assert (last_crash(where) is not None) is crashed
    refusal = read_refusal(where)
    assert (refusal.reason if refusal else None) == ("no room" if "refuse" in body else None)


def test_the_next_start_forgets_the_refusal(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    with unattended(where, "0.1.0", redirect=False) as run:
        run.refuse("no room")
    assert read_refusal(where) is not None
    with unattended(where, "0.1.0", redirect=False):
        assert read_refusal(where) is None


def test_whoever_saw_it_end_knows_the_signal(tmp_path: Path) -> None:
    where, clock = mac_places(tmp_path), FakeClock(50.0)
    with unattended(where, "0.1.0", redirect=False, clock=clock):
        crash = note_exit(where, os.getpid(), -11, FakeClock(62.0))
    assert crash is not None
    assert (crash.signal, crash.exit_code, crash.ran_seconds) == ("SIGSEGV", None, 12.0)
    assert "killed by SIGSEGV" in crash.summary
    assert last_crash(where) == crash


def test_a_child_that_wrote_nothing_down_is_known_by_its_pid(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    crash = note_exit(where, 4711, 127, FakeClock(5.0))
    assert crash is not None
    assert crash.summary == "pid 4711 (version unknown): exit code 127"
    assert note_exit(where, 4711, 0) is None


def test_a_running_server_has_not_crashed(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    with unattended(where, "0.1.0", redirect=False):
        run = read_run(where)
        assert run is not None
        assert is_alive(run)
        assert last_crash(where) is None
        assert not is_alive(replace(run, process_started_at=1.0))


def test_a_pid_that_is_gone_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(timeout=60)
    assert not is_alive(Run(process.pid, "0.1.0", 0.0, process_started_at=1.0))


def test_damaged_records_are_as_good_as_none(tmp_path: Path) -> None:
    where = mac_places(tmp_path)
    where.state.mkdir(parents=True)
    for path in (where.run_record, where.last_crash, where.refusal):
        path.write_text("{not json")
    assert (read_run(where), last_crash(where), read_refusal(where)) == (None, None, None)
    where.last_crash.write_text('{"unknown": 1}')
    assert last_crash(where) is None


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for number in range(8):
        path.write_text(f"life {number}\n")
        rotate(path, kept=3)
    assert not path.exists()
    assert [rotated(path, number).read_text() for number in (1, 2, 3)] == ["life 7\n", "life 6\n", "life 5\n"]
    assert not rotated(path, 4).exists()


def test_output_goes_on_in_a_new_file_when_the_old_one_is_large(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "server.log"
    code = (
        "import os, sys; from pathlib import Path; from pooled_mlx.mac.logs import OutputLog\n"
        f"log = OutputLog(Path({str(path)!r}), max_bytes=100, kept=2)\n"
        "log.take_over()\n"
        "print('x' * 200, flush=True)\n"
        "assert log.rotate_if_large()\n"
        "assert not log.rotate_if_large()\n"
        "os.write(1, b'after')\n"
        "os.write(2, b' both')\n"
        "log.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    assert path.read_text() == "after both"
    assert rotated(path, 1).read_text() == "x" * 200 + "\n"


def test_the_size_is_watched_until_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = OutputLog(tmp_path / "server.log")
    looked = threading.Event()
    monkeypatch.setattr(log, "rotate_if_large", looked.set)
    log.watch(interval_seconds=0.001)
    assert looked.wait(timeout=30)
    log.close()
    assert not any(thread.name == "log-rotation" for thread in threading.enumerate())


def test_tail_of_a_long_file_and_of_none(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"\n".join(b"line %d \xff" % number for number in range(5000)))
    assert tail(path, lines=2) == ["line 4998 \ufffd", "line 4999 \ufffd"]
    assert tail(tmp_path / "none") == []
