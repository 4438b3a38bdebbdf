"""The logits after a piece: the output layer is computed for its last token alone where that is known to be the same."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.runner.layers import arrays_in
from pooled_mlx.runner.model import mx, wrap_model
from tests.engine.harness import make_loop, make_row, run, solo_greedy
from tests.tiny_models import ARCHITECTURES, llama, tokens


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_of_the_target_models_has_its_output_layer_apart(name: str) -> None:
    model = ARCHITECTURES[name]()
    assert model.parts is not None
    ids = mx.array(tokens(40, seed=1))[None]
    whole, apart = model.make_cache(), model.make_cache()
    expected = model.forward(ids, whole)[:, -1]
    logits = model.last_logits(ids, apart)
    assert logits.shape == expected.shape == (1, model.vocab_size)
    assert float(mx.max(mx.abs(logits - expected)).item()) < 1e-5
    for mine, their in zip(arrays_in(apart), arrays_in(whole), strict=True):
        assert mx.array_equal(mine, their)


class Capped:
    """A module whose logits are more than its output layer."""

    def __init__(self, module: Any, *, layers: bool = True) -> None:
        self._module = module
        self.model = module.model if layers else object()
        self.layers = module.layers

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return 3 * mx.tanh(self._module(ids, cache=cache) / 3)

    def parameters(self) -> Any:
        return self._module.parameters()


@pytest.mark.parametrize("layers", [True, False], ids=["capped", "unknown names"])
def test_other_modules_are_asked_for_the_last_token_alone(layers: bool) -> None:
    plain = llama()
    model = wrap_model(Capped(plain.module, layers=layers), plain.config)
    assert model.parts is None
    widths: list[int] = []
    forward = Capped.__call__

    def watched(self: Capped, ids: mx.array, cache: Any = None) -> mx.array:
        widths.append(ids.shape[1])
        return forward(self, ids, cache)

    row = make_row(tokens(60, seed=2), 12)
    Capped.__call__ = watched  # type: ignore[method-assign]
    try:
        run(make_loop(model), row)
    finally:
        Capped.__call__ = forward  # type: ignore[method-assign]
    assert widths[:2] == [59, 1]
    assert row.out == solo_greedy(model, row.prompt.ids, 12)


def test_a_piece_is_read_in_one_pass_where_the_output_layer_is_apart() -> None:
    row = make_row(tokens(60, seed=2), 12)
    loop = make_loop(llama())
    run(loop, row)
    assert loop.counters.pieces == 1
