"""Drafts against the same answers without them, in interleaved pairs, and what they cost where nothing is repeated.

Scripted answers copy a file from their prompt, on the embedded model's weights and on the tiny hybrid; then the embedded
model's own words. One request at a time, in process, through the real loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.models import small_card, small_folder
from benchmarks.prompts import code, words
from benchmarks.report import Result, Size, all_of, at_least, at_most, interleaved, main, measured, ratios
from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.request import Request, Turn
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.drafts import Draft, Index, PassCosts
from pooled_mlx.engine.loop import Loop
from pooled_mlx.prompt.prompt import PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.engine import load_replay_model, write_replay_folder
from pooled_mlx.replay.faults import ScriptHook
from pooled_mlx.runner.model import LoadedModel, load, mx
from pooled_mlx.runner.runner import MlxRunner
from pooled_mlx.store.paths import cache_folder

SIZES = (
    Size("pairs", 5, 2, "interleaved pairs of each answer"),
    Size("lines", 300, 60, "lines of the file that is copied"),
    Size("tokens", 300, 80, "tokens of the embedded model's own answers"),
    Size("index", 100_000, 10_000, "tokens that are looked up"),
)
LINE_CHARACTERS = 34
PASSES = (1, 2, 4, 8, 16, 32)
RULE = CutRule(512, 2048)


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its tokens, the passes that it took, seconds from its first token on, and what its drafts were worth."""

    tokens: list[int]
    passes: int
    seconds: float
    drafted: int
    accepted: int


class Bench:
    """A model, its tokenizer, and one kept prompt cache for each way."""

    def __init__(self, name: str) -> None:
        folder = small_folder()
        if name == "hybrid":
            write_replay_folder(folder, folder := cache_folder() / "benchmarks" / "drafts-hybrid")
        self.model: LoadedModel = load(folder) if name == "small" else load_replay_model(folder)
        self.tokens = Tokens.load(folder)
        self._builder = PromptBuilder(self.tokens, ChatTemplate.load(folder, self.tokens.named), small_card())
        self._loops: dict[bool, Loop] = {}

    def ids(self, text: str) -> np.ndarray:
        """The prompt of one user turn."""
        return self._builder.build(Request(id="drafts", turns=(Turn("user", text),))).ids

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [int(token) for token in self.tokens.encode_plain(text)]

    def say(
        self, ids: np.ndarray, most: int, *, drafts: bool, script: list[int] | None = None, sampling: SamplingParameters
    ) -> Said:
        """Let a row say `most` tokens behind `ids`, or the tokens of `script`."""
        from tests.engine.harness import loop_on, make_row

        loop = self._loops.get(drafts)
        if loop is None:
            loop = loop_on(MlxRunner(self.model), RULE, 1 << 32, clock=time.perf_counter, drafts=drafts)
            self._loops[drafts] = loop
        hook = ScriptHook([*script, 0]) if script is not None else None
        row = make_row(ids, most, sampling=sampling, hook=hook, eos=() if script is not None else tuple(self.tokens.eos_ids))
        steps, drafted, accepted = loop.counters.steps, loop.counters.drafted, loop.counters.accepted
        loop.submit(row)
        while loop.busy:
            loop.turn()
        seconds = row.times.last_token - row.times.first_token
        counted = loop.counters
        return Said(row.out, counted.steps - steps, seconds, counted.drafted - drafted, counted.accepted - accepted)


def copied(bench: Bench, name: str, file: str, sizes: Any) -> Iterator[Result]:
    """A file from the prompt said again, whole and with one line in twenty changed."""
    lines = file.splitlines(keepends=True)
    changed = [f"    changed = {index} * {index + 7}\n" if index % 20 == 10 else line for index, line in enumerate(lines)]
    prompt = bench.ids(f"Here is a file:\n{file}\nWrite it again.")
    for what, text, least, most in (("a file", file, 8, 0.3), ("1 line in 20 changed", "".join(changed), 4, 0.45)):
        script = bench.text_ids(text)
        runs: dict[bool, Said] = {}

        def once(drafts: bool, script: list[int] = script, runs: dict[bool, Said] = runs) -> float:
            said = bench.say(prompt, len(script), drafts=drafts, script=script, sampling=SamplingParameters())
            if said.tokens != script:
                raise RuntimeError("the answer is not the script")
            runs[drafts] = said
            return said.seconds

        rows = interleaved(sizes.pairs, [lambda once=once: once(True), lambda once=once: once(False)])
        yield at_least(f"{name}, {what}: tokens a pass", len(script) / runs[True].passes, least)
        yield at_most(f"{name}, {what}: time / without drafts", ratios(rows), most)


def own_words(bench: Bench, sizes: Any) -> Iterator[Result]:
    """What the embedded model says by itself: a text repeated, and prose."""
    text = words(120, 5)
    prompt = bench.ids(f"Repeat this text word for word: {text}")
    same: list[bool] = []

    def once(ids: np.ndarray, drafts: bool, sampling: SamplingParameters, kept: list[Said]) -> float:
        kept.append(bench.say(ids, sizes.tokens, drafts=drafts, sampling=sampling))
        return kept[-1].seconds / max(len(kept[-1].tokens), 1)

    on, off = list[Said](), list[Said]()
    greedy = SamplingParameters()
    rows = interleaved(sizes.pairs, [lambda: once(prompt, True, greedy, on), lambda: once(prompt, False, greedy, off)])
    same.append(on[-1].tokens == off[-1].tokens)
    yield at_most("embedded model repeats a text: time / without drafts", ratios(rows), 0.6)
    yield measured("embedded model repeats a text: tokens a pass", len(on[-1].tokens) / on[-1].passes)
    on, off = list[Said](), list[Said]()
    prose = [bench.ids(f"Tell me a long story about {topic}.") for topic in ("a lighthouse", "two rivers", "an old clock")]
    runs: list[Callable[[], float]] = []
    for ids in prose:
        seeded = SamplingParameters(temperature=0.8, top_k=40, seed=len(ids))
        runs += [
            lambda ids=ids, seeded=seeded: once(ids, True, seeded, on),
            lambda ids=ids, seeded=seeded: once(ids, False, seeded, off),
        ]
    rows = interleaved(sizes.pairs, runs)
    said, passes, plain = sum(len(s.tokens) for s in on), sum(s.passes for s in on), sum(s.passes for s in off)
    yield at_most("prose at 0.8: extra passes, %", 100 * max(0, passes - plain) / plain, 1)
    yield at_most("prose at 0.8: drafted and wrong, % of tokens", 100 * sum(s.drafted - s.accepted for s in on) / said, 2)
    pairs = [(row[2 * index], row[2 * index + 1]) for row in rows for index in range(len(prose))]
    yield at_most("prose at 0.8: time / without drafts", ratios(pairs), 1.02)
    by_off = {tuple(s.tokens) for s in off}
    same += [tuple(s.tokens) in by_off for s in on]
    yield all_of("answers equal to those without drafts", sum(same), len(same))


def look_up(count: int) -> Iterator[Result]:
    """CPU of the look-up for each token of an answer behind a long prompt, and of its start."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 5_000, count).astype(np.uint32)
    began = time.process_time()
    draft = Draft(Index(ids))
    yield measured(f"look-up in {count:,} tokens: to begin", 1000 * (time.process_time() - began), " ms")
    answer = [int(token) for token in np.concatenate([ids[count // 2 : count // 2 + 500], random.integers(0, 5_000, 1_500)])]
    costs = PassCosts()
    began = time.process_time()
    for token in answer:
        draft.told(token)
        draft.propose(32, costs)
    yield at_most("look-up: CPU a token", 1000 * (time.process_time() - began) / len(answer), 0.1, " ms")


def passes(bench: Bench, name: str) -> Iterator[Result]:
    """Time of a pass of n tokens / time of one, behind 1,024 tokens: the limit of what drafts can bring here."""
    ids = np.random.default_rng(2).integers(0, 5_000, 1024 + sum(PASSES) * 8)
    cache = bench.model.make_cache()
    mx.eval(bench.model.last_logits(mx.array(ids[:1024])[None], cache))
    at, best = 1024, dict.fromkeys(PASSES, float("inf"))
    for _ in range(8):
        for count in PASSES:
            began = time.perf_counter()
            mx.eval(bench.model.forward(mx.array(ids[at : at + count])[None], cache))
            best[count] = min(best[count], time.perf_counter() - began)
            at += count
    for count in PASSES[1:]:
        yield measured(f"{name}: a pass of {count} tokens / of one", best[count] / best[1])


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    yield from look_up(sizes.index)
    for name in ("hybrid", "small"):
        bench = Bench(name)
        yield from passes(bench, name)
        yield from copied(bench, name, code(sizes.lines * LINE_CHARACTERS, 0), sizes)
        if name == "small":
            yield from own_words(bench, sizes)


if __name__ == "__main__":
    main(__doc__, SIZES, run)
