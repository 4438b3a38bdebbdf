"""Recorded answers of every format and the events they must give, whole and in any pieces."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.answers import READ, WRITE, Outcome, PieceTable, parts, says

RECORDED = Path(__file__).parent.parent / "golden" / "answers" / "answers.jsonl"
ANSWERS = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]


def facts(outcome: Outcome) -> dict[str, Any]:
    events = [{"event": type(event).__name__, **asdict(event)} for event in outcome.events]
    return {"events": events, "reason": outcome.reason, "notes": list(outcome.notes)}


@pytest.mark.parametrize("answer", ANSWERS, ids=[f"{answer['format']}: {answer['name']}" for answer in ANSWERS])
def test_recorded_answers(answer: dict[str, Any]) -> None:
    want = {key: answer[key] for key in ("events", "reason", "notes")}
    asked: dict[str, Any] = {"tags": answer["tags"], "thinking": answer["thinking"], "ends": answer["ends"]}
    asked["may_think"] = answer.get("may_think", False)
    assert facts(says(answer["says"], answer["format"], (READ, WRITE), **asked)) == want
    rnd = random.Random(answer["name"])
    for _ in range(20):
        pieces = PieceTable(answer["tags"])
        ids: list[int] = []
        for part in parts(answer["says"], answer["tags"]):
            data = part.encode()
            if part in answer["tags"]:
                ids.append(256 + answer["tags"].index(part))
                continue
            while data:
                size = rnd.randint(1, 40)
                ids.append(pieces.token(data[:size]))
                data = data[size:]
        assert facts(says(ids, answer["format"], (READ, WRITE), table=pieces.table, **asked)) == want
