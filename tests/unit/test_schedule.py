"""Who gets the machine next, as tables; and the one place where a row's stage changes."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

import pooled_mlx
from pooled_mlx.engine.row import Stage
from pooled_mlx.engine.schedule import Plan, Share, View, padding, schedule
from tests.engine.harness import make_row

READING, PARKED = Stage.READING, Stage.PARKED
PACKAGE = Path(pooled_mlx.__file__).parent


@pytest.mark.parametrize(
    ("views", "due", "skipped", "plan"),
    [
        pytest.param([], True, 0, Plan(), id="nothing to do"),
        pytest.param([View(READING, 10)], True, 0, Plan(read=0), id="one prompt"),
        pytest.param([View(READING, 10)], False, 0, Plan(), id="the streams come first"),
        pytest.param([View(READING, 10)], False, 3, Plan(skipped=3), id="what was skipped is remembered"),
        pytest.param([View(READING, 90), View(READING, 10)], True, 0, Plan(read=1, skipped=1), id="the shortest first"),
        pytest.param([View(READING, 90), View(READING, 10)], True, 4, Plan(read=0), id="the oldest after four others"),
        pytest.param([View(READING, 10), View(READING, 10)], True, 2, Plan(read=0), id="of equal ones the oldest"),
        pytest.param([View(READING, 10, waits=True)], True, 0, Plan(), id="another prompt will have stored more of it"),
        pytest.param([View(READING, 10, begun=True, waits=True)], True, 0, Plan(read=0), id="what has begun does not wait"),
        pytest.param([View(READING, 9, waits=True), View(READING, 90)], True, 0, Plan(read=1), id="the one it waits for"),
        pytest.param([View(PARKED, backlog=5)], True, 0, Plan(resume=[0]), id="its reader has caught up"),
        pytest.param([View(PARKED, backlog=6)], True, 0, Plan(), id="its reader has not"),
        pytest.param([View(PARKED, backlog=6, idle_seconds=60.5)], True, 0, Plan(late=[0]), id="its reader is too late"),
        pytest.param([View(PARKED, backlog=6, idle_seconds=60.0)], True, 0, Plan(), id="just not too late"),
        pytest.param([View(PARKED, backlog=0, stalled=True, idle_seconds=99)], True, 0, Plan(), id="stalled on purpose"),
        pytest.param(
            [View(PARKED, backlog=9, idle_seconds=61), View(PARKED), View(READING, 50), View(READING, 40)],
            True,
            1,
            Plan(resume=[1], late=[0], read=3, skipped=2),
            id="all at once",
        ),
        pytest.param([View(PARKED), View(READING, 50)], False, 1, Plan(resume=[0], skipped=1), id="parked ones need no turn"),
    ],
)
def test_what_a_turn_does(views: list[View], due: bool, skipped: int, plan: Plan) -> None:
    assert schedule(views, piece_is_due=due, skipped=skipped, below=5, limit_seconds=60) == plan


@pytest.mark.parametrize("share", [0.2, 1 / 3, 0.5, 0.8])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_the_streams_get_their_part_of_the_time(share: float, batches: int) -> None:
    """Pieces of 4 s, steps of 0.1 s: what the steps get of the time, once many pieces were read."""
    shares = Share(share)
    pieces = steps = 0
    while pieces < 50:
        if shares.piece_is_due(batches):
            shares.piece_read(4.0)
            pieces += 1
        else:
            shares.step_taken(0.1)
            steps += 1
    part = steps * 0.1 / (steps * 0.1 + pieces * 4.0)
    wanted = min(share * batches, max(share, 0.5))
    assert wanted <= part + 0.02
    assert part <= wanted + 0.02


def test_every_batch_has_a_step_before_the_next_piece() -> None:
    shares = Share(0.1)
    shares.piece_read(0.001)
    for _ in range(3):
        assert not shares.piece_is_due(3)
        shares.step_taken(10.0)
    assert shares.piece_is_due(3)
    assert shares.piece_is_due(0)


@pytest.mark.parametrize(
    ("sizes", "row_bytes", "limit", "bytes_"),
    [
        ([100], 0, 1.0, (1000, 0)),
        ([100, 100], 0, 1.0, (2000, 0)),
        ([100, 50], 0, 1.33, None),
        ([100, 50], 0, 1.34, (2000, 500)),
        ([100, 50], 1000, 1.15, (4000, 500)),
        ([100, 1, 1], 0, 2.9, None),
    ],
)
def test_what_a_batch_pads(sizes: list[int], row_bytes: int, limit: float, bytes_: tuple[int, int] | None) -> None:
    assert padding(sizes, 10, row_bytes, limit) == bytes_


# --- a row's stage

ALLOWED = {
    (Stage.WAITING, Stage.READING),
    (Stage.WAITING, Stage.OVER),
    (Stage.READING, Stage.READING),
    (Stage.READING, Stage.WRITING),
    (Stage.READING, Stage.OVER),
    (Stage.WRITING, Stage.READING),
    (Stage.WRITING, Stage.PARKED),
    (Stage.WRITING, Stage.OVER),
    (Stage.PARKED, Stage.READING),
    (Stage.PARKED, Stage.WRITING),
    (Stage.PARKED, Stage.OVER),
}
WAYS = {
    Stage.WAITING: (),
    Stage.READING: (Stage.READING,),
    Stage.WRITING: (Stage.READING, Stage.WRITING),
    Stage.PARKED: (Stage.READING, Stage.WRITING, Stage.PARKED),
    Stage.OVER: (Stage.OVER,),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_row_goes_only_where_it_may(before: Stage, after: Stage) -> None:
    row = make_row(range(5))
    for stage in WAYS[before]:
        row.to(stage, 7.0)
    assert row.stage is before
    if (before, after) in ALLOWED:
        row.to(after, 9.0)
        assert row.stage is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
            row.to(after)
        assert row.stage is before


def test_what_a_row_forgets_when_it_is_read_again() -> None:
    row = make_row(range(5))
    row.to(Stage.READING, 3.0)
    row.cache, row.position, row.cached_tokens, row.prefilled_tokens, row.forced = 1, 5, 2, 3, [8]
    row.to(Stage.WRITING)
    row.out.append(8)
    row.to(Stage.READING, 4.0)
    assert (row.cache, row.position, row.forced, row.times.started) == (None, 0, [], 3.0)
    assert (row.cached_tokens, row.prefilled_tokens) == (2, 3), "its client was told"


def test_one_place_writes_the_stage_of_a_row() -> None:
    places = [
        (path.relative_to(PACKAGE).as_posix(), function.name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "stage" and isinstance(node.ctx, ast.Store)
    ]
    assert places == [("engine/row.py", "to")]
