"""Cold prefill of a long history with many turns against mlx-lm's own prefill of the same ids, interleaved."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.models import small_card, small_folder
from benchmarks.servers import quartiles, words
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.engine.calibrate import measure_step, spacing_for
from pooled_mlx.engine.cuts import CutRule, checkpoints, pieces
from pooled_mlx.engine.mlx_backend import LoadedModel, load, mx
from pooled_mlx.engine.prefill import _with_short_tail
from pooled_mlx.engine.prompt import Prompt, PromptBuilder
from pooled_mlx.engine.segments import reserve
from pooled_mlx.engine.templates import ChatTemplate
from pooled_mlx.engine.tokens import Tokens

PAIRS = 3


def history() -> Prompt:
    """60 messages, about 6,000 tokens."""
    folder = small_folder()
    tokens = Tokens.load(folder)
    builder = PromptBuilder(tokens, ChatTemplate.load(folder, tokens.named), small_card())
    turns = [Turn("user" if index % 2 == 0 else "assistant", words(95, index)) for index in range(59)]
    return builder.build(Request(id="history", turns=(Turn("system", words(95, 99)), *turns)))


def ours(model: LoadedModel, prompt: Prompt, rule: CutRule) -> float:
    """Seconds of our pieces, as the loop runs them."""
    began = time.perf_counter()
    caches = model.make_cache()
    marks = checkpoints(prompt.boundaries, len(prompt.ids), rule)
    plan = _with_short_tail(pieces(0, marks, len(prompt.ids), rule))
    for index, piece in enumerate(plan):
        output = model.forward(mx.array(prompt.ids[piece.start : piece.end])[None], caches)
        states = [cache.state for cache in caches]
        mx.eval(states) if index + 1 < len(plan) else mx.eval(output[:, -1], states)
        if index == 0:
            reserve(caches, len(prompt.ids))
    return time.perf_counter() - began


def theirs(model: LoadedModel, ids: np.ndarray) -> float:
    """Seconds of mlx-lm's prefill to the first token."""
    from mlx_lm.generate import generate_step

    began = time.perf_counter()
    next(generate_step(mx.array(ids), model.module, max_tokens=1))
    return time.perf_counter() - began


def run() -> None:
    """Print the ratios."""
    model = load(small_folder())
    prompt = history()
    step = measure_step(model)
    print(f"{len(prompt.ids)} tokens, {len(prompt.boundaries)} boundaries, measured step {step}")
    for tried in sorted({step, 256, 512}):
        rule = CutRule(tried, spacing_for(tried), 64)
        ratios = []
        for index in range(PAIRS):
            first, second = (ours(model, prompt, rule), theirs(model, prompt.ids)) if index % 2 == 0 else (0.0, 0.0)
            if index % 2:
                second = theirs(model, prompt.ids)
                first = ours(model, prompt, rule)
            ratios.append(second / first)
        low, middle, high = quartiles(ratios)
        print(f"step {tried}: cold prefill speed / mlx-lm's: median {middle:.3f} (quartiles {low:.3f} {high:.3f})")


if __name__ == "__main__":
    run()
