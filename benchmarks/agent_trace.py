"""An agent's conversation turn by turn: what each turn computes, and how long its first token takes.

System prompt and ten tools of 3,000 tokens in all, twelve turns with calls and results, on the embedded model in float32 and on
the tiny hybrid; mlx_lm.server does the same in the same run. Ours answers from a script, so that it calls tools; mlx_lm.server
answers freely, and each server gets back what it answered itself. The reference of a first token is the prefill of the turn's
new tokens alone, in this process, after the same history, in pieces of the same length. Other load on a machine only adds: each
turn is timed in several conversations of the same lengths, and its fastest time counts, as does the fastest of its reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.agent_client import INCOMING, Agent, Turn, answers, system_text, tools
from benchmarks.client import stream
from benchmarks.models import KINDS, float32_folder, hybrid_folder
from benchmarks.prompts import FIRST_WORDS, user, words, write_script
from benchmarks.report import Result, Size, all_of, at_most, main, measured, note
from benchmarks.rooms import parse
from benchmarks.servers import Server, mlx_lm_server, pooled
from pooled_mlx.prompt.exact_ids import agreement
from pooled_mlx.prompt.prompt import Prompt, PromptBuilder
from pooled_mlx.prompt.templates import ChatTemplate
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.runner.model import LoadedModel, mx

SIZES = (
    Size("turns", len(INCOMING), 5, "turns of a conversation"),
    Size("rounds", 3, 1, "conversations of the same lengths, of which each turn's fastest time counts"),
    Size("conversations", 8, 3, "interleaved conversations"),
    Size("interleaved_turns", 4, 2, "turns of each of them"),
    Size("sessions", 5, 3, "sessions of one agent whose system prompts differ late"),
    Size("models", "both", "both", "small, hybrid or both", ("small", "hybrid", "both")),
)
TAIL = 64
"""Tokens between the last kept cut and the end of the history that may be computed again."""
ALLOWED_MS, ALLOWED_SHARE = 30.0, 0.02
SYSTEM_TOKENS, TOOL_TOKENS, FORK_SHARE, FORK_STEP = 6000, 2370, 0.85, 128
"""System prompt with tools, the tools alone, the part of it that all sessions share, the length of a prefill piece."""


class Alone:
    """Prefill of a turn's new tokens in this process, after as many tokens of history, in pieces of `step` tokens."""

    def __init__(self, model: LoadedModel, step: int) -> None:
        self._model, self._step = model, step
        self._caches = model.make_cache()
        self._tokens = 0

    def seconds(self, turn: Turn) -> float:
        """Seconds to the logits of the first token. Turns must come in order."""
        self._read(turn.history_tokens - self._tokens)
        began = time.perf_counter()
        self._read(turn.new_tokens)
        return time.perf_counter() - began

    def _read(self, count: int) -> None:
        """Read `count` tokens; the output layer runs for the last one only, as in mlx-lm's own prefill."""
        step = self._step
        pieces = [step] * ((count - 1) // step) + [(count - 1) % step, 1] if count > 0 else []
        for tokens in filter(None, pieces):
            logits = self._model.forward(mx.array([[1] * tokens]), self._caches)
            states = [cache.state for cache in self._caches]
            mx.eval(logits, states) if tokens == 1 else mx.eval(states)
        self._tokens += count


def run(sizes: Any) -> Iterator[Result]:
    """All results."""
    if sizes.models != "hybrid":
        yield from measure("small", "SmolLM2", "hermes", float32_folder(), sizes, thinking=False)
    if sizes.models != "small":
        yield from measure("hybrid", "tiny hybrid", "xml", hybrid_folder(), sizes, thinking=True)
        yield from late_differences("hybrid", "tiny hybrid", "xml", sizes)


def measure(
    kind: str, label: str, form: Literal["hermes", "xml"], folder: Path, sizes: Any, *, thinking: bool
) -> Iterator[Result]:
    """All results on one model."""
    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory())
        script = write_script(Path(scratch) / "answers.jsonl", [*answers(form), {"match": "hello", "text": "Hello."}])
        ours = stack.enter_context(pooled(kind, "--script", str(script)))
        theirs = stack.enter_context(mlx_lm_server(folder))
        for server in (ours, theirs):
            stream(server, [user("hello")], 4)
        model = KINDS[kind]().load(KINDS[kind]().folder)
        step = ours.get("/health")["prefill_step"]
        yield note(f"{label}: prefill step", f"{step} tokens")
        peer = Agent(theirs, plain_system=None if form == "xml" else plain_system(kind))
        agents = alike(sizes.rounds, lambda: Agent(ours))
        yield from conversation(agents, lambda: Alone(model, step), label, sizes.turns, peer)
        yield from edits(agents[0], label)
        if thinking:
            for keeps, name in ((True, "thinking"), (False, "thinking, client drops reasoning")):
                more = {"seed": 3 + keeps, "thinking": True, "keeps_reasoning": keeps, "answer_tokens": 120}
                agents = alike(sizes.rounds, lambda more=more: Agent(ours, **more))
                yield from conversation(agents, lambda: Alone(model, step), f"{label}, {name}", sizes.turns)
                yield from edits(agents[0], f"{label}, {name}")
        yield from many(ours, label, sizes.conversations, sizes.interleaved_turns)
        yield from shared_prefix(ours, label)


def _opening(kind: str, system: str) -> tuple[Tokens, Prompt]:
    """The prompt of a conversation that begins with `system` and the tools."""
    model = KINDS[kind]()
    tokens = Tokens.load(model.folder)
    builder = PromptBuilder(tokens, ChatTemplate.load(model.folder, tokens.named), model.card)
    body = {"messages": [{"role": "system", "content": system}, user("hello")], "tools": tools()}
    return tokens, builder.build(parse(body).request)


def plain_system(kind: str) -> str:
    """System prompt and tools as one text, as our server shows them to a model whose template knows no tools."""
    tokens, prompt = _opening(kind, system_text(1))
    text = tokens.bytes_for(prompt.ids[: prompt.system_end]).decode()
    return text.removeprefix("<|im_start|>system\n").removesuffix("\n").removesuffix("<|im_end|>")


def alike(count: int, make: Callable[[], Agent]) -> list[Agent]:
    """Agents with one system prompt and other messages of the same lengths: each begins with the same word."""
    agents = [make() for _ in range(count)]
    for number, agent in enumerate(agents):
        agent.seed += number * FIRST_WORDS
    return agents


def conversation(
    agents: Sequence[Agent], make_alone: Callable[[], Alone], label: str, turns: int, peer: Agent | None = None
) -> Iterator[Result]:
    """Conversations of the same lengths, each interleaved turn by turn with the reference, the first with `peer`'s too."""
    theirs, references, print_row = [], [], _row_printer(label)
    for agent in agents:
        alone = make_alone()
        references.append(list[float]())
        for number in range(turns):
            turn = agent.next()
            agent.server.rest()
            references[-1].append(alone.seconds(turn))
            other = peer.next() if peer is not None else None
            if peer is not None:
                peer.server.rest()
            print_row(number, turn, references[-1][-1], other)
            if number and other is not None:
                theirs.append((turn.first_token_seconds, other))
        peer = None
    warm = [turn for agent in agents for turn in agent.turns[1:]]
    yield note(f"{label}: first prompt", f"{agents[0].turns[0].prompt_tokens} tokens")
    good = sum(1 for turn in warm if turn.computed_tokens <= turn.new_tokens + TAIL)
    yield all_of(f"{label}: turns that compute only what is new (+ {TAIL})", good, len(warm))
    yield measured(f"{label}: computed - new tokens, most", max(turn.computed_tokens - turn.new_tokens for turn in warm))
    ours = [min(agent.turns[number].first_token_seconds for agent in agents) for number in range(turns)]
    fastest = [min(times) for times in zip(*references, strict=True)]
    late = [(mine - alone * (1 + ALLOWED_SHARE)) * 1000 for mine, alone in zip(ours[1:], fastest[1:], strict=True)]
    yield at_most(f"{label}: warm first token - (new tokens alone + 2 %)", late, ALLOWED_MS, " ms")
    if theirs:
        yield measured(
            f"{label}: warm first token / mlx_lm.server's", [mine / other.first_token_seconds for mine, other in theirs]
        )
        again = [other.computed_tokens - other.new_tokens for _, other in theirs]
        yield measured(f"{label}: mlx_lm.server, computed - new tokens", again)


def _row_printer(label: str) -> Any:
    print(f"{label}\n  turn  prompt  cached  computed   new  first token   alone   mlx_lm.server: computed  new  first token")

    def row(number: int, turn: Turn, reference: float, other: Turn | None) -> None:
        text = (
            f"  {number + 1:4}  {turn.prompt_tokens:6}  {turn.cached_tokens:6}  {turn.computed_tokens:8}  {turn.new_tokens:4}"
            f"  {turn.first_token_seconds:9.3f} s  {reference:5.3f} s"
        )
        if other is not None:
            text += f"  {other.computed_tokens:22}  {other.new_tokens:4}  {other.first_token_seconds:9.3f} s"
        print(text, flush=True)

    return row


def edits(agent: Agent, label: str) -> Iterator[Result]:
    """User turns sent again, as they were and edited: only from that turn on may anything be computed."""
    numbers = [number for number in range(1, len(agent.turns)) if INCOMING[number][0] == "user"]
    for what, seed in (("regenerated", None), ("edited", 77)):
        again = [agent.again(number, seed=seed) for number in numbers]
        good = sum(1 for turn in again if turn.computed_tokens <= turn.new_tokens + TAIL)
        yield all_of(f"{label}: {what} user turns that compute from there only (+ {TAIL})", good, len(again))
        yield note(
            f"{label}: {what}, computed of new",
            ", ".join(
                f"turn {number + 1}: {turn.computed_tokens} of {turn.new_tokens}" for number, turn in _pairs(numbers, again)
            ),
        )


def _pairs(numbers: Sequence[int], turns: Sequence[Turn]) -> list[tuple[int, Turn]]:
    return list(zip(numbers, turns, strict=True))


def many(server: Server, label: str, conversations: int, turns: int) -> Iterator[Result]:
    """Conversations that take turns, with different system prompts by twos."""
    agents = [Agent(server, seed=50 + number // 2) for number in range(conversations)]
    for number, agent in enumerate(agents):
        agent.messages[0] = {"role": "system", "content": system_text(50 + number // 2, 300)}
        agent.seed = 60 + number
    for _ in range(turns):
        for agent in agents:
            agent.next()
    warm = [turn for agent in agents for turn in agent.turns[1:]]
    good = sum(1 for turn in warm if turn.computed_tokens <= turn.new_tokens + TAIL)
    yield all_of(f"{label}: {conversations} interleaved conversations, turns as if alone", good, len(warm))
    first = [agent.turns[0] for agent in agents[1::2]]
    shared = sum(1 for turn in first if turn.computed_tokens <= 2 * INCOMING[0][1] + TAIL)
    yield all_of(f"{label}: second conversations that share system + tools", shared, len(first))


def shared_prefix(server: Server, label: str) -> Iterator[Result]:
    """Prefix + A, then prefix + B: what both share is stored once."""
    before = _stored_tokens(server)
    agents = [Agent(server, seed=90), Agent(server, seed=90)]
    agents[1].seed = 91
    first, second = (agent.next() for agent in agents)
    stored = _stored_tokens(server) - before
    alone = first.prompt_tokens + first.answer_tokens + second.prompt_tokens + second.answer_tokens
    once = alone - first.cached_tokens - second.cached_tokens
    yield at_most(f"{label}: tokens stored for P A and P B / tokens with P once", stored / once, 1.0)
    yield note(f"{label}: P A and P B", f"{stored} tokens stored, {alone} in both, {second.cached_tokens} shared")


def late_differences(kind: str, label: str, form: Literal["hermes", "xml"], sizes: Any) -> Iterator[Result]:
    """Sessions of one agent, one after the other, whose system prompts differ late (a date, a git status)."""
    systems = [_late_system(number) for number in range(sizes.sessions)]
    prompts = [_opening(kind, system)[1] for system in systems]
    forks = [0, *(agreement(prompts[0].ids, prompt.ids) for prompt in prompts[1:])]
    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory())
        script = write_script(Path(scratch) / "answers.jsonl", answers(form))
        server = stack.enter_context(pooled(kind, "--step", str(FORK_STEP), "--script", str(script)))
        short = []
        for number, system in enumerate(systems):
            agent = Agent(server, seed=200 + number)
            agent.messages[0] = {"role": "system", "content": system}
            for _ in range(sizes.turns):
                agent.next()
            short.append(forks[number] - agent.turns[0].cached_tokens)
    what = f"{label}: system prompts of {prompts[0].system_end} tokens that differ at token {forks[1]}"
    yield note(f"{what}, computed before the fork, session by session", ", ".join(map(str, short[1:])))
    near = sum(1 for tokens in short[2:] if 0 <= tokens < FORK_STEP)
    yield all_of(f"{what}: later sessions that resume less than {FORK_STEP} tokens before the fork", near, len(short) - 2)


def _late_system(number: int) -> str:
    """A system prompt of one agent, the same as the others' up to `FORK_SHARE` of its length."""
    room = SYSTEM_TOKENS - TOOL_TOKENS
    same = int(SYSTEM_TOKENS * FORK_SHARE) - TOOL_TOKENS
    return f"{system_text(1, same)} {words(room - same, number + 1)}"


def _stored_tokens(server: Server) -> int:
    """Tokens in the pool, once its report is newer than the last answer."""
    time.sleep(0.7)
    return server.get("/pool")["tokens"]


if __name__ == "__main__":
    main(__doc__, SIZES, run)
