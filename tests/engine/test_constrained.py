"""Rows under a grammar: masked, forced, batched with free rows; the real matcher on a vocabulary of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from pooled_mlx.core.events import Failed
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.row import Row
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import CompiledGrammar, Constraint, GrammarTokenizer, build
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.model import LoadedModel, mx
from pooled_mlx.runner.sampler import BatchSampler
from tests.engine.harness import PlainAnswer, drive, make_loop, make_row, run, solo_greedy
from tests.tiny_models import ARCHITECTURES, tokens

BYTES = GrammarTokenizer.of_bytes(("</think>",))
VOCAB, EOS, CLOSE = 258, 256, 257
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=["qwen3_5_moe", "llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = ARCHITECTURES[request.param](vocab=VOCAB)
    return _models[request.param]


@pytest.fixture(scope="module")
def grammar() -> CompiledGrammar:
    lark = LarkBuilder(BYTES.added)
    return build(BYTES, lark.build(lark.json(SCHEMA, "")))


def strict(model: LoadedModel, ids: np.ndarray, constraint: Constraint, rule: SamplingParameters, most: int) -> list[int]:
    """The reference: one token after the other, the whole mask at every step, forced tokens first."""
    sampler = BatchSampler([rule])
    caches = model.make_cache()
    logits = model.forward(mx.array(ids)[None], caches)[:, -1]
    out: list[int] = []
    forced: list[int] = []
    while len(out) < most:
        forced = forced or constraint.forced()
        if forced:
            token = forced.pop(0)
        elif constraint.stopped():
            token = EOS
        else:
            words = np.zeros(BYTES.mask_words, np.uint32)
            constraint.fill_mask(words)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            masked = mx.where(mx.array(allowed)[None], logits, -mx.inf)
            token = int(sampler.draw_masked(logits, [len(out)], masked).item())
        out.append(token)
        if token == EOS:
            break
        constraint.consume(token)
        logits = model.forward(mx.array([[token]]), caches)[:, -1]
    return out


def text_of(row: Row) -> str:
    return bytes(token for token in row.out if token < 256).decode()


RULES = [
    SamplingParameters(),
    SamplingParameters(temperature=0.8, top_k=40, seed=3),
    SamplingParameters(temperature=1.5, seed=9),
]


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "hot"])
def test_a_constrained_row_equals_strict_masking_alone_and_in_company(
    model: LoadedModel, grammar: CompiledGrammar, rule: SamplingParameters
) -> None:
    ids = tokens(90, vocab=VOCAB, seed=4)
    expected = strict(model, ids, grammar.matcher(), rule, 60)
    alone = make_row(ids, 60, sampling=rule, eos=(EOS,), constraint=grammar.matcher())
    run(make_loop(model), alone)
    assert alone.out == expected
    company = make_row(ids, 60, sampling=rule, eos=(EOS,), constraint=grammar.matcher())
    free = [make_row(tokens(length, vocab=VOCAB, seed=length), 40) for length in (60, 85)]
    drive(make_loop(model), {0: [free[0]], 2: [company], 6: [free[1]]})
    assert company.out == expected
    for row in free:
        assert row.out == solo_greedy(model, row.prompt.ids, 40)
    if expected[-1] == EOS:
        value = json.loads(text_of(alone))
        assert set(value) == {"name", "count"}
        assert 0 <= value["count"] <= 99
        assert alone.channel.end.reason == "stop"  # type: ignore[attr-defined]


def test_forced_runs_are_read_in_one_pass(model: LoadedModel) -> None:
    lark = LarkBuilder(BYTES.added)
    literal = "a long stretch that has no alternative"
    compiled = build(BYTES, lark.build(f"{lark.text(literal)} /[xy]/ {lark.text(literal)}"))
    row = make_row(tokens(20, vocab=VOCAB, seed=2), 200, eos=(EOS,), constraint=compiled.matcher())
    loop = make_loop(model)
    run(loop, row)
    assert text_of(row) in {literal + letter + literal for letter in "xy"}
    assert loop.counters.steps <= 6


def test_what_a_forced_row_leaves_behind_can_be_continued(model: LoadedModel, grammar: CompiledGrammar) -> None:
    loop = make_loop(model)
    ids = tokens(90, vocab=VOCAB, seed=4)
    row = make_row(ids, 30, (80,), eos=(EOS,), constraint=grammar.matcher())
    run(loop, row)
    longer = np.concatenate([ids, np.array(row.out, np.uint32), tokens(20, vocab=VOCAB, seed=5)])
    warm = make_row(longer, 10, (80, len(ids) + len(row.out)))
    run(loop, warm)
    assert warm.cached_tokens == len(ids) + len(row.out)
    assert warm.out == solo_greedy(model, longer, 10)


def test_a_limit_inside_a_forced_run_is_kept(model: LoadedModel) -> None:
    lark = LarkBuilder(BYTES.added)
    compiled = build(BYTES, lark.build(f"/[ab]/ {lark.text('0123456789')}"))
    row = make_row(tokens(20, vocab=VOCAB, seed=2), 5, eos=(EOS,), constraint=compiled.matcher())
    run(make_loop(model), row)
    assert text_of(row)[1:] == "0123"
    assert row.channel.end.reason == "length"  # type: ignore[attr-defined]


def test_a_broken_constraint_ends_only_its_row(model: LoadedModel, grammar: CompiledGrammar) -> None:
    from pooled_mlx.grammar.match import GrammarFailed

    class Broken(Constraint):
        def __init__(self, inner: Constraint) -> None:
            self._inner = inner
            self.count = 0

        def __getattr__(self, name: str) -> Callable:
            return getattr(self._inner, name)

        def consume(self, token: int) -> None:
            self._inner.consume(token)

        def forced(self) -> list[int]:
            return []

        def stopped(self) -> bool:
            return False

        def fill_mask(self, out: np.ndarray) -> None:
            self.count += 1
            if self.count == 5:
                raise GrammarFailed("injected")
            self._inner.fill_mask(out)

    sick = make_row(tokens(40, vocab=VOCAB, seed=7), 30, eos=(EOS,), constraint=Broken(grammar.matcher()))
    free = make_row(tokens(35, vocab=VOCAB, seed=8), 30)
    loop = make_loop(model)
    run(loop, sick, free)
    assert isinstance(sick.channel.end, Failed)  # type: ignore[attr-defined]
    assert free.out == solo_greedy(model, free.prompt.ids, 30)
    assert loop.counters.grammar_failures == 1


def test_an_engine_fault_does_not_disturb_a_constrained_answer(model: LoadedModel, grammar: CompiledGrammar) -> None:
    from tests.engine.test_loop import FailingModel

    ids = tokens(90, vocab=VOCAB, seed=4)
    expected = strict(model, ids, grammar.matcher(), SamplingParameters(), 40)
    for call in (2, 5, 8):
        row = make_row(ids, 40, eos=(EOS,), constraint=grammar.matcher())
        loop = make_loop(FailingModel(model, {call}))  # type: ignore[arg-type]
        run(loop, row)
        assert loop.counters.failures == 1
        assert row.out == expected


class Thought(PlainAnswer):
    """Thinks until the closing token."""

    def __init__(self) -> None:
        self.in_reasoning = True
        self.reasoning_tokens = 0

    def feed(self, token: int) -> list:
        if token == CLOSE:
            self.in_reasoning = False
        elif self.in_reasoning:
            self.reasoning_tokens += 1
        return super().feed(token)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thinking_budget_is_closed_by_the_models_own_token(model: LoadedModel, budget: int) -> None:
    row = make_row(
        tokens(30, vocab=VOCAB, seed=3), 20, answer=Thought(), close_thinking_id=CLOSE, thinking_budget=budget, eos=(EOS,)
    )
    other = make_row(tokens(33, vocab=VOCAB, seed=5), 20)
    run(make_loop(model), row, other)
    early = row.out.index(CLOSE)
    assert early <= budget
    assert row.answer.reasoning_tokens == early
    assert other.out == solo_greedy(model, other.prompt.ids, 20)


def test_the_end_token_is_not_taken_inside_a_thought(model: LoadedModel) -> None:
    class EndAtThree:
        """A script that ends the answer in the middle of the thought."""

        def __init__(self) -> None:
            self.place = 0

        def shape(self, position: int, ahead: int) -> tuple[int, bool]:
            return EOS if self.place + ahead == 3 else 5, False

        def take(self, token: int, position: int) -> None:
            self.place += 1

        def stalled(self, position: int) -> bool:
            return False

    row = make_row(
        tokens(30, vocab=VOCAB, seed=3), 12, answer=Thought(), close_thinking_id=CLOSE, eos=(EOS,), hook=EndAtThree()
    )
    run(make_loop(model), row)
    assert CLOSE in row.out[:4]
    assert EOS not in row.out[:4]
    assert len(row.out) > 4


def test_a_raised_fault_ends_its_row_with_an_error(model: LoadedModel) -> None:
    sick = make_row(tokens(30, vocab=VOCAB, seed=3), 20, fault=Faults("raise", 6))
    well = make_row(tokens(31, vocab=VOCAB, seed=4), 20)
    run(make_loop(model), sick, well)
    assert isinstance(sick.channel.end, Failed)  # type: ignore[attr-defined]
    assert len(sick.out) == 6
    assert well.out == solo_greedy(model, well.prompt.ids, 20)
