"""The checks of `doctor --deep` and of the server, on a real tokenizer and the tiny hybrid model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.cli import checks, deep, main
from pooled_mlx.cli.checks import CLIENT, Checker, Outcome
from pooled_mlx.core.ports import EngineSettings
from pooled_mlx.core.request import Turn
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.replay.engine import REPLAY_CARD, load_replay_model, write_replay_folder
from pooled_mlx.runner import start
from pooled_mlx.runner.runner import MlxRunner
from pooled_mlx.runner.start import MlxSource
from pooled_mlx.store import Ready
from tests.model.rooms import READY_SECONDS, ask

SOURCE = MlxSource


@pytest.fixture(scope="module")
def folder(embedded: Ready, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    made = tmp_path_factory.mktemp("checks") / "tiny"
    write_replay_folder(embedded.folder, made)
    return made


@pytest.fixture
def engine(folder: Path) -> Iterator[LocalEngine]:
    settings = EngineSettings(context_tokens=8192, pool_bytes=64 << 20, prefill_step=64)
    room = LocalEngine(REPLAY_CARD, folder, settings, MlxSource(load_replay_model))
    room.start()
    try:
        assert room.wait_ready(READY_SECONDS), room.health()["reason"]
        yield room
    finally:
        room.stop()


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEEP_TOKENS", "CUT_TOKENS", "SHORT_TOKENS"):
        monkeypatch.setattr(checks, name, 600)


def settled(room: LocalEngine) -> Any:
    """The loop once everything that was asked of its thread is done."""
    done: list[bool] = []
    room._thread.call(lambda loop: done.append(True))
    while not done:
        pass
    return room.loop


def short(room: LocalEngine) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in asyncio.run(checks.short(Checker(room)))}


def test_the_short_form_holds_and_leaves_nothing(engine: LocalEngine):
    before = ask(engine, [Turn("system", "You are a clerk. " * 30), Turn("user", "Say something.")], most=8)
    kept = settled(engine).pool.segment_bytes
    found = short(engine)
    assert found["warm = cold"].state == "ok"
    assert found["warm = cold"].numbers["largest_difference"] == 0.0
    assert 200 < found["warm = cold"].numbers["reused_tokens"] < found["warm = cold"].numbers["prompt_tokens"]
    assert found["batch of two"].state in ("ok", "note")  # experts: rounding
    assert found["batch of two"].numbers["shared_steps"] > 0
    assert found["schema"].state == "ok", found["schema"].text
    loop = settled(engine)
    assert loop.pool.segment_bytes == kept
    assert CLIENT not in {segment.label for segment in loop.pool.segments()}
    assert CLIENT not in loop.pool.pins
    health = engine.health()
    assert (health["served"], health["failed"], len(health["recent"])) == (1, 0, 1)
    again = ask(engine, [*before.request.turns, before.turn, Turn("user", "And more.")], most=2)
    assert again.answer.usage.cached_tokens >= before.answer.usage.prompt_tokens - 16


def test_three_cuts_are_at_three_places(engine: LocalEngine):
    outcome = asyncio.run(Checker(engine).cuts(1000, 5))
    assert outcome.state == "ok", outcome.text
    reused = outcome.numbers["reused_tokens"]
    assert 0 < reused[0] < reused[2] < reused[1]


def test_a_cache_that_is_restored_wrongly_is_found(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch):
    """One layer of what is gone on from has small errors."""
    from pooled_mlx.runner.buffers import Buffer

    restore = Buffer.restore

    def wrong(self: Any, state: Any) -> None:
        restore(self, state)
        for layer in self.layers if state is not None else ():
            if isinstance(getattr(layer, "cache", None), list):
                layer.cache = [None if array is None else array * 1.01 for array in layer.cache]

    monkeypatch.setattr(Buffer, "restore", wrong)
    found = short(engine)
    assert found["warm = cold"].state == "failed"
    assert "the logits differ by up to" in found["warm = cold"].text


def test_an_answer_that_changes_in_company_is_found(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch):
    join = MlxRunner.join

    def spoiled(self: Any, *arguments: Any) -> int:
        number = join(self, *arguments)
        for layer in self._buffers[number].layers:
            if getattr(layer, "keys", None) is not None:
                layer.values = layer.values * -3
        return number

    monkeypatch.setattr(MlxRunner, "join", spoiled)
    outcome = asyncio.run(Checker(engine).batch(3))
    assert outcome.state == "failed", outcome.text


def test_nothing_reused_is_no_proof(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch):
    from pooled_mlx.engine.pool import Match, Pool

    monkeypatch.setattr(Pool, "lookup", lambda self, ids: Match())
    outcome = short(engine)["warm = cold"]
    assert outcome.state == "failed"
    assert "nothing was reused" in outcome.text


def test_a_check_that_is_given_up_in_the_middle_leaves_nothing(engine: LocalEngine):
    async def give_up() -> None:
        checker = Checker(engine)
        turns = await checker.conversation(3000, 4)
        task = asyncio.create_task(checker.ask(turns))
        while not engine.loop.counters.pieces > 3:
            await asyncio.sleep(0)
        engine.forget(CLIENT)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(give_up())
    loop = settled(engine)
    assert not loop.busy
    assert loop.pool.segment_bytes == 0
    assert loop.ledger.live_bytes == 0


def test_what_somebody_went_on_from_is_kept(engine: LocalEngine):
    """A conversation that begins as the check's does stands on what the check read."""
    turns = [Turn("system", "Shared. " * 100), Turn("user", "one")]
    asyncio.run(Checker(engine).ask(turns))
    other = ask(engine, [*turns[:1], Turn("user", "two, which is another question")], most=2)
    assert other.answer.usage.cached_tokens > 50
    engine.forget(CLIENT)
    settled(engine)
    again = ask(engine, other.request.turns, most=2)
    assert again.answer.usage.cached_tokens >= other.answer.usage.cached_tokens


def test_its_prompts_are_told_to_nobody(engine: LocalEngine):
    asyncio.run(Checker(engine).ask([Turn("user", "a secret")]))
    health = json.dumps([engine.health()["requests"], engine.health()["recent"], engine.health()["rates"]])
    assert health == "[[], [], []]"
    assert engine.pool()["reasons"] == []


@pytest.fixture
def deep_doctor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`doctor --deep` loads the tiny model; the path is its report's."""
    for name in ("CONFIG", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(start, "MlxSource", lambda: SOURCE(load_replay_model))
    card = replace(REPLAY_CARD, folder=str(folder), label="jane's own")
    monkeypatch.setattr(deep, "ensure_model", lambda *_, **__: Ready(card, folder))
    return tmp_path / "report.json"


def test_doctor_deep_writes_a_report_that_names_nobody(deep_doctor: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "--deep", "--model", "smollm2-135m", "--port", "1", "--report", str(deep_doctor)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    text = deep_doctor.read_text()
    report = json.loads(text)
    assert report["ok"] is True
    assert [check["name"] for check in report["checks"]] == [
        "warm = cold",
        "three cuts",
        "batch of two",
        "schema",
        "drafts",
        "memory",
    ]
    assert {check["state"] for check in report["checks"]} <= {"ok", "note"}
    assert report["cuts"]["step"] >= 64
    assert report["plan"]["weights_bytes"] > 0
    assert report["checks"][-1]["numbers"]["peak_bytes"] > 0
    assert {"pooled-mlx", "python", "mlx", "mlx-lm"} <= set(report["versions"])
    assert report["model"]["local_folder"] is True
    for private in (str(folder), str(Path.home()) + "/", "jane", *checks._WORDS):
        assert private not in text, private
    assert f"report: {deep_doctor}" in shown


def test_doctor_deep_fails_with_what_it_found(deep_doctor: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    async def wrong(self: Checker, seed: int) -> Outcome:
        raise RuntimeError(f"cannot read {Path.home()}/models/x")

    monkeypatch.setattr(Checker, "schema", wrong)
    code = main(["doctor", "--deep", "--json", "--model", "smollm2-135m", "--port", "1", "--report", str(deep_doctor)])
    assert code == 1
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(deep_doctor.read_text())
    assert report["ok"] is False
    assert report["checks"][3]["state"] == "failed"
    assert report["checks"][3]["text"] == "the check failed: RuntimeError: cannot read ~/models/x"
