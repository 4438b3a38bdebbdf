"""Drafts change no answer: whatever is read ahead, only what equals the draw at its place is said, kept and stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pooled_mlx.core.events import Failed, Finished, Text
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.drafts import Draft, Index, PassCosts
from pooled_mlx.engine.loop import Loop
from pooled_mlx.engine.row import Row, Stage
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import build
from pooled_mlx.replay.faults import ScriptHook
from pooled_mlx.runner.model import LoadedModel
from tests.engine.harness import PlainAnswer, assert_idle, drive, make_loop, make_row, run, solo_greedy
from tests.engine.test_schedules import BYTES
from tests.tiny_models import ARCHITECTURES, llama, tokens

_models: dict[str, LoadedModel] = {}
TEXT = [int(token) for token in tokens(240, seed=3)]


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param]()
    return _models[request.param]


def copy(changed_every: int = 0) -> list[int]:
    """What is said: most of the prompt again, with another token here and there."""
    said = TEXT[40:200]
    return [(token + 1) % 512 if changed_every and place % changed_every == 7 else token for place, token in enumerate(said)]


def saying(script: Sequence[int], most: int, **more: object) -> Row:
    return make_row(TEXT, most, (120,), hook=ScriptHook([*script, 0]), **more)


def drafted(loop: Loop) -> tuple[int, int]:
    return loop.counters.drafted, loop.counters.accepted


@pytest.mark.parametrize("changed_every", [0, 40, 11])
def test_a_copy_is_said_token_for_token_in_fewer_passes(model: LoadedModel, changed_every: int) -> None:
    script = copy(changed_every)
    loop = make_loop(model)
    row = saying(script, len(script))
    run(loop, row)
    assert row.out == script
    texts = [event.text for event in row.channel.events if isinstance(event, Text)]  # type: ignore[attr-defined]
    assert texts == [f"{token} " for token in script], "each token is told by itself"
    read, right = drafted(loop)
    assert 0 < right <= read
    assert loop.counters.steps < len(script) * (0.3 if changed_every in (0, 40) else 0.8)
    assert loop.counters.steps >= len(script) - right - 2
    assert row.usage().accepted_tokens == right
    assert_idle(loop)


def test_without_drafts_every_token_is_a_pass(model: LoadedModel) -> None:
    loop = make_loop(model, drafts=False)
    row = saying(copy(), 100)
    run(loop, row)
    assert loop.counters.steps == 100
    assert drafted(loop) == (0, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_s_own_answer_is_the_same(model: LoadedModel, temperature: float) -> None:
    """A prompt that repeats itself makes drafts likely; the seed draws the same noise at every place."""
    answers: list[list[int]] = []
    for drafts in (False, True):
        loop = make_loop(model, drafts=drafts)
        sampling = SamplingParameters(temperature=temperature, top_k=3, seed=11)
        rows = [make_row(TEXT[:30] * 4 + [seed], 120, sampling=sampling) for seed in range(3)]
        for row in rows:
            run(loop, row)
        answers.append([token for row in rows for token in row.out])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("most", [30, 31, 47, 64])
def test_an_answer_that_ends_inside_a_draft_is_stored_whole(model: LoadedModel, most: int) -> None:
    """By its length, by an end token, by a stop string: the next turn computes what is new, and says what it says cold."""
    script = copy()
    for ending in ("length", "end", "stop"):
        loop = make_loop(model)
        answer = Stops(script[most - 1]) if ending == "stop" else None
        eos = (script[most - 1],) if ending == "end" else ()
        first = saying(script, most if ending == "length" else 160, eos=eos, answer=answer)
        run(loop, first)
        end = script.index(script[most - 1]) + 1 if ending != "length" else most
        assert first.out == script[:end]
        assert drafted(loop)[1] > 0
        assert loop.pool.lookup([*TEXT, *first.out, 1]).tokens == len(TEXT) + end
        assert loop.pool.lookup([*TEXT, *script[: end + 9], 1]).tokens == len(TEXT) + end, "and nothing more"
        following = make_row([*TEXT, *first.out, *TEXT[:20]], 5)
        run(loop, following)
        assert following.cached_tokens == len(TEXT) + end
        assert following.out == solo_greedy(model, following.prompt.ids, 5)
        assert_idle(loop)


class Stops(PlainAnswer):
    """Ends the answer at a token, as a stop string does."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.stop: str | None = None

    def feed(self, token: int) -> list[Text]:  # type: ignore[override]
        if token == self._token:
            self.stop = "stop"
        return [Text(f"{token} ")]


def test_rows_that_part_and_meet_in_the_middle_of_drafts(model: LoadedModel) -> None:
    """Another request joins, a reader stalls, a client leaves: nobody says anything else."""
    script = copy(23)
    loop = make_loop(model)
    stalls, goes, joins = saying(script, 150), saying(script, 150), make_row(TEXT[:90], 12)
    loop.submit(stalls)
    while len(stalls.out) < 40:
        loop.turn()
    stalls.channel.backlog = 10_000  # type: ignore[misc]
    while stalls.stage is not Stage.PARKED:
        loop.turn()
    loop.submit(goes)
    while len(goes.out) < 60:
        loop.turn()
    loop.submit(joins)
    stalls.channel.backlog = 0  # type: ignore[misc]
    while len(joins.out) < 4:
        loop.turn()
    goes.channel.cancelled = True  # type: ignore[misc]
    drive(loop, {})
    assert stalls.out == script[:150]
    assert goes.out == script[: len(goes.out)]
    assert joins.out == solo_greedy(model, joins.prompt.ids, 12)
    assert drafted(loop)[1] > 0
    assert loop.pool.lookup([*TEXT, *goes.out, 1]).tokens == len(TEXT) + len(goes.out)
    assert_idle(loop)


@pytest.mark.parametrize("command", ["step", "choose", "take", "keep"])
def test_a_draft_that_fails_costs_nobody_the_answer(model: LoadedModel, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = copy(31)
    loop = make_loop(model)
    row = saying(script, 120)
    loop.submit(row)
    while drafted(loop)[1] < 10:
        loop.turn()
    real, due = getattr(loop.runner, command), [1]

    def fails(*args: object, **fields: object) -> object:
        if due and (command in ("take", "keep") or fields.get("places", 2) != 1):
            due.pop()
            raise RuntimeError("injected")
        return real(*args, **fields)

    monkeypatch.setattr(loop.runner, command, fails)
    drive(loop, {})
    assert not due
    assert row.out == script[:120]
    assert isinstance(row.channel.end, Finished)  # type: ignore[attr-defined]
    assert_idle(loop)


def test_a_grammar_holds_every_place_of_a_draft() -> None:
    """A script that follows its grammar, with forced stretches, and drafts from prompts that do not."""
    model = llama(vocab=258)
    lark = LarkBuilder(BYTES.added)
    compiled = build(BYTES, lark.build(f"{lark.text('rows: ')} /([a-z]+=[0-9]+, ){{4}}/ {lark.text('that is all')}"))
    text = b"rows: alpha=10, beta=20, alpha=10, beta=20, that is all"
    for prompt in (text, text.replace(b"=", b": "), b"alpha=10, beta=20, gamma=30, " * 3):
        outs: list[tuple[list[int], str | None]] = []
        for drafts in (False, True):
            loop = make_loop(model, drafts=drafts)
            row = make_row(list(prompt), 200, hook=ScriptHook([*text, 256]), eos=(256,), constraint=compiled.matcher())
            run(loop, row)
            outs.append((row.out, row.finish))
        assert outs[0] == outs[1] == ([*text, 256], "stop")
        assert drafted(loop)[1] > 0


class FailsAt(ScriptHook):
    """A hook that raises when it is asked what to prefer at a position."""

    def __init__(self, ids: Sequence[int], position: int) -> None:
        super().__init__(ids)
        self._position = position

    def shape(self, position: int, ahead: int) -> tuple[int | None, bool]:
        if position >= self._position:
            raise ValueError("no shape here")
        return super().shape(position, ahead)


@pytest.mark.parametrize("drafts", [True, False])
def test_what_goes_wrong_at_one_place_ends_that_row_there(model: LoadedModel, drafts: bool) -> None:
    script = copy()
    loop = make_loop(model, drafts=drafts)
    row = make_row(TEXT, 150, (120,), hook=FailsAt([*script, 0], 70))
    run(loop, row)
    end = row.channel.end  # type: ignore[attr-defined]
    assert isinstance(end, Failed)
    assert "no shape here" in end.error.message
    assert row.out == script[: len(row.out)]
    assert 68 <= len(row.out) <= 70
    assert (loop.counters.rebuilds, row.retried) == (0, False), "the engine is well"
    assert_idle(loop)


# --- what is drafted


def test_the_longest_earlier_run_is_found_and_of_equal_ones_the_newest() -> None:
    ids = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 7, 3, 4, 5, 70, 1, 2, 3]
    index = Index(np.asarray(ids, np.uint32))
    index.append(4)
    assert index[index.find() or 0] == 50, "1 2 3 4 is longer than 2 3 4"
    other = Index(np.asarray([2, 3, 4, 50, 8, 2, 3, 4, 60, 9, 2, 3], np.uint32))
    other.append(4)
    assert other[other.find() or 0] == 60
    nothing = Index(np.asarray([1, 2], np.uint32))
    nothing.append(3)
    assert nothing.find() is None
    said = Index(np.asarray([], np.uint32))
    for token in (5, 6, 7, 8, 5, 6, 7):
        said.append(token)
    assert said.find() == 3


def test_a_copy_goes_on_without_another_search_and_naps_after_misses() -> None:
    draft, costs = Draft(Index(np.asarray(TEXT, np.uint32))), PassCosts()
    for token in TEXT[50:53]:
        draft.told(token)
    assert draft.expects
    assert draft.propose(32, costs) == [], "one more token must come true first"
    draft.told(TEXT[53])
    proposed = draft.propose(32, costs)
    assert proposed == TEXT[54 : 54 + len(proposed)]
    draft.judged(len(proposed), len(proposed))
    for token in proposed:
        draft.told(token)
    assert len(draft.propose(32, costs)) == 2 * len(proposed)
    assert draft.propose(3, costs) == TEXT[54 + len(proposed) :][:3]
    draft.judged(8, 0)
    assert not draft.expects
    assert draft.propose(32, costs) == []
    for token in range(400, 432):
        draft.told(token)
    for token in TEXT[10:14]:
        draft.told(token)
    assert draft.propose(32, costs)


def test_drafts_are_as_long_as_passes_are_cheap() -> None:
    flat, steep = PassCosts(), PassCosts()
    for _ in range(30):
        for tokens_, cheap in ((1, 1.0), (2, 1.02), (4, 1.05), (8, 1.1), (16, 1.2), (32, 1.4)):
            flat.seen(tokens_, cheap)
            steep.seen(tokens_, float(tokens_))
    assert flat.best(0.99, 32) == 32
    assert flat.best(0.3, 32) <= 4
    assert steep.best(0.95, 32) == 0, "nothing is won, so nothing is drafted"
    assert steep.of(8) == pytest.approx(8.0)
    assert PassCosts().best(0.9, 32) > 0
