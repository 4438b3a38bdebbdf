"""Looks at grammars that could take long, or bring the process down, in a process of their own.

The grammar engine has no time limit and cannot be interrupted; proving that two regular expressions have something in common
can take it hours, and deep references can overflow its stack. The child compiles over bytes, which is where all of that
shows. It is started when first needed, ends with its parent, and by itself when idle.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import llguidance
import psutil

from pooled_mlx.grammar.memo import Memo

DEADLINE_SECONDS = 2.0
"""CPU time that one grammar may take; on a busy machine it may wait four times as long."""
_START_SECONDS = 20.0
_HEADER = struct.Struct("<I")
_GAVE_UP = "the grammar compiler gave up on it (too deep or too large)"
_TOO_LONG = "compiling takes longer than"
answers = Memo(entries=1024, weight=2**20)
"""What the shared child said, by the digest of the grammar."""

_CHILD = Path(__file__).with_name("isolated_child.py")


class Isolated:
    """One child process, one question at a time. Safe to call from any thread but the event loop's."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar_text: str) -> str:
        """What the engine says about a Lark grammar; "" where it takes it, within the time limit."""
        with self._lock:
            try:
                child = self._ready()
                self._send(child, grammar_text.encode())
                answer = self._receive(child, self.deadline_seconds, 4 * self.deadline_seconds)
            except (OSError, EOFError, psutil.Error):
                self._end()
                return _GAVE_UP
            if answer is None:
                self._end()
                return f"{_TOO_LONG} {self.deadline_seconds:g} seconds"
            return answer.decode()

    def close(self) -> None:
        """End the child. The next question starts another one."""
        with self._lock:
            self._end()

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        # the child needs the engine only: it is found where this process has it, whatever the path looks like
        environment = {**os.environ, "PYTHONPATH": str(Path(llguidance.__file__).parent.parent), "PYTHONSAFEPATH": "1"}
        self._child = subprocess.Popen(
            [sys.executable, str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            close_fds=True,
        )
        if self._receive(self._child, _START_SECONDS, _START_SECONDS) is None:
            raise EOFError
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @staticmethod
    def _send(child: subprocess.Popen[bytes], payload: bytes) -> None:
        assert child.stdin is not None
        child.stdin.write(_HEADER.pack(len(payload)) + payload)
        child.stdin.flush()

    @staticmethod
    def _receive(child: subprocess.Popen[bytes], cpu_seconds: float, seconds: float) -> bytes | None:
        """One answer, None when it does not come in time. Raises EOFError when the child is gone."""
        assert child.stdout is not None
        until = time.monotonic() + seconds
        process = psutil.Process(child.pid)
        spent = sum(process.cpu_times()[:2])
        data = b""
        while len(data) < _HEADER.size or len(data) < _HEADER.size + _HEADER.unpack_from(data)[0]:
            if not select.select([child.stdout], [], [], 0.1)[0]:
                if time.monotonic() > until or sum(process.cpu_times()[:2]) - spent > cpu_seconds:
                    return None
                continue
            piece = os.read(child.stdout.fileno(), 65536)
            if not piece:
                raise EOFError
            data += piece
        return data[_HEADER.size :]


@functools.cache
def shared() -> Isolated:
    """The one child of this process."""
    isolated = Isolated()
    atexit.register(isolated.close)
    return isolated


def check(grammar_text: str) -> str:
    """`Isolated.check` on the shared child; answers are remembered."""
    key = hashlib.blake2b(grammar_text.encode(), digest_size=20).digest()
    known = answers.get(key)
    if isinstance(known, str):
        return known
    answer = shared().check(grammar_text)
    answers.put(key, answer, len(answer) + len(key))
    return answer


def is_hopeless(reason: str) -> bool:
    """True for an answer after which looking at parts of the same grammar would cost as much again."""
    return reason == _GAVE_UP or reason.startswith(_TOO_LONG)
