"""Broken requests to a room on a real tokenizer: prompts, templates and grammars are in the way too."""

from __future__ import annotations

from pathlib import Path

from pooled_mlx.store import Ready
from tests.fuzz.room import small_room
from tests.fuzz.run import fuzz


async def test_broken_requests_to_a_room(embedded: Ready, tmp_path: Path):
    with small_room(embedded, tmp_path) as room:
        report = await fuzz(room, range(80), most_tokens=12)
    assert report.faults == []
    assert report.statuses.total() == 81
