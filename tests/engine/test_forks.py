"""Forks are learned: where two conversations parted in their opening, a third one resumes less than a step before that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pooled_mlx.core.request import Role
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row
from pooled_mlx.runner.model import LoadedModel
from tests.engine.harness import drive, first_logits, make_loop, make_row, run
from tests.tiny_models import ARCHITECTURES, tokens

STEP, SPACING, MINIMUM = 32, 256, 16
_models: dict[str, LoadedModel] = {}


def loaded(name: str) -> LoadedModel:
    if name not in _models:
        _models[name] = ARCHITECTURES[name]()
    return _models[name]


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(request.param)


@pytest.fixture(params=["qwen3_5_moe", "gemma3"])
def indivisible(request: pytest.FixtureRequest) -> LoadedModel:
    """A model that resumes only where a state was kept."""
    return loaded(request.param)


class Session:
    """One conversation of an agent: a system prompt, then turns, each as ids of its own."""

    def __init__(self, system: np.ndarray, seed: int) -> None:
        self.ids, self.seed = system, seed
        self.system_end = len(system)
        self.roles: dict[int, Role] = {0: "system"}

    def ask(self, loop: Loop, length: int = 40, most: int = 3) -> Row:
        """The user's next turn of `length` tokens and the model's answer."""
        self.seed += 1
        self.roles[len(self.ids)] = "user"
        self.ids = np.concatenate([self.ids, tokens(length, seed=self.seed)])
        head = len(self.ids)
        prompt = np.concatenate([self.ids, tokens(3, seed=1)])
        marks = [start for start in self.roles if start] + [head]
        row = make_row(prompt, most, marks, system_end=self.system_end, roles=self.roles)
        run(loop, row)
        self.roles[head] = "assistant"
        self.ids = np.concatenate([prompt, np.array(row.out, np.uint32)])
        return row


def system_prompts(length: int, fork: int, count: int) -> list[np.ndarray]:
    """System prompts of one agent: the same up to token `fork`."""
    whole = tokens(length, seed=7)
    rest = [tokens(length - fork, seed=100 + number) for number in range(count)]
    for number, tail in enumerate(rest):
        tail[0] = 300 + number  # they part exactly there
    return [np.concatenate([whole[:fork], tail]) for tail in rest]


def new_loop(model: LoadedModel, **options: int) -> Loop:
    return make_loop(model, **{"step": STEP, "spacing": SPACING, "minimum": MINIMUM, **options})


def logits_of(loop: Loop, row: Row) -> np.ndarray:
    """Run `row` and return the logits after its prompt."""
    kept = first_logits(loop, row)
    run(loop, row)
    return kept[0]


def opening(ids: np.ndarray, marks: Sequence[int] = (), most: int = 3) -> Row:
    """A first request: one system prompt and one user turn."""
    return make_row(ids, most, [*marks, len(ids) - 3], roles={0: "system", len(ids) - 20: "user"})


def test_the_third_session_resumes_before_the_fork_also_after_twelve_turns(indivisible: LoadedModel) -> None:
    fork, step = 5100, 128
    loop = make_loop(indivisible, step=step, spacing=2048, minimum=64)
    reused: list[int] = []
    for number, system in enumerate(system_prompts(6000, fork, 5)):
        session = Session(system, seed=1000 * (number + 1))
        reused.append(session.ask(loop).cached_tokens)
        for _ in range(11):
            session.ask(loop, length=100)
    assert reused[0] == 0
    assert reused[1] == 4096, "the second session found the last state before the fork"
    assert all(fork - step < tokens <= fork for tokens in reused[2:]), reused


def test_what_a_learned_fork_gives_is_exact(model: LoadedModel) -> None:
    loop = new_loop(model)
    resumed = []
    for number, fork in enumerate((200, 200, 200, 75, 75, 75, 411, 411, 411)):
        ids = system_prompts(500, fork, 12)[number]
        warm_row, cold_row = opening(ids, (480,)), opening(ids, (480,))
        warm, cold = logits_of(loop, warm_row), logits_of(new_loop(model), cold_row)
        assert np.array_equal(warm, cold), f"fork at {fork}, resumed at {warm_row.cached_tokens}"
        assert warm_row.out == cold_row.out
        resumed.append((fork, warm_row.cached_tokens))
    for fork, reused in (resumed[2], resumed[5], resumed[8]):
        assert fork - STEP < reused <= fork, resumed


def test_a_shared_part_shorter_than_every_checkpoint_is_kept(indivisible: LoadedModel) -> None:
    loop = new_loop(indivisible)
    rows = [opening(ids) for ids in system_prompts(240, 100, 3)]
    for row in rows:
        run(loop, row)
    assert [row.cached_tokens for row in rows] == [0, 0, 96]


def test_a_checkpoint_right_before_a_fork_survives_thinning(indivisible: LoadedModel) -> None:
    """The last stop before the fork is a state that is stored already: it counts as learned as well."""
    loop = new_loop(indivisible)
    systems = system_prompts(900, 2 * SPACING + 10, 3)
    reused = []
    for number, system in enumerate(systems):
        session = Session(system, seed=1000 * (number + 1))
        reused.append(session.ask(loop).cached_tokens)
        for _ in range(12):
            session.ask(loop)
    assert reused == [0, 2 * SPACING, 2 * SPACING]


def test_a_conversation_that_goes_on_learns_nothing(indivisible: LoadedModel) -> None:
    """Neither going on, nor sending a turn again, nor editing one behind the opening leaves a fork."""
    loop = new_loop(indivisible)
    session = Session(tokens(400, seed=3), seed=50)
    for _ in range(3):
        session.ask(loop)
    branch = Session(session.ids, seed=70)
    branch.roles, branch.system_end = dict(session.roles), session.system_end
    session.ask(loop, length=200)
    branch.ask(loop, length=200)
    edited = Session(session.ids.copy(), seed=90)
    edited.roles, edited.system_end = dict(session.roles), session.system_end
    edited.ids[-60] = (int(edited.ids[-60]) + 1) % 512
    edited.ask(loop)
    assert [segment for segment in loop.pool.segments() if segment.boundary == "fork"] == []


def test_the_learned_state_is_one_more_state_and_no_other_cut_moves(indivisible: LoadedModel) -> None:
    first, second = new_loop(indivisible), new_loop(indivisible)
    one, other = system_prompts(500, 411, 2)
    run(first, opening(other, (480,)))
    run(second, opening(one, (480,)))
    run(second, opening(other, (480,)))
    alone = {segment.end for segment in first.pool.segments() if segment.has_state}
    with_fork = {
        segment.end
        for segment in second.pool.segments()
        if segment.has_state
        and np.array_equal(other[: segment.end], np.concatenate([s.ids for s in segment.path()])[: len(other)])
    }
    assert with_fork - alone == {411 // STEP * STEP}
    assert alone <= with_fork


def side(ids: np.ndarray) -> Row:
    """A one-off request without tools: an autocompletion."""
    return make_row(ids, 3, [len(ids) - 3], roles={0: "user"})


def test_a_cancelled_side_request_leaves_the_common_part_only(indivisible: LoadedModel) -> None:
    """Dozens of long prompts that begin alike, each given up after three pieces."""
    loop = new_loop(indivisible)
    prompts = system_prompts(600, 450, 20)
    for ids in prompts:
        row = side(ids)
        before = loop.counters.pieces
        drive(loop, {0: [row]}, until=lambda before=before: loop.counters.pieces - before == 3)
        row.channel.cancelled = True  # type: ignore[misc]
        drive(loop, {})
    # One of them was the first behind its end, and could not know that it had left the others.
    assert len([segment for segment in loop.pool.segments() if segment.end > 450]) <= 1
    assert len(loop.pool.leaves()) <= 2
    last = side(prompts[-1])
    run(loop, last)
    assert 450 - STEP < last.cached_tokens <= 450


def test_a_cancelled_side_request_that_shares_nothing_goes_on_later(indivisible: LoadedModel) -> None:
    loop = new_loop(indivisible)
    ids = tokens(600, seed=11)
    row = side(ids)
    drive(loop, {0: [row]}, until=lambda: loop.counters.pieces == 3)
    row.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    again = side(ids)
    run(loop, again)
    assert again.cached_tokens == 3 * STEP
