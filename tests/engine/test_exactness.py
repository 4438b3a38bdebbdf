"""A hit is exact: what is reused equals what a cold run computes, bit for bit where the reused tokens were prefilled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel
from tests.engine.harness import first_logits, make_loop, make_row, run
from tests.tiny_models import ARCHITECTURES, tokens

STEP, SPACING, MINIMUM = 32, 96, 16
_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


@dataclass
class Result:
    row: Row
    logits: np.ndarray


def ask(loop: Loop, ids: np.ndarray, boundaries: tuple[int, ...], most: int = 6) -> Result:
    """Run one request and keep the logits after its prompt."""
    row = make_row(ids, most, boundaries)
    kept = first_logits(loop, row)
    run(loop, row)
    return Result(row, kept[0])


def new_loop(model: LoadedModel, shrinks: tuple[tuple[int, int], ...] = ()) -> Loop:
    return make_loop(model, step=STEP, spacing=SPACING, minimum=MINIMUM, shrinks=shrinks)


def conversation(length: int, seed: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """A first prompt of `length` tokens with turns of uneven size."""
    ids = tokens(length, seed=seed)
    return ids, tuple(position for position in (21, 50, 57, 130, 200) if position < length - 3)


LENGTHS = sorted({border + offset for border in (STEP, SPACING, 2 * SPACING) for offset in range(-2, 17)})


def test_warm_equals_cold_at_every_length_around_the_borders(model: LoadedModel) -> None:
    """The second turn goes on from what the first one's prefill left, whatever its length was."""
    reused = 0
    for length in LENGTHS:
        first, marks = conversation(length, seed=length)
        head = length - 2
        longer = np.concatenate([first[:head], tokens(45, seed=1000 + length)])
        more = (*marks, head, len(longer) - 2)
        loop = new_loop(model)
        ask(loop, first, (*marks, head), most=1)
        warm = ask(loop, longer, more)
        cold = ask(new_loop(model), longer, more)
        reused += warm.row.cached_tokens
        assert warm.row.cached_tokens >= max((m for m in marks if m < length), default=0) - MINIMUM
        assert np.array_equal(warm.logits, cold.logits), f"length {length}, resumed at {warm.row.cached_tokens}"
        assert warm.row.out == cold.row.out
    assert reused > 50 * len(LENGTHS)


def test_warm_equals_cold_where_the_pieces_shrink(model: LoadedModel) -> None:
    """The step goes from 32 to 16 and 8 on the way; both turns of a conversation end around both places."""
    shrinks = ((60, 16), (150, 8))
    reused = 0
    for length in (*range(57, 80, 3), *range(146, 182, 5)):
        first, marks = conversation(length, seed=length)
        longer = np.concatenate([first[: length - 2], tokens(110, seed=1000 + length)])
        more = (*marks, length - 2, len(longer) - 2)
        loop = new_loop(model, shrinks)
        ask(loop, first, (*marks, length - 2), most=1)
        warm = ask(loop, longer, more)
        again = ask(loop, longer[:-7], more)
        cold = ask(new_loop(model, shrinks), longer, more)
        short = ask(new_loop(model, shrinks), longer[:-7], more)
        reused += warm.row.cached_tokens
        assert np.array_equal(warm.logits, cold.logits), f"length {length}, resumed at {warm.row.cached_tokens}"
        assert np.array_equal(again.logits, short.logits), f"length {length}, resumed at {again.row.cached_tokens}"
        assert warm.row.out == cold.row.out
    assert reused > 50 * 16


def test_a_wrong_prefix_would_show(model: LoadedModel) -> None:
    """The guard of the other tests here: one other token anywhere in the prefix moves the logits by more than 1e-2."""
    ids, marks = conversation(180, seed=5)
    right = ask(new_loop(model), ids, marks).logits
    for place in (0, 60, 120, 170):
        wrong = ids.copy()
        wrong[place] = (int(wrong[place]) + 7) % 512
        moved = float(np.abs(ask(new_loop(model), wrong, marks).logits - right).max())
        assert moved > 1e-2, f"token {place} moves the logits by {moved} only"


def test_edits_branches_and_repeats_are_exact(model: LoadedModel) -> None:
    loop = new_loop(model)
    base, marks = conversation(230, seed=9)
    ask(loop, base, marks)
    variants = []
    for place in (10, 55, 140, 205, 229):
        changed = base.copy()
        changed[place] = (int(changed[place]) + 1) % 512
        variants.append(changed)
    for ids in [*variants, base, np.concatenate([base[:200], tokens(70, seed=2)]), *variants]:
        warm = ask(loop, ids, marks)
        cold = ask(new_loop(model), ids, marks)
        assert np.array_equal(warm.logits, cold.logits)
        assert warm.row.out == cold.row.out
    assert loop.pool.counters["hits"] >= 8


def test_an_adopted_answer_is_near_exact(model: LoadedModel) -> None:
    """The states of a decoded answer differ from a prefill of the same ids by rounding only."""
    loop = new_loop(model)
    first, marks = conversation(150, seed=3)
    head = 146
    answer = ask(loop, first, (*marks, head), most=25).row.out
    longer = np.concatenate([first, np.array(answer, np.uint32), tokens(40, seed=4)])
    more = (*marks, head, 175, len(longer) - 3)
    warm = ask(loop, longer, more, most=20)
    cold = ask(new_loop(model), longer, more, most=20)
    assert warm.row.cached_tokens == 175
    assert warm.row.prefilled_tokens == 40
    assert float(np.abs(warm.logits - cold.logits).max()) < 1e-4
    assert warm.row.out == cold.row.out


def test_batched_answers_are_adopted_near_exactly(model: LoadedModel) -> None:
    loop = new_loop(model)
    prompts = [tokens(length, seed=length) for length in (60, 75, 90)]
    rows = [make_row(ids, 20, (20, len(ids) - 3)) for ids in prompts]
    run(loop, *rows)
    for ids, row in zip(prompts, rows, strict=True):
        longer = np.concatenate([ids, np.array(row.out, np.uint32), tokens(30, seed=7)])
        more = (20, len(ids) - 3, len(ids) + 20, len(longer) - 2)
        warm = ask(loop, longer, more)
        cold = ask(new_loop(model), longer, more)
        assert warm.row.cached_tokens == len(ids) + 20
        assert float(np.abs(warm.logits - cold.logits).max()) < 5e-4
        assert warm.row.out == cold.row.out


def test_parallel_conversations_do_not_mix(model: LoadedModel) -> None:
    """A and B share a preamble; every answer of A is A's own, whatever was asked in between."""
    loop = new_loop(model)
    preamble = tokens(140, seed=31)
    a, b = (np.concatenate([preamble, tokens(20, seed=seed)]) for seed in (32, 33))
    marks = (60, 140, 155)
    alone = {name: ask(new_loop(model), ids, marks) for name, ids in (("a", a), ("b", b))}
    assert float(np.abs(alone["a"].logits - alone["b"].logits).max()) > 1e-2
    for name in "aabaabba":
        result = ask(loop, a if name == "a" else b, marks)
        assert np.array_equal(result.logits, alone[name].logits)
        assert result.row.out == alone[name].row.out


def test_the_shared_part_is_stored_once(model: LoadedModel) -> None:
    loop = new_loop(model)
    preamble = tokens(192, seed=41)
    marks = (96, 192)
    ask(loop, np.concatenate([preamble, tokens(30, seed=1)]), marks, most=2)
    one = loop.pool.segment_bytes
    for seed in (2, 3, 4):
        ask(loop, np.concatenate([preamble, tokens(30, seed=seed)]), marks, most=2)
    shared = sum(segment.bytes for segment in loop.pool.segments() if segment.end <= 192)
    tails = sum(segment.bytes for segment in loop.pool.segments() if segment.end > 192)
    assert shared + tails == loop.pool.segment_bytes
    assert loop.pool.segment_bytes <= one + 3 * (tails / 4) * 1.01
