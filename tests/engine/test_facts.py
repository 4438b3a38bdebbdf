"""What `/health` says of requests that wait and run."""

from __future__ import annotations

from dataclasses import replace

from pooled_mlx.engine.report import Facts
from tests.engine.harness import make_row


def test_waiting_requests_know_how_many_are_ahead_and_all_know_their_api() -> None:
    facts = Facts()
    rows = [make_row([1, 2, 3]) for _ in range(4)]
    for row in rows:
        row.prepared = replace(row.prepared, request=replace(row.prepared.request, api="messages", client="claude"))
        facts.submitted(row)
    rows[0].times.started = rows[2].times.started = 1.0
    shown = facts.requests()
    assert [fact["state"] for fact in shown] == ["prefill", "queued", "prefill", "queued"]
    assert [fact.get("ahead") for fact in shown] == [None, 0, None, 1]
    assert {(fact["client"], fact["api"]) for fact in shown} == {("claude", "messages")}
    assert facts.counts() == (2, 2)
    facts.ended(rows[1], None)
    assert facts.recent()[-1]["api"] == "messages"
    assert [fact.get("ahead") for fact in facts.requests()] == [None, None, 0]
