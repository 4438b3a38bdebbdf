"""Decode through HTTP against mlx-lm's own stream_generate on the same ids, in interleaved pairs; and CPU per token."""

from __future__ import annotations

import time

import psutil

from benchmarks.models import float32_folder
from benchmarks.servers import Server, pooled, quartiles, stream, words

PAIRS = 9
TOKENS = 64


def in_process_rate(model: object, tokenizer: object, ids: list[int]) -> float:
    """Tokens per second of mlx-lm's stream_generate between its first and last token."""
    from mlx_lm import stream_generate

    times = [time.perf_counter() for _ in stream_generate(model, tokenizer, ids, max_tokens=TOKENS)]  # type: ignore[arg-type]
    return (len(times) - 1) / (times[-1] - times[0])


def run() -> None:
    """Print the ratios."""
    from pooled_mlx.engine.mlx_backend import BLAS

    print(f"BLAS {BLAS}")
    from mlx_lm import load

    model, tokenizer = load(str(float32_folder()))[:2]
    messages = [{"role": "user", "content": "Tell a long story. " + words(60)}]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    with pooled("small") as server:
        stream(server, messages, 8)
        in_process_rate(model, tokenizer, ids)
        ratios, ours = [], []
        for index in range(PAIRS):
            if index % 2:
                theirs = in_process_rate(model, tokenizer, ids)
                mine = stream(server, messages, TOKENS).rate
            else:
                mine = stream(server, messages, TOKENS).rate
                theirs = in_process_rate(model, tokenizer, ids)
            ours.append(mine)
            ratios.append(mine / theirs)
        low, middle, high = quartiles(ratios)
        print(f"decode through HTTP / stream_generate: median {middle:.3f} (quartiles {low:.3f} {high:.3f}), {PAIRS} pairs")
        print(f"  our rate: {quartiles(ours)[1]:.1f} tokens/s")
    cpu_per_token()


def cpu_per_token(tokens: int = 2000) -> None:
    """CPU of the whole server process per token when the model computes nothing."""
    with pooled("null") as server:
        for sampling in ({}, {"temperature": 0.8, "top_k": 40}):
            milliseconds = _cpu(server, tokens, sampling)
            print(f"null model, 49,152 logits, {sampling or 'greedy'}: {milliseconds:.3f} ms of process CPU a token")


def _cpu(server: Server, tokens: int, sampling: dict[str, float]) -> float:
    process = psutil.Process(server.process.pid)
    messages = [{"role": "user", "content": "hello"}]
    stream(server, messages, 50, **sampling)
    before = sum(process.cpu_times()[:2])
    answer = stream(server, messages, tokens, **sampling)
    return (sum(process.cpu_times()[:2]) - before) / answer.usage["completion_tokens"] * 1000


if __name__ == "__main__":
    run()
