"""The short check that `serve` makes once for a model and its versions, while nobody asks anything. It only reports."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pooled_mlx.cli.checks import CLIENT, SCHEMA_TOKENS, SHORT_TOKENS, Checker, Outcome, short
from pooled_mlx.core.errors import ApiError
from pooled_mlx.engine.engine import LocalEngine

_log = logging.getLogger("pooled.serve")

QUIET_SECONDS = 15.0
_MOST_RECORDS = 50
_ROWS = 3
"""What two answers and one more at their side take at most must be free in the pool."""


class CheckRecords:
    """Results by what they hold for, in one JSON file. A file that cannot be read or written costs a further check."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, key: str) -> dict[str, Any] | None:
        """The result that is known for `key`."""
        record = self._all().get(key)
        return record if isinstance(record, dict) and isinstance(record.get("state"), str) else None

    def write(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep a result, and of the others the newest."""
        others = [(name, known) for name, known in self._all().items() if name != key][1 - _MOST_RECORDS :]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps({**dict(others), key: record}, indent=1), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            _log.info("the result of the self-check could not be kept in %s: %s", self._path, error)

    def _all(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


class QuietCheck:
    """Waits until nothing was asked for a while, then checks; a request ends that at once, and it waits again.

    Everything here belongs to the event loop. `is_idle` says whether the server is ready and no request is under way; `key`
    what the result holds for (called in a worker thread). `facts` is what `/health` shows.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        records: CheckRecords,
        *,
        check: Callable[[Checker], Awaitable[Sequence[Outcome]]] = short,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._is_idle, self._records, self._check, self._sleep = is_idle, records, check, sleep
        self._arrivals = 0
        self._engine: LocalEngine | None = None
        self._running: asyncio.Task[Sequence[Outcome]] | None = None
        self.facts: dict[str, Any] = {"state": "waiting"}

    def request_came(self) -> None:
        """Somebody asks something: give everything back."""
        self._arrivals += 1
        if self._running is not None and self._engine is not None:
            self._running.cancel()
            self._engine.forget(CLIENT)

    async def run(self, engine: Callable[[], LocalEngine], key: Callable[[], str]) -> None:
        """Check once, unless the result is known. Returns when there is one; `engine` is asked when the server is idle."""
        while True:
            await self._until_quiet()
            name = await asyncio.to_thread(key)
            known = await asyncio.to_thread(self._records.read, name)
            if known is not None:
                self.facts = known
                return
            outcomes = await self._attempt(engine())
            if outcomes is not None:
                break
        self.facts = self._result(outcomes)
        await asyncio.to_thread(self._records.write, name, self.facts)

    async def _until_quiet(self) -> None:
        while True:
            before = self._arrivals
            await self._sleep(QUIET_SECONDS)
            if self._is_idle() and self._arrivals == before:
                return

    async def _attempt(self, engine: LocalEngine) -> Sequence[Outcome] | None:
        """The outcomes; None where a request came, or others would have had to make room."""
        if not self._is_idle() or not _has_room(engine):
            return None
        self._engine, self.facts = engine, {"state": "running"}
        self._running = asyncio.ensure_future(self._check(Checker(engine)))
        try:
            await asyncio.wait({self._running})
            # An engine that stops meanwhile fails every check, which says nothing of the model.
            stopped = self._running.cancelled() or not engine.health()["ready"]
            return None if stopped else self._running.result()
        finally:
            self._running.cancel()
            engine.forget(CLIENT)
            self._running, self.facts = None, {"state": "waiting"}

    def _result(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        failed = [outcome for outcome in outcomes if outcome.state == "failed"]
        seconds = sum(outcome.seconds for outcome in outcomes)
        if failed:
            what = "; ".join(f"{outcome.name}: {outcome.text}" for outcome in failed)
            _log.warning("self-check: %s. pooled-mlx doctor --deep tells more; please report what it writes", what)
        else:
            names = ", ".join(outcome.name for outcome in outcomes)
            _log.info("self-check: %s are as they should be (%.0f s; done once for this model and version)", names, seconds)
        return {
            "state": "failed" if failed else "ok",
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "checks": [asdict(outcome) for outcome in outcomes],
        }


def _has_room(engine: LocalEngine) -> bool:
    """True where the check makes nothing go that is stored for others, and the system is not short of memory."""
    try:
        pool, plan = engine.loop.pool, engine.plan
    except ApiError:
        return False
    needed = _ROWS * plan.fits(SHORT_TOKENS, SCHEMA_TOKENS).needed_bytes
    return pool.budget_bytes >= plan.pool_bytes and pool.used_bytes + needed <= pool.budget_bytes
