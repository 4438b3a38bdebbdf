"""Ids beyond the tokenizer's only pad the logits: no way of choosing a token may choose one of them."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.core.events import Failed, Finished
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.grammar.lark import LarkBuilder
from pooled_mlx.grammar.match import GrammarTokenizer, build
from pooled_mlx.replay.faults import Faults
from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine.harness import ModelProxy, PlainAnswer, drive, make_loop, make_row, run
from tests.tiny_models import llama, tokens

KNOWN, WIDTH = 258, 288  # as many mask words for both
EOS = 256
RULES = [
    SamplingParameters(),
    SamplingParameters(temperature=1.0, seed=3),
    SamplingParameters(temperature=2.0, top_k=64, top_p=0.9, min_p=0.01, seed=4),
]


class FondOfPadding(ModelProxy):
    """A model whose padding ids have by far the largest logits, or none that is a number."""

    def __init__(self, model: LoadedModel, value: float) -> None:
        super().__init__(model)
        self._value = value

    def forward(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model.forward(ids, cache)
        return mx.where(mx.arange(logits.shape[-1]) >= KNOWN, self._value, logits)


@pytest.fixture(params=[1e4, float("nan")], ids=["large", "nan"])
def model(request: pytest.FixtureRequest) -> Any:
    return FondOfPadding(llama(vocab=WIDTH), request.param)


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "truncated"])
def test_a_padding_id_is_never_drawn(model: Any, rule: SamplingParameters) -> None:
    alone = make_row(tokens(60, vocab=KNOWN, seed=1), 40, sampling=rule)
    run(make_loop(model, known_tokens=KNOWN), alone)
    company = make_row(tokens(60, vocab=KNOWN, seed=1), 40, sampling=rule)
    drive(make_loop(model, known_tokens=KNOWN), {0: [make_row(tokens(50, vocab=KNOWN, seed=2), 50)], 4: [company]})
    for row in (alone, company):
        assert isinstance(row.channel.end, Finished)  # type: ignore[attr-defined]
        assert len(row.out) == 40
        assert max(row.out) < KNOWN
    assert company.out == alone.out


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "truncated"])
def test_a_padding_id_is_never_drawn_under_a_grammar_or_in_a_thought(model: Any, rule: SamplingParameters) -> None:
    grammar_tokens = GrammarTokenizer.of_bytes(("</think>",))
    lark = LarkBuilder(grammar_tokens.added)
    held = build(grammar_tokens, lark.build("/[a-f]+/")).matcher()
    wide = build(grammar_tokens, lark.build("/[^x]{1,30}/")).matcher()
    thinking = PlainAnswer()
    thinking.in_reasoning = True
    rows = [
        make_row(tokens(60, vocab=KNOWN, seed=1), 30, sampling=rule, eos=(EOS,), constraint=held),
        make_row(tokens(60, vocab=KNOWN, seed=2), 30, sampling=rule, eos=(EOS,), constraint=wide),
        make_row(tokens(60, vocab=KNOWN, seed=3), 30, sampling=rule, eos=(EOS,), answer=thinking, close_thinking_id=257),
    ]
    run(make_loop(model, known_tokens=KNOWN), *rows)
    for row in rows:
        assert isinstance(row.channel.end, Finished)  # type: ignore[attr-defined]
        assert max(row.out) < KNOWN
    assert set(rows[0].out) <= {*b"abcdef", EOS}


def test_a_known_id_that_is_not_a_number_still_ends_the_row(model: Any) -> None:
    row = make_row(tokens(60, vocab=KNOWN, seed=1), 30, fault=Faults("nan", at_token=5))
    run(make_loop(model, known_tokens=KNOWN), row)
    assert isinstance(row.channel.end, Failed)  # type: ignore[attr-defined]
    assert len(row.out) == 5
