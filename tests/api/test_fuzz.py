"""Broken requests over HTTP, a short run of what `make fuzz` does; and that the fuzzer sees what it looks for."""

from __future__ import annotations

from random import Random

import pytest

from pooled_mlx.core.events import CallArguments, CallEnd, CallStart, Finished, Text, Usage
from pooled_mlx.core.ports import Prepared
from tests.fakes import FakeEngine, FakeGeneration
from tests.fuzz.cases import CHAT, MESSAGES, RESPONSES, make_case, whole_bodies
from tests.fuzz.checks import Wrong, check
from tests.fuzz.mutations import any_json, encode, garble, mutate
from tests.fuzz.run import AnsweringEngine, fuzz

REFUSED = {"content-type": "application/json", "x-should-retry": "false"}
ANSWERED = {"content-type": "application/json", "x-request-id": "r"}
STREAMED = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": "r"}
ERROR = '{"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": null}}'


async def test_broken_requests_get_an_answer_or_the_error_of_their_api():
    report = await fuzz(AnsweringEngine(), range(250))
    assert report.faults == []
    kinds = {name.rpartition(" ")[2] for name in report.statuses}
    assert kinds == {"200", "400", "stream", "left"}
    assert report.statuses.total() == 251


class BrokenEngine(FakeEngine):
    """Prepares everything, and answers calls that are no JSON, or nothing whole at all."""

    def submit(self, prepared: Prepared) -> FakeGeneration:
        if len(self.generations) % 2:
            self.script(Text("a"), RuntimeError("the engine broke"))
        else:
            usage = Usage(prepared.prompt_tokens, 1)
            self.script(CallStart(0, "c", "x"), CallArguments(0, "{"), CallEnd(0), Finished("tool_calls", usage))
        return super().submit(prepared)


async def test_a_broken_engine_is_found_out():
    report = await fuzz(BrokenEngine(), range(40))
    assert any("status 500" in line for line in report.faults)
    assert any("arguments" in line or "input of block" in line for line in report.faults)
    assert any("the engine broke" in line for line in report.faults if line.startswith("logged by"))
    assert all(case.number < 40 for case in report.broken)


async def test_a_server_that_never_answers_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.fuzz.run.ANSWER_SECONDS", 0.2)
    engine = FakeEngine()
    engine.hold()
    report = await fuzz(engine, [number for number in range(200) if _is_whole(number)][:2])
    assert [line for line in report.faults if "no answer within" in line]


def _is_whole(number: int) -> bool:
    case = make_case(0, number, whole_bodies())
    return case.kind == "whole" and case.endpoint == case.api and case.leaves_after is None


@pytest.mark.parametrize(
    ("api", "status", "headers", "text", "why"),
    [
        (CHAT, 500, REFUSED, ERROR, "status 500"),
        (CHAT, 422, REFUSED, ERROR, "status 422"),
        (CHAT, 400, {"content-type": "text/html"}, "<h1>", "content-type"),
        (CHAT, 400, {"content-type": "application/json"}, ERROR, "x-should-retry"),
        (CHAT, 400, REFUSED, '{"error": {"message": "no"}}', "not OpenAI's shape"),
        (CHAT, 400, REFUSED, '{"detail": "no"}', "KeyError"),
        (MESSAGES, 400, REFUSED, ERROR, "not Anthropic's shape"),
        (CHAT, 200, ANSWERED, "{", "JSONDecodeError"),
        (RESPONSES, 200, ANSWERED, "{}", "missing are"),
        (MESSAGES, 200, ANSWERED, "{}", "ValidationError"),
        (CHAT, 200, STREAMED, 'data: {"error": {"message": "no"}}\n\n', "the end is"),
        (CHAT, 200, STREAMED, "data: [DONE]\n\n", "ids differ"),
        (RESPONSES, 200, STREAMED, 'event: response.failed\ndata: {"type": "response.failed", "sequence_number": 0}\n\n', ""),
        (MESSAGES, 200, STREAMED, 'event: ping\ndata: {"type": "ping"}\n\n', "IndexError"),
        (MESSAGES, 200, STREAMED, "data: x\n", ""),
    ],
)
def test_wrong_answers_are_seen(api: str, status: int, headers: dict[str, str], text: str, why: str):
    with pytest.raises(Wrong) as caught:
        check(api, api, status, headers, text)
    assert why in str(caught.value)


def test_a_case_can_be_made_again():
    bodies = whole_bodies()
    before = encode(bodies[CHAT])
    cases = [make_case(3, number, bodies, 24) for number in range(60)]
    assert cases == [make_case(3, number, bodies, 24) for number in range(60)]
    assert len({case.raw for case in cases}) == 60
    assert encode(bodies[CHAT]) == before


def test_every_change_changes_something_somewhere():
    body = {"a": [1, "x", {"schema": {"properties": {"b": {"type": "string"}}}}], "c": None}
    changed = {encode(mutate(Random(seed), body, changes=1)) for seed in range(300)}
    assert len(changed) > 150
    assert encode(body) == encode({"a": [1, "x", {"schema": {"properties": {"b": {"type": "string"}}}}], "c": None})
    assert len({garble(Random(seed), b'{"a": 1}') for seed in range(100)}) > 30
    assert len({encode(any_json(Random(seed))) for seed in range(100)}) > 50
