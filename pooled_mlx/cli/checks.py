"""Checks of a loaded model through its own engine: what was read once gives the same numbers, two answers at a time, a schema.

The texts are made up here and say nothing; greedy answers and the logits after a prompt are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.memory import format_size
from pooled_mlx.core.request import Request, ResponseFormat, Sampling, Turn
from pooled_mlx.engine.engine import LocalEngine
from pooled_mlx.engine.row import Probe

CLIENT = "self-check"
"""The client's name of these requests; what they store is forgotten under it."""

DEEP_TOKENS, CUT_TOKENS, SHORT_TOKENS = 4000, 1200, 800
"""Prompts of the long reading, of the cuts, and of the short form."""
LEAST_TOKENS = 600
_ANSWER_ROOM = 512
_BATCH_TOKENS, _DRAFT_TOKENS = 24, 96
SCHEMA_TOKENS = 400
_OTHER_SEED = 1000
_ROUNDING = 0.05
"""Two tokens whose logits are closer than this part of the largest one may change places by rounding in 16 bits."""

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "juniper", "kelp", "larch", "maple")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["apple", "pear", "plum"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "ripe": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "ripe", "tags"],
    "additionalProperties": False,
}

State = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check. A "note" is nothing wrong, but not as it could be; `numbers` are JSON values."""

    name: str
    state: State
    text: str
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Said:
    """An answer with the logits after its prompt, float32 `[vocab]`."""

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    logits: np.ndarray[Any, Any]
    tokens: list[int]
    ids: np.ndarray[Any, Any]


class CheckFailed(Exception):
    """The engine did not answer."""


class CannotTell(Exception):
    """A check says nothing here."""


class _Adopted(CannotTell):
    """An answer began like the next turn and was gone on from: what was decoded and not read is equal but for rounding."""


class Checker:
    """Asks an engine that is ready. `most_pool_bytes` is the most that the pool held after an answer."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._words_a_token = 0.0
        self.most_pool_bytes = 0

    # --- what is asked

    def forget(self) -> None:
        """Nothing of these checks is stored from here on."""
        self._engine.forget(CLIENT)

    async def ask(
        self,
        turns: Sequence[Turn],
        most: int = 1,
        *,
        ids: np.ndarray[Any, Any] | None = None,
        drafts: bool = False,
        **fields: Any,
    ) -> Said:
        """The greedy answer to a conversation; `ids` take the place of its prompt. Raises `CheckFailed`."""
        request = Request(
            id=f"{CLIENT}-{next(self._numbers)}",
            turns=tuple(turns),
            sampling=Sampling(temperature=0.0),
            max_output_tokens=most,
            client=CLIENT,
            **fields,
        )
        began = time.perf_counter()
        probe = Probe(drafts=drafts)
        try:
            prepared = await asyncio.to_thread(self._engine.prepare, request)
            payload = replace(prepared.payload, probe=probe)
            if ids is not None:
                payload = replace(payload, prompt=replace(payload.prompt, ids=ids))
                prepared = replace(prepared, prompt_tokens=len(ids))
            generation = self._engine.submit(replace(prepared, payload=payload))
            try:
                answer = fold([event async for event in generation])
            finally:
                generation.cancel()
        except ApiError as error:
            raise CheckFailed(error.message) from error
        self.most_pool_bytes = max(self.most_pool_bytes, self._engine.loop.pool.used_bytes)
        usage = answer.usage
        assert probe.logits is not None, "an answer without logits"
        return Said(
            text=answer.text,
            finish=answer.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            seconds=time.perf_counter() - began,
            logits=probe.logits,
            tokens=list(probe.tokens),
            ids=payload.prompt.ids,
        )

    async def conversation(self, tokens: int, seed: int, rounds: int = 4) -> list[Turn]:
        """A system prompt and `rounds` questions, the last one open, of about `tokens` tokens in all."""
        draw = random.Random(seed)
        if not self._words_a_token:
            text = " ".join(draw.choices(_WORDS, k=400))
            count = await asyncio.to_thread(self._engine.count_tokens, Request(id=CLIENT, turns=(Turn("user", text),)))
            self._words_a_token = 400 / count

        def words(share: float) -> str:
            return " ".join(draw.choices(_WORDS, k=max(8, int(tokens * share * self._words_a_token))))

        turns = [Turn("system", f"Check {seed}. {words(0.1)}")]
        for number in range(rounds):
            if number:
                turns.append(Turn("assistant", f"{_letters(draw)} {words(0.3 / (rounds - 1))}"))
            turns.append(Turn("user", f"Part {number} of {rounds}: {words(0.6 / rounds)}"))
        return turns

    def room_for(self, tokens: int) -> int:
        """`tokens`, or what the context leaves for a prompt. Raises `CannotTell` where that is too little."""
        room = min(tokens, self._engine.plan.context_tokens - _ANSWER_ROOM)
        if room < LEAST_TOKENS:
            raise CannotTell(f"the context of {self._engine.plan.context_tokens} tokens is too short for this check")
        return room

    # --- the checks

    async def reading(self, tokens: int, seed: int) -> Outcome:
        """A long prompt, read at once and with its first half read before."""
        turns = await self.conversation(self.room_for(tokens), seed, rounds=6)
        self.forget()
        cold = await self.ask(turns)
        self.forget()
        warm = await self._after(turns[:6], turns)
        difference = _difference(cold, warm)
        rate = (cold.prompt_tokens - cold.cached_tokens) / cold.seconds
        numbers = {
            "prompt_tokens": cold.prompt_tokens,
            "cold_seconds": round(cold.seconds, 3),
            "cold_tokens_per_second": round(rate, 1),
            "warm_seconds": round(warm.seconds, 3),
            "reused_tokens": warm.cached_tokens,
            "largest_difference": difference,
        }
        text = (
            f"{cold.prompt_tokens} tokens in {cold.seconds:.1f} s, with {warm.cached_tokens} of them read before in "
            f"{warm.seconds:.1f} s"
        )
        return _judged(text, [(warm, difference)], cold.cached_tokens, numbers)

    async def _after(self, before: Sequence[Turn], turns: Sequence[Turn]) -> Said:
        """The answer to a conversation whose beginning was read before."""
        first = await self.ask(before)
        warm = await self.ask(turns)
        if warm.cached_tokens > first.prompt_tokens:
            raise _Adopted("the model's own answers were reused: nothing can be said of them bit for bit")
        return warm

    async def cuts(self, tokens: int, seed: int) -> Outcome:
        """The same prompt after three beginnings of it: two that end with a turn, one that parts from it inside of a turn."""
        turns = await self.conversation(self.room_for(tokens), seed)
        third = turns[5].text
        other = Turn("user", third[: len(third) // 2] + " then otherwise")
        self.forget()
        cold = await self.ask(turns)
        found: list[tuple[Said, float]] = []
        for before in (turns[:4], turns[:6], [*turns[:5], other]):
            self.forget()
            warm = await self._after(before, turns)
            found.append((warm, _difference(cold, warm)))
        numbers = {
            "prompt_tokens": cold.prompt_tokens,
            "reused_tokens": [warm.cached_tokens for warm, _ in found],
            "largest_difference": [difference for _, difference in found],
        }
        places = ", ".join(str(warm.cached_tokens) for warm, _ in found)
        return _judged(f"{cold.prompt_tokens} tokens, gone on from token {places}", found, cold.cached_tokens, numbers)

    async def batch(self, seed: int) -> Outcome:
        """Two answers at the same time, and each of them alone."""
        talks = [[Turn("user", (await self.conversation(200, seed + number, 1))[1].text)] for number in (0, 1)]
        alone: list[Said] = []
        for talk in talks:
            self.forget()
            alone.append(await self.ask(talk, _BATCH_TOKENS))
        self.forget()
        counters = self._engine.loop.counters
        before = counters.tokens - counters.steps
        together = await asyncio.gather(*(self.ask(talk, _BATCH_TOKENS) for talk in talks))
        shared = counters.tokens - counters.steps - before
        parted = [_parting(one.tokens, two.tokens) for one, two in zip(alone, together, strict=True)]
        numbers: dict[str, Any] = {
            "answer_tokens": [len(one.tokens) for one in alone],
            "shared_steps": shared,
            "parted_at": parted,
            "logits_difference": [_difference(one, two) for one, two in zip(alone, together, strict=True)],
        }
        if any(numbers["logits_difference"]):
            return Outcome("", "failed", "the prompt of one was read otherwise beside the other", 0.0, numbers)
        if all(place is None for place in parted):
            if not shared:
                return Outcome("", "note", "the two answers never ran together, so nothing was compared", 0.0, numbers)
            return Outcome("", "ok", f"both answers as each alone ({shared} steps shared)", 0.0, numbers)
        gaps = [
            await self._gap(talk, one, two, place)
            for talk, one, two, place in zip(talks, alone, together, parted, strict=True)
            if place is not None
        ]
        numbers["gaps"] = gaps
        first = min(place for place in parted if place is not None)
        if max(gaps) <= _ROUNDING:
            text = f"the answers part at token {first}, where two tokens were as good as equal (rounding)"
            return Outcome("", "note", text, 0.0, numbers)
        text = f"the answers part at token {first}, where they should not: {max(gaps):.0%} of the largest logit lie between"
        return Outcome("", "failed", text, 0.0, numbers)

    async def _gap(self, talk: Sequence[Turn], one: Said, two: Said, place: int) -> float:
        """How far apart the logits of the two tokens are at which answers parted, as a part of the largest."""
        if place >= min(len(one.tokens), len(two.tokens)):
            return 1.0
        self.forget()
        ids = np.concatenate([one.ids, np.asarray(one.tokens[:place], one.ids.dtype)])
        logits = (await self.ask(talk, ids=ids)).logits
        return float(abs(logits[one.tokens[place]] - logits[two.tokens[place]]) / max(float(np.abs(logits).max()), 1e-9))

    async def drafts(self, seed: int) -> Outcome:
        """An answer that may repeat its prompt, with several tokens a pass and with one."""
        text = (await self.conversation(150, seed, 1))[1].text
        talk = [Turn("user", f"Repeat this text word for word, three times: {text}")]
        counters, said = self._engine.loop.counters, list[Said]()
        for drafts in (False, True):
            self.forget()
            before = counters.drafted, counters.accepted
            said.append(await self.ask(talk, _DRAFT_TOKENS, drafts=drafts))
        plain, drafted = said
        read, right = counters.drafted - before[0], counters.accepted - before[1]
        numbers: dict[str, Any] = {"answer_tokens": len(plain.tokens), "drafted": read, "accepted": right}
        numbers |= {"seconds": [round(one.seconds, 3) for one in said]}
        place = _parting(plain.tokens, drafted.tokens)
        if place is None:
            state: State = "ok" if read else "note"
            text = f"{right} of {read} drafted tokens were right, the answer is the same" if read else "nothing was repeated"
            return Outcome("", state, text, 0.0, numbers)
        numbers["parted_at"], gap = place, await self._gap(talk, plain, drafted, place)
        numbers["gap"] = gap
        if gap <= _ROUNDING:
            text = f"the answers part at token {place}, where two tokens were as good as equal (rounding)"
            return Outcome("", "note", text, 0.0, numbers)
        text = f"the answer with drafts parts at token {place}: {gap:.0%} of the largest logit lie between"
        return Outcome("", "failed", text, 0.0, numbers)

    async def schema(self, seed: int) -> Outcome:
        """An answer that is held to a schema."""
        turns = [Turn("user", f"Describe a fruit as JSON. ({seed})")]
        wanted = ResponseFormat("json_schema", _SCHEMA, strict=True)
        said = await self.ask(turns, SCHEMA_TOKENS, response_format=wanted)
        numbers = {"answer_tokens": len(said.tokens), "finish": said.finish}
        problem = _schema_problem(said.text) if said.finish == "stop" else f"the answer ended with {said.finish}"
        return Outcome("", "failed" if problem else "ok", problem or f"{len(said.tokens)} tokens, valid", 0.0, numbers)

    def memory(self, before_bytes: int) -> Outcome:
        """What was in memory at most, against the plan; `before_bytes` were there when the checks began."""
        plan, now = self._engine.plan, self._engine.health()["memory"]
        peak, allowed = now["peak_bytes"], plan.weights_bytes + plan.pool_bytes + plan.working_bytes
        work = max(0, peak - before_bytes - self.most_pool_bytes)
        numbers = {
            "before_bytes": before_bytes,
            "peak_bytes": peak,
            "planned_bytes": allowed,
            "limit_bytes": plan.limit_bytes,
            "pool_bytes": self.most_pool_bytes,
            "work_bytes": work,
            "planned_work_bytes": plan.working_bytes,
            "process_bytes": now["process_bytes"],
        }
        text = (
            f"{format_size(peak)} at most, planned {format_size(allowed)}; work took {format_size(work)}, "
            f"planned {format_size(plan.working_bytes)}"
        )
        state: State = "failed" if peak > allowed else "note" if work > plan.working_bytes else "ok"
        return Outcome("", state, text, 0.0, numbers)


async def deep(checker: Checker, before_bytes: int, seed: int = 1) -> AsyncIterator[Outcome]:
    """The checks of `doctor --deep`, each as soon as it is done."""
    checks: dict[str, Callable[[int], Awaitable[Outcome]]] = {
        "warm = cold": lambda seed: checker.reading(DEEP_TOKENS, seed),
        "three cuts": lambda seed: checker.cuts(CUT_TOKENS, seed),
        "batch of two": checker.batch,
        "schema": checker.schema,
        "drafts": checker.drafts,
    }
    for name, check in checks.items():
        yield await _timed(name, check, seed)
    checker.forget()
    yield replace(checker.memory(before_bytes), name="memory")


async def short(checker: Checker, seed: int = 1) -> list[Outcome]:
    """The short form: what `serve` looks at once."""
    try:
        return [
            await _timed("warm = cold", lambda seed: checker.reading(SHORT_TOKENS, seed), seed),
            await _timed("batch of two", checker.batch, seed),
            await _timed("schema", checker.schema, seed),
        ]
    finally:
        checker.forget()


async def _timed(name: str, check: Callable[[int], Awaitable[Outcome]], seed: int) -> Outcome:
    """A check that fails itself is an outcome too, and does not stop the others."""
    began = time.perf_counter()
    try:
        try:
            outcome = await check(seed)
        except _Adopted:
            outcome = await check(seed + _OTHER_SEED)
    except CannotTell as error:
        outcome = Outcome(name, "note", str(error))
    except CheckFailed as error:
        outcome = Outcome(name, "failed", str(error))
    except Exception as error:
        outcome = Outcome(name, "failed", f"the check failed: {type(error).__name__}: {error}")
    return replace(outcome, name=name, seconds=round(time.perf_counter() - began, 2))


def _letters(draw: random.Random) -> str:
    """What no model would say next."""
    return "".join(draw.choices("BCDFGHJKLMNPQRSTVWXZ", k=6))


def _difference(one: Said, other: Said) -> float:
    """The largest difference of the logits: 0.0 where they are equal bit for bit."""
    if np.array_equal(one.logits, other.logits):
        return 0.0
    return float(np.abs(one.logits - other.logits).max())


def _judged(text: str, found: Sequence[tuple[Said, float]], cold_cached: int, numbers: Mapping[str, Any]) -> Outcome:
    """All of it must be equal bit for bit, and something must have been reused."""
    if any(difference != 0.0 for _, difference in found):
        worst = max((difference for _, difference in found), key=lambda value: (value != value, value))
        return Outcome("", "failed", f"{text}: the logits differ by up to {worst:.3g}", 0.0, numbers)
    if any(warm.cached_tokens <= cold_cached for warm, _ in found):
        return Outcome("", "failed", f"{text}: nothing was reused, so nothing was compared", 0.0, numbers)
    return Outcome("", "ok", f"{text}: equal bit for bit", 0.0, numbers)


def _parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first token at which two answers differ, None where they are the same."""
    if list(one) == list(other):
        return None
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _schema_problem(text: str) -> str:
    """What is wrong with an answer that `_SCHEMA` held; "" where nothing is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"the answer is not JSON: {error}"
    rules = _SCHEMA["properties"]
    if not isinstance(value, dict) or set(value) != set(rules):
        return "the answer is not an object with the properties of the schema"
    name, count, ripe, tags = (value[key] for key in rules)
    right = {
        "name": name in rules["name"]["enum"],
        "count": type(count) is int and 1 <= count <= 99,
        "ripe": type(ripe) is bool,
        "tags": isinstance(tags, list) and 1 <= len(tags) <= 3 and all(isinstance(tag, str) and len(tag) <= 12 for tag in tags),
    }
    wrong = [key for key, holds in right.items() if not holds]
    return f"against the schema: {', '.join(wrong)}" if wrong else ""
