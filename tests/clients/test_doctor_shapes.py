"""The agents' request shapes against a live server: what holds is said, and so is what does not."""

from __future__ import annotations

import asyncio

from pooled_mlx.connect.examine import Finding, check_agents
from pooled_mlx.connect.shapes import all_shapes
from pooled_mlx.core.errors import engine_failed
from pooled_mlx.core.events import Failed, Finished, Text, Usage
from pooled_mlx.core.ports import Prepared
from tests.clients.apis import three_apis
from tests.fakes import FakeEngine, FakeGeneration


class WarmEngine(FakeEngine):
    """Reuses what earlier requests had, whole turns at a time, as a pool of prompt caches does."""

    def __init__(self, cold: bool = False) -> None:
        super().__init__()
        self._cold = cold

    def submit(self, prepared: Prepared) -> FakeGeneration:
        request = prepared.request
        cached = 0
        for earlier in self.requests[:-1] if not self._cold else []:
            same = 0
            for ours, theirs in zip(request.turns, earlier.turns, strict=False):
                if ours != theirs or request.tools != earlier.tools:
                    break
                same += len(ours.text.split()) + 4
            cached = max(cached, same + 8 * len(request.tools) if same else 0)
        self.script(Text("Notes."), Finished("length", Usage(prepared.prompt_tokens, 2, cached_tokens=cached)))
        return super().submit(prepared)


async def findings(engine: FakeEngine, token: str | None = None) -> list[Finding]:
    async with three_apis(engine) as live:
        return await asyncio.to_thread(lambda: list(check_agents(live.url, token)))


async def test_a_warm_server_holds_for_every_agent() -> None:
    found = await findings(WarmEngine(), "any")
    assert {finding.agent for finding in found} == {shape.agent for shape in all_shapes()}
    assert [finding for finding in found if not finding.holds] == []
    assert len(found) == 3 * len(all_shapes())


async def test_a_cold_server_is_told() -> None:
    found = await findings(WarmEngine(cold=True))
    assert {finding.what for finding in found if not finding.holds} == {"stays warm"}


async def test_a_failing_engine_is_told() -> None:
    engine = FakeEngine()
    for _ in range(40):
        engine.script(Text("Half"), Failed(engine_failed("The model failed.")))
    found = await findings(engine)
    assert all(not finding.holds and finding.what == "answers" for finding in found)
    assert "ended early" in found[0].detail


async def test_a_refusal_is_shown() -> None:
    engine = FakeEngine()
    engine.submit_error = engine_failed("The engine is dead.")
    found = await findings(engine)
    assert all("500" in finding.detail and "The engine is dead." in finding.detail for finding in found)


def test_no_server() -> None:
    found = list(check_agents("http://127.0.0.1:9"))
    assert all(not finding.holds and "broke" in finding.detail for finding in found)
