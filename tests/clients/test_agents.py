"""Real coding agents against a live server with scripted answers, where they are installed.

`make agents` installs them into build/agents and runs them against the real engine loop; here the answers come from a fake
engine, so that an installed agent is checked with every run of the suite. POOLED_AGENTS names another folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from pooled_mlx.connect import AGENTS as PROFILES
from pooled_mlx.connect import Target
from pooled_mlx.core.events import Event
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request
from pooled_mlx.replay.script import ReplayScript, parse_script
from tests.clients.apis import calls, pieces, says, three_apis
from tests.fakes import FakeEngine, FakeGeneration

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/agents"))

import agent_checks  # noqa: E402
import run_agents  # noqa: E402

FOLDER = Path(os.environ.get("POOLED_AGENTS") or ROOT / "build/agents")
_CALL = re.compile(
    r"<tool_call>\n<function=(\w+)>\n<parameter=(\w+)>\n(.*)\n</parameter>\n</function>\n</tool_call>", re.DOTALL
)


class ScriptedEngine(FakeEngine):
    """Answers from the agents' script, as the replay of the real engine does."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = ReplayScript(parse_script(agent_checks.answers_text()))
        self._calls = 0

    def submit(self, prepared: Prepared) -> FakeGeneration:
        self.script(*self._answer(prepared.request))
        return super().submit(prepared)

    def _answer(self, request: Request) -> list[Event]:
        thought, _, text = self._lines.choose(request).text.rpartition("</think>\n\n")
        found = _CALL.search(text)
        if found is None or found[1] not in {tool.name for tool in request.tools}:
            return says(text, thinking=thought)
        value = json.loads(found[3]) if found[3].startswith("[") else found[3]
        self._calls += 1
        events = calls((found[1], json.dumps({found[2]: value})), thinking=thought, first=self._calls)
        return [*events[: bool(thought)], *pieces(text[: found.start()]), *events[bool(thought) :]]


def test_every_agent_has_a_profile_and_answers_that_are_found() -> None:
    script = parse_script(agent_checks.answers_text())
    for agent in agent_checks.AGENTS:
        assert agent.profile in PROFILES
        assert PROFILES[agent.profile](Target("http://127.0.0.1:1", "m", 8192)).launch is not None
        matching = [line for line in script if line.match is not None and line.match in agent.prompt]
        assert len(matching) == 1
        assert [line for line in script if line.match is not None and line.match in agent.word]
        assert agent.arguments(agent.prompt)


def test_results_are_a_table() -> None:
    agent = agent_checks.AGENTS[0]
    outcomes = [
        run_agents.Outcome(agent, "1.2.3", 4.56, None),
        run_agents.Outcome(agent, "", 0.0, "not | installed", installed=False),
    ]
    lines = run_agents.table(outcomes).splitlines()
    assert lines[2] == "| pi | 1.2.3 | Chat | passed | 4.6 |"
    assert lines[3].count("|") == 6


@pytest.mark.parametrize("agent", agent_checks.AGENTS, ids=lambda agent: agent.name)
async def test_the_agent_does_its_work(agent: agent_checks.Agent) -> None:
    if shutil.which(agent.program, path=run_agents.search_path(FOLDER)) is None:
        pytest.skip(f"{agent.program} is not installed here (`make agents` installs it)")
    async with three_apis(ScriptedEngine()) as live:
        model = live.engine.model
        target = Target(live.url, model.public_id, model.context_tokens)
        outcome = await asyncio.to_thread(run_agents.check, agent, target, FOLDER)
    assert outcome.problem is None
    last = live.engine.requests[-1]
    if agent.name != "aider":
        assert last.turns[-1].role == "tool"
        assert agent.word in last.turns[-1].text
        assert live.engine.requests[-2].turns[0] == last.turns[0]
