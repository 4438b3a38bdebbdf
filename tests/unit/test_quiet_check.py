"""The check that `serve` makes in the background: when it begins, what ends it, and that its result is remembered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pooled_mlx.cli.checks import CLIENT, Checker, Outcome
from pooled_mlx.cli.quiet_check import CheckRecords, QuietCheck

GOOD, BAD = Outcome("warm = cold", "ok", "equal bit for bit", 1.0), Outcome("schema", "failed", "the answer is not JSON", 2.0)


class Engine:
    """What the check looks at of an engine, and what it was told to forget."""

    def __init__(self, used: int = 0, budget: int = 1000, ready: bool = True) -> None:
        self.pool = SimpleNamespace(used_bytes=used, budget_bytes=budget)
        self.loop = SimpleNamespace(pool=self.pool)
        self.plan = SimpleNamespace(pool_bytes=1000, fits=lambda prompt, most: SimpleNamespace(needed_bytes=200))
        self.ready, self.forgotten = ready, []

    def forget(self, client: str) -> None:
        self.forgotten.append(client)

    def health(self) -> dict[str, Any]:
        return {"ready": self.ready}


class Stage:
    """A server without requests, whose quiet times pass when the test says so."""

    def __init__(self, path: Path, outcomes: Sequence[Outcome] = (GOOD,), *, holds: bool = False) -> None:
        self.idle, self.began, self.waits = True, 0, 0
        self.engine: Any = Engine()
        self.go_on, self.finish = asyncio.Semaphore(0), asyncio.Event()
        if not holds:
            self.finish.set()
        self.outcomes = outcomes
        self.quiet = QuietCheck(lambda: self.idle, CheckRecords(path / "checks.json"), check=self.check, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.waits += 1
        await self.go_on.acquire()

    async def check(self, checker: Checker) -> Sequence[Outcome]:
        self.began += 1
        await self.finish.wait()
        return self.outcomes

    def start(self, key: str = "model 1") -> asyncio.Task[None]:
        return asyncio.create_task(self.quiet.run(lambda: self.engine, lambda: key))

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(30):
            while not what():
                await asyncio.sleep(0)

    async def pass_quiet_time(self) -> None:
        """One quiet time passes, and what follows from it happens."""
        waits = self.waits
        self.go_on.release()
        await self.until(lambda: self.waits > waits or self.quiet.facts["state"] in ("running", "ok", "failed"))


async def test_it_runs_once_and_the_result_is_known_at_the_next_start(tmp_path: Path):
    stage = Stage(tmp_path)
    task = stage.start()
    await stage.until(lambda: stage.waits == 1)
    assert stage.began == 0
    stage.go_on.release()
    await task
    assert stage.began == 1
    assert stage.quiet.facts["state"] == "ok"
    assert stage.quiet.facts["checks"][0]["name"] == "warm = cold"
    assert stage.engine.forgotten == [CLIENT]
    again = Stage(tmp_path)
    again.go_on.release()
    await again.start()
    assert (again.began, again.quiet.facts) == (0, stage.quiet.facts)
    other = Stage(tmp_path)
    other.go_on.release()
    await other.start("model 1, a newer mlx")
    assert other.began == 1


async def test_a_failure_is_reported_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stage = Stage(tmp_path, (GOOD, BAD))
    stage.go_on.release()
    with caplog.at_level(logging.WARNING, "pooled.serve"):
        await stage.start()
    assert stage.quiet.facts["state"] == "failed"
    (line,) = caplog.messages
    assert "schema: the answer is not JSON" in line
    assert "doctor --deep" in line


async def test_it_does_not_begin_while_requests_run_or_have_just_run(tmp_path: Path):
    stage = Stage(tmp_path)
    task = stage.start()
    stage.idle = False
    await stage.until(lambda: stage.waits == 1)
    await stage.pass_quiet_time()
    stage.idle = True
    stage.quiet.request_came()
    await stage.pass_quiet_time()
    assert stage.began == 0
    stage.go_on.release()
    await task
    assert stage.began == 1


async def test_a_request_ends_it_at_once_and_it_begins_again_later(tmp_path: Path):
    stage = Stage(tmp_path, holds=True)
    task = stage.start()
    await stage.until(lambda: stage.waits == 1)
    await stage.pass_quiet_time()
    await stage.until(lambda: stage.began == 1)
    stage.quiet.request_came()
    assert stage.engine.forgotten == [CLIENT], "before anything else runs on the event loop"
    await stage.until(lambda: stage.quiet.facts == {"state": "waiting"})
    stage.finish.set()
    stage.go_on.release()
    await task
    assert stage.began == 2
    assert stage.quiet.facts["state"] == "ok"


@pytest.mark.parametrize(("used", "budget"), [(500, 1000), (0, 999)], ids=["others fill the pool", "memory is short"])
async def test_it_does_not_begin_where_others_would_have_to_make_room(tmp_path: Path, used: int, budget: int):
    stage = Stage(tmp_path)
    stage.engine = Engine(used, budget)
    task = stage.start()
    await stage.until(lambda: stage.waits == 1)
    await stage.pass_quiet_time()
    assert stage.began == 0
    stage.engine = Engine(400, 1000)
    stage.go_on.release()
    await task
    assert stage.began == 1


async def test_a_server_that_goes_down_meanwhile_says_nothing_of_the_model(tmp_path: Path):
    stage = Stage(tmp_path, (BAD,), holds=True)
    task = stage.start()
    await stage.until(lambda: stage.waits == 1)
    await stage.pass_quiet_time()
    await stage.until(lambda: stage.began == 1)
    stage.engine.ready = False
    stage.finish.set()
    await stage.until(lambda: stage.waits == 2)
    task.cancel()
    assert not (tmp_path / "checks.json").exists()


async def test_an_end_of_the_server_ends_it(tmp_path: Path):
    stage = Stage(tmp_path, holds=True)
    task = stage.start()
    await stage.until(lambda: stage.waits == 1)
    await stage.pass_quiet_time()
    await stage.until(lambda: stage.began == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.engine.forgotten == [CLIENT]


def test_records_survive_a_damaged_file_and_do_not_grow_for_ever(tmp_path: Path):
    path = tmp_path / "checks.json"
    path.write_text("[1, 2")
    records = CheckRecords(path)
    assert records.read("a") is None
    for number in range(80):
        records.write(f"model {number}", {"state": "ok"})
    assert records.read("model 79") == {"state": "ok"}
    assert records.read("model 31") == {"state": "ok"}
    assert records.read("model 5") is None
