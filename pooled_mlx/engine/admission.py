"""Everything that is decided about a request before it is queued, and the row that is made of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pooled_mlx.chat_formats.base import ChatFormat
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import bad_request, prompt_too_long
from pooled_mlx.core.limits import MAX_TOP_K
from pooled_mlx.core.memory import MemoryPlan
from pooled_mlx.core.ports import Prepared
from pooled_mlx.core.request import Request, Tool
from pooled_mlx.core.runner import SamplingParameters
from pooled_mlx.engine.channel import Channel
from pooled_mlx.engine.row import Bounds, Hook, Pace, Probe, Row
from pooled_mlx.grammar.answer import AnswerGrammar, answer_grammar
from pooled_mlx.grammar.match import CompiledGrammar, Compiler, Constraint, GrammarTokenizer
from pooled_mlx.prompt.prompt import Prompt, PromptBuilder
from pooled_mlx.prompt.reasons import PromptFacts, prompt_facts
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.text.answer_stream import AnswerStream
from pooled_mlx.text.tokens import TokenTable

_log = logging.getLogger("pooled.grammar")

DEFAULT_OUTPUT_TOKENS = 16_384
MOST_OUTPUT_TOKENS = 65_536
LEAST_CONTEXT_LEFT = 32
"""A prompt must leave so many tokens of the context for its answer."""
_CHARACTERS_PER_TOKEN = 8
"""No tokenizer served here makes text shorter than this on average; longer text is refused before it is tokenized."""
_FORCED_THINKING_TOKENS = 4096


class Grammars:
    """Makes and compiles answer grammars. Safe to use from any worker thread."""

    def __init__(self, tokenizer: GrammarTokenizer, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self._compiler = Compiler(tokenizer)

    @classmethod
    def load(cls, folder: Path, chat_format: ChatFormat, *, n_vocab: int, eos_ids: Sequence[int]) -> Grammars | None:
        """The grammars of a model folder; None, with a warning, when its tokenizer cannot be used for any.

        Takes seconds for a large vocabulary.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            text = path.read_text(encoding="utf-8")
            return cls(GrammarTokenizer(text, n_vocab=n_vocab, eos_ids=eos_ids), chat_format)
        except Exception as error:
            _log.warning("%s cannot be used with grammars (%s): calls are not held to their schemas", path, error)
            return None

    def compile(self, request: Request, tools: tuple[Tool, ...], *, reasoning_open: bool) -> AnswerGrammar:
        """The grammar of a request's answer, and what it does not enforce.

        `tools` are the request's tools in the order of the prompt. Raises `ApiError` (400).
        """
        return answer_grammar(request, self._format, self._compiler, tools, reasoning_open=reasoning_open)


class Scripted(Protocol):
    """One scripted answer."""

    @property
    def free(self) -> bool:
        """True when no grammar holds it."""
        ...

    def under(self, request: Request, constraint: Constraint) -> Scripted:
        """The same in tokens that a fresh `constraint` takes. Raises `ApiError`."""
        ...

    def hook(self) -> Hook:
        """What makes a row say it."""
        ...

    def forced(self) -> list[int]:
        """Tokens that the row begins with, read at once."""
        ...


class Scripts(Protocol):
    """Where scripted answers come from."""

    def answer(self, request: Request) -> Scripted | None:
        """The next answer to such a request, None to let the model answer. Raises `ApiError`."""
        ...


class Rehearsal(Protocol):
    """An engine whose answers are scripted, as slow as their author asked."""

    def scripts(self, tokens: Tokens) -> Scripts:
        """The answers in the tokens of one vocabulary."""
        ...

    @property
    def pace(self) -> Pace:
        """The slowness."""
        ...

    def hurry(self) -> None:
        """Be slow no more: the engine stops. Called by any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Payload:
    """What `Admission.prepare` found out: the engine's own part of a `Prepared`."""

    prompt: Prompt
    facts: PromptFacts
    context_limited: bool
    grammar: CompiledGrammar | None = None
    script: Scripted | None = None
    probe: Probe | None = None


class Admission:
    """Checks requests and makes rows. `prepare` and `count` are CPU work and safe in any worker thread.

    `scripts` answer every request with scripted text; `grammars` is None for models whose tokenizer llguidance cannot read.
    """

    def __init__(
        self,
        card: ModelCard,
        builder: PromptBuilder,
        chat_format: ChatFormat,
        table: TokenTable,
        *,
        grammars: Callable[[], Grammars | None],
        scripts: Scripts | None = None,
        seed: int | None = None,
    ) -> None:
        self._card, self._builder, self._format, self._table = card, builder, chat_format, table
        self._grammars, self._scripts, self._seed = grammars, scripts, seed
        ids = {name: index for index, name in table.name_of_added.items()}
        self._close_thinking_id = ids.get(chat_format.end_of_thought or "")

    def count(self, request: Request) -> int:
        """The exact prompt length. Raises `ApiError` for what cannot be rendered."""
        return len(self._builder.build(request).ids)

    def prepare(self, request: Request, plan: MemoryPlan) -> Prepared:
        """Render, tokenize, compile and check. Raises `ApiError`."""
        prompt = self._prompt(request, plan.context_tokens)
        count = len(prompt.ids)
        asked = min(request.max_output_tokens or DEFAULT_OUTPUT_TOKENS, MOST_OUTPUT_TOKENS)
        left = plan.context_tokens - count
        most = min(asked, left)
        fit = plan.fits(count, most)
        if not fit.ok:
            raise bad_request(f"T{fit.refusal()[1:]}.", code="context_length_exceeded")
        script = self._scripts.answer(request) if self._scripts is not None else None
        held = AnswerGrammar(None)
        if script is None or not script.free:
            held = self._grammar(request, prompt)
        if script is not None and held.compiled is not None:
            script = script.under(request, held.compiled.matcher())
        facts = prompt_facts(request, prompt.ids, head=prompt.head, system_end=prompt.system_end, turns=prompt.turns)
        payload = Payload(prompt, facts, left < asked, held.compiled, script)
        return Prepared(request, count, most, held.unenforced, held.warnings, payload)

    def row(self, prepared: Prepared, channel: Channel, plan: MemoryPlan) -> Row:
        """The row of a prepared request."""
        request, payload = prepared.request, prepared.payload
        prompt, script = payload.prompt, payload.script
        constraint = payload.grammar.matcher() if payload.grammar is not None else None
        answer = AnswerStream(
            self._table,
            self._format,
            request,
            reasoning_open=prompt.reasoning_open,
            new_call_id=_new_call_id,
            constrained=constraint is not None,
        )
        return Row(
            prepared=prepared,
            prompt=prompt,
            channel=channel,
            answer=answer,
            bounds=Bounds(
                sampling=self._sampling(request),
                eos_ids=self._table.eos_ids,
                close_thinking_id=self._close_thinking_id if script is None else None,
                thinking_budget=self._thinking_budget(prepared),
                context_limited=payload.context_limited,
            ),
            max_tokens=prepared.max_output_tokens,
            constraint=constraint,
            hook=script.hook() if script is not None else None,
            forced=script.forced() if script is not None else [],
            projected_bytes=plan.fits(prepared.prompt_tokens, prepared.max_output_tokens).needed_bytes,
            probe=payload.probe,
            out=payload.probe.tokens if payload.probe is not None else [],
        )

    def _prompt(self, request: Request, context_tokens: int) -> Prompt:
        characters = sum(len(turn.text) + len(turn.reasoning or "") for turn in request.turns)
        if characters > _CHARACTERS_PER_TOKEN * context_tokens:
            raise prompt_too_long(characters // _CHARACTERS_PER_TOKEN + 1, context_tokens)
        prompt = self._builder.build(request)
        count, most = len(prompt.ids), context_tokens - LEAST_CONTEXT_LEFT
        if count > most:  # clients subtract the two numbers: the first must be the larger one
            raise prompt_too_long(count, context_tokens if count > context_tokens else most)
        return prompt

    def _grammar(self, request: Request, prompt: Prompt) -> AnswerGrammar:
        grammars = self._grammars()
        if grammars is None:
            if request.response_format.kind != "text" or request.tool_choice.mode in ("required", "named"):
                raise bad_request(
                    "This model's tokenizer cannot be used with a grammar, so structured output and forced calls are not "
                    "available. Choose a model with a tokenizer.json.",
                    "response_format" if request.response_format.kind != "text" else "tool_choice",
                )
            return AnswerGrammar(None)
        return grammars.compile(request, prompt.tools, reasoning_open=prompt.reasoning_open)

    def _thinking_budget(self, prepared: Prepared) -> int | None:
        request = prepared.request
        if not request.thinking.on:
            return None
        forced = request.tool_choice.mode in ("required", "named") or request.response_format.kind != "text"
        limits = [request.thinking.budget_tokens] if request.thinking.budget_tokens is not None else []
        if forced:
            limits.append(min(prepared.max_output_tokens // 2, _FORCED_THINKING_TOKENS))
        return min(limits) if limits else None

    def _sampling(self, request: Request) -> SamplingParameters:
        defaults = self._card.sampling_for(request.thinking.on)
        asked = request.sampling
        return SamplingParameters(
            temperature=defaults.temperature if asked.temperature is None else asked.temperature,
            top_k=min(MAX_TOP_K, defaults.top_k if asked.top_k is None else asked.top_k),
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            seed=secrets.randbits(64) if self._seed is None else self._seed,
        )

    def sampling_facts(self) -> Mapping[str, Any]:
        """The card's sampling with and without thinking, for `/health`."""
        return {
            name: {"temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p}
            for name, rule in (("answer", self._card.sampling_for(False)), ("thinking", self._card.sampling_for(True)))
        }


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
