"""Decode through HTTP against mlx-lm's own stream_generate on the same ids, in interleaved pairs; CPU per token; sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from benchmarks.client import stream
from benchmarks.models import LARGE_VOCAB, float32_folder
from benchmarks.prompts import user, words
from benchmarks.report import Result, Size, at_least, at_most, interleaved, main, measured, note, ratios
from benchmarks.servers import Server, pooled

SIZES = (
    Size("pairs", 9, 3, "interleaved pairs"),
    Size("tokens", 96, 32, "tokens of each answer"),
    Size("null_tokens", 2000, 300, "tokens of each answer of the model that computes nothing"),
    Size("null_runs", 3, 1, "runs of the model that computes nothing"),
    Size("draws", 50, 10, "draws from a row of 248,320 logits"),
)


def in_process_rate(model: object, tokenizer: object, ids: list[int], tokens: int) -> float:
    """Tokens a second of mlx-lm's stream_generate between its first and last token."""
    from mlx_lm import stream_generate

    times = [time.perf_counter() for _ in stream_generate(model, tokenizer, ids, max_tokens=tokens)]  # type: ignore[arg-type]
    return (len(times) - 1) / (times[-1] - times[0])


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    from mlx_lm import load

    from pooled_mlx.runner.model import BLAS

    yield note("BLAS", str(BLAS))
    model, tokenizer = load(str(float32_folder()))[:2]
    messages = [user("Tell a long story. " + words(60))]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    with pooled("small") as server:
        warm = stream(server, messages, 8)
        if warm.prompt_tokens != len(ids):
            raise RuntimeError(f"the prompts differ: {warm.prompt_tokens} tokens through HTTP, {len(ids)} in process")
        in_process_rate(model, tokenizer, ids, 8)
        rows = interleaved(
            sizes.pairs,
            [
                lambda: stream(server, messages, sizes.tokens).rate,
                lambda: in_process_rate(model, tokenizer, ids, sizes.tokens),
            ],
        )
    yield at_least("one stream through HTTP / stream_generate", ratios(rows), 0.97)
    yield measured("one stream through HTTP", [row[0] for row in rows], " tokens/s")
    yield from cpu_per_token(sizes.null_tokens, sizes.null_runs)
    yield from sampling(sizes.draws)


def cpu_per_token(tokens: int, runs: int) -> Iterator[Result]:
    """CPU of the whole server process for a token when the model computes nothing."""
    kinds = {"greedy": {"temperature": 0}, "temperature 0.8, top-k 40": {"temperature": 0.8, "top_k": 40}}
    with pooled("null", "--step", "512") as server:
        measures = [_measure(server, tokens, sampling) for sampling in kinds.values()]
        rows = interleaved(runs, measures)
    for index, name in enumerate(kinds):
        yield at_most(f"CPU a token, null model, 49,152 logits, {name}", [row[index] for row in rows], 1.0, " ms")


def _measure(server: Server, tokens: int, sampling: dict[str, Any]) -> Callable[[], float]:
    stream(server, [user("hello")], 50, **sampling)
    process = psutil.Process(server.process.pid)

    def milliseconds() -> float:
        before = sum(process.cpu_times()[:2])
        answer = stream(server, [user("hello")], tokens, **sampling)
        return (sum(process.cpu_times()[:2]) - before) / answer.tokens * 1000

    return milliseconds


def sampling(draws: int) -> Iterator[Result]:
    """Time to draw from one row of a large vocabulary."""
    from pooled_mlx.core.runner import SamplingParameters
    from pooled_mlx.runner.model import mx
    from pooled_mlx.runner.sampler import BatchSampler

    logits = mx.random.normal((1, LARGE_VOCAB)) * 3
    mx.eval(logits)
    kinds = {
        "greedy": SamplingParameters(),
        "top-k 40": SamplingParameters(temperature=0.8, top_k=40, seed=1),
        "top-k 20, top-p 0.8": SamplingParameters(temperature=0.7, top_k=20, top_p=0.8, seed=1),
    }
    for name, rule in kinds.items():
        sampler = BatchSampler([rule])
        times = []
        for position in range(draws + 3):
            began = time.perf_counter()
            mx.eval(sampler.draw(logits, [position]))
            times.append((time.perf_counter() - began) * 1000)
        yield at_most(f"draw from 248,320 logits, {name}", times[3:], 4.0, " ms")


if __name__ == "__main__":
    main(__doc__, SIZES, run)
