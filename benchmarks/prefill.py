"""Cold prefill of a long history with many turns against mlx-lm's own prefill of the same ids, interleaved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.models import small_card, small_folder
from benchmarks.prompts import words
from benchmarks.report import Result, Size, at_least, interleaved, main, measured, note, ratios
from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.prompt.prompt import Prompt, PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.runner.calibrate import measure_step, spacing_for
from pooled_mlx.runner.model import LoadedModel, load, mx

SIZES = (
    Size("pairs", 3, 1, "interleaved pairs"),
    Size("messages", 60, 12, "messages of the history"),
    Size("message_words", 95, 95, "words of each message"),
    Size("step", 0, 128, "tokens of a prefill piece, 0: as measured"),
    Size("piece_runs", 5, 2, "runs for each size of a piece"),
)
PIECES = (64, 128, 256, 512)


def history(messages: int, message_words: int) -> Prompt:
    """A conversation as the server would build it; 60 messages of 95 words are about 6,000 tokens."""
    folder = small_folder()
    tokens = Tokens.load(folder)
    builder = PromptBuilder(tokens, ChatTemplate.load(folder, tokens.named), small_card())
    turns = [Turn("user" if index % 2 == 0 else "assistant", words(message_words, index)) for index in range(messages - 1)]
    return builder.build(Request(id="history", turns=(Turn("system", words(message_words, 99)), *turns)))


class Ours:
    """Our own prefill without a server: a prompt's way over a fresh pool, checkpoints and stored segments included."""

    def __init__(self, model: LoadedModel, prompt: Prompt, rule: CutRule) -> None:
        self._model, self._prompt, self._rule = model, prompt, rule

    def seconds(self) -> float:
        """Seconds to the logits of the first token."""
        from pooled_mlx.runner.runner import MlxRunner
        from tests.engine.harness import loop_on, make_row

        row = make_row(self._prompt.ids, 1, self._prompt.boundaries, system_end=self._prompt.system_end)
        loop = loop_on(MlxRunner(self._model), self._rule, 1 << 34)
        began = time.perf_counter()
        loop.keeper.admit(row, 0.0, alone=True)
        loop.keeper.restore(row)
        while not loop.keeper.read(row):
            pass
        return time.perf_counter() - began


def theirs(model: LoadedModel, ids: np.ndarray) -> float:
    """Seconds of mlx-lm's prefill to the first token."""
    from mlx_lm.generate import generate_step

    began = time.perf_counter()
    next(generate_step(mx.array(ids), model.module, max_tokens=1))
    return time.perf_counter() - began


def piece_rate(model: LoadedModel, tokens: int, total: int = 512) -> float:
    """Tokens a second of a prompt of `total` tokens that is read in pieces of `tokens`."""
    cache = model.make_cache()
    began = time.perf_counter()
    for _ in range(total // tokens):
        model.forward(mx.array([[1] * tokens]), cache)
        mx.eval([layer.state for layer in cache])
    return total / (time.perf_counter() - began)


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    model = load(small_folder())
    prompt = history(sizes.messages, sizes.message_words)
    measured_step = measure_step(model, len(prompt.ids))
    step = sizes.step or measured_step
    yield note("history", f"{len(prompt.ids)} tokens, {len(prompt.boundaries)} boundaries")
    yield note("prefill step", f"{step}" + ("" if step == measured_step else f" (measured: {measured_step})"))
    rows = interleaved(sizes.piece_runs, [lambda tokens=tokens: piece_rate(model, tokens) for tokens in PIECES])
    for index, tokens in enumerate(PIECES):
        rates = [row[index] for row in rows]
        yield measured(f"512 tokens in pieces of {tokens}", rates, " tokens/s")
    ours = Ours(model, prompt, CutRule(step, spacing_for(step), min(64, step)))
    rows = interleaved(sizes.pairs, [ours.seconds, lambda: theirs(model, prompt.ids)])
    yield at_least("cold prefill speed / mlx-lm's", ratios(rows, over=1, under=0), 0.9)
    yield measured("our cold prefill", [len(prompt.ids) / row[0] for row in rows], " tokens/s")


if __name__ == "__main__":
    main(__doc__, SIZES, run)
