"""Compiled grammars and the state of one answer under one of them. The only module that imports llguidance."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from pooled_mlx.grammar.memo import Memo

COMPILE_DEADLINE_SECONDS = 15.0
"""A grammar that takes longer is refused. The caps of `grammar.lint` keep honest schemas far below."""

CACHED_GRAMMARS = 128
"""Compiled grammars kept, least recently used first out."""

CACHED_TEXT_BYTES = 32 * 2**20
"""Bound on the Lark text of all kept grammars: memory grows with the text."""

MAX_GRAMMAR_BYTES = 8 * 2**20

MAX_LEXER_STATES = 2_000_000
MAX_ITEMS_IN_ROW = 20_000
WORN_TOKENS = 16_384
"""Tokens matched by all answers together after which a grammar is built afresh for the next ones.

The engine's lexer makes a state for each place in a bounded string that an answer reaches (some 16 a token of prose, 0.25 kB
each). Copies of a matcher share that lexer, so the states of all answers add up.
"""

_log = logging.getLogger("pooled.grammar")

_WORKERS = 2
_MOST_LOST = 4
_STACK_BYTES = 64 * 2**20
_stack_lock = threading.Lock()
_BYTE_EOS = 256


class GrammarRefused(Exception):
    """A grammar that cannot be compiled, or not within its limits. `reason` is one line without client text around it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GrammarFailed(Exception):
    """A matcher reached an error state in the middle of an answer; it never recovers, the answer must end."""


class GrammarTokenizer:
    """The vocabulary as llguidance needs it. Built once per model (1 to 5 s at 248k tokens), shared by all threads."""

    def __init__(self, tokenizer_json: str, *, n_vocab: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer_json` is the text of tokenizer.json, `n_vocab` the width of the logits, which may exceed the number
        of tokens: padding ids are never allowed. Raises ValueError when the text is no tokenizer or an id is outside.
        """
        added = {str(token["content"]): int(token["id"]) for token in json.loads(tokenizer_json).get("added_tokens", ())}
        self._take(tokenizer_json, n_vocab, eos_ids, added)

    @classmethod
    def of_bytes(cls, added: Sequence[str] = ()) -> GrammarTokenizer:
        """One token per byte (0..255), the end token 256, then the tokens `added`: for tests and for checks of a schema."""
        tokenizer = cls.__new__(cls)
        if added:
            source = _ByteVocabulary(added)
            tokenizer._take(source, len(source.tokens), [_BYTE_EOS], {name: _BYTE_EOS + 1 + i for i, name in enumerate(added)})
        else:
            tokenizer._take("byte", None, None, {})
        return tokenizer

    def _take(self, source: object, n_vocab: int | None, eos_ids: Sequence[int] | None, added: Mapping[str, int]) -> None:
        if n_vocab is not None and any(not 0 <= token < n_vocab for token in eos_ids or ()):
            raise ValueError(f"end tokens {list(eos_ids or ())} lie outside the {n_vocab} logits")
        self.inner = LLTokenizer(source, n_vocab=n_vocab, eos_token=list(eos_ids) if eos_ids else None)  # type: ignore[arg-type]
        self.added: Mapping[str, int] = added
        self.n_vocab: int = self.inner.vocab_size
        self.mask_words: int = (self.n_vocab + 31) // 32
        self.eos_ids: frozenset[int] = frozenset(eos_ids or self.inner.eos_tokens)
        self.memo = Memo(CACHED_GRAMMARS, CACHED_TEXT_BYTES)


class _ByteVocabulary:
    """The byte vocabulary in the form llguidance asks of a foreign tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = _BYTE_EOS

    def __init__(self, added: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>", *(name.encode() for name in added)]
        self.special_token_ids = list(range(_BYTE_EOS, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@dataclass(slots=True)
class Wear:
    """What was done with one lexer: tokens that all its matchers took, and whether one of them met an error."""

    tokens: int = 0
    failed: bool = False


class Constraint:
    """The state of one answer under one grammar. Owned by one thread at a time.

    An end token is allowed exactly where the answer is complete; it never reaches llguidance, which treats it differently
    before and after the last token of a finished grammar.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer, wear: Wear | None = None) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._wear = wear or Wear()
        self._ends = 0

    def allows(self, token: int) -> bool:
        """True when `token` may come next (about 1 µs, no change of state).

        In a forced stretch this accepts any token whose bytes fit, while the mask holds the canonical one only: take
        `forced()` first. Raises `GrammarFailed`.
        """
        if token in self._tokenizer.eos_ids:
            return self.may_end()
        return self.taken([token]) == 1

    def taken(self, tokens: Sequence[int]) -> int:
        """How many of these ordinary tokens may come one after the other. No change of state. Raises `GrammarFailed`."""
        if self._ends or self._matcher.is_stopped():
            self._check()
            return 0
        count = self._matcher.validate_tokens(list(tokens))
        self._check()
        return count

    def consume(self, token: int) -> None:
        """Go on by `token`. Raises `GrammarFailed` when it is not allowed; the constraint is dead from then on."""
        if token in self._tokenizer.eos_ids:
            if not self.may_end():
                raise GrammarFailed(f"end token {token} before the answer is complete")
            self._ends += 1
            return
        if self._ends or (self._matcher.is_stopped() and not self._matcher.is_error()):
            raise GrammarFailed(f"token {token} after the end of the grammar")
        self._wear.tokens += 1
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarFailed(f"token {token} was refused")

    def forced(self) -> list[int]:
        """The tokens that must come next whatever the model says, without end tokens; [] where there is a choice."""
        if self._ends or self._matcher.is_stopped():
            self._check()
            return []
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return [token for token in tokens if token not in self._tokenizer.eos_ids]

    def fill_mask(self, out: NDArray[np.uint32]) -> None:
        """Write the allowed tokens into `out` [mask_words], bit i of word w = token 32 w + i.

        Raises `GrammarFailed` on an error state and on an empty mask: a row that may say nothing must end at once.
        """
        if out.shape != (self._tokenizer.mask_words,) or out.dtype != np.uint32 or not out.flags["C_CONTIGUOUS"]:
            raise ValueError(
                f"the mask must be uint32[{self._tokenizer.mask_words}], contiguous; got {out.dtype}{list(out.shape)}"
            )
        if self._ends:
            out[:] = 0
            self._allow_ends(out)
            return
        self._check()
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self._check()
        if self._matcher.is_accepting():
            self._allow_ends(out)
        if not out.any():
            raise GrammarFailed("the grammar allows no token here")

    def may_end(self) -> bool:
        """True when the answer is complete as it stands. Raises `GrammarFailed`."""
        self._check()
        return self._matcher.is_accepting()

    def stopped(self) -> bool:
        """True when nothing but an end token may follow. Raises `GrammarFailed`."""
        self._check()
        return self._ends > 0 or self._matcher.is_stopped()

    def rollback(self, count: int) -> None:
        """Take back the last `count` consumed tokens, end tokens included. Raises `GrammarFailed`."""
        ends = min(self._ends, count)
        self._ends -= ends
        if count > ends and not self._matcher.rollback(count - ends):
            self._check()
            raise GrammarFailed(f"cannot take back {count} tokens")

    def copy(self) -> Constraint:
        """An independent constraint in the same state."""
        twin = Constraint(self._matcher.deep_copy(), self._tokenizer, self._wear)
        twin._ends = self._ends
        return twin

    def _allow_ends(self, out: NDArray[np.uint32]) -> None:
        for token in self._tokenizer.eos_ids:
            out[token >> 5] |= np.uint32(1 << (token & 31))

    def _check(self) -> None:
        if self._matcher.is_error():
            self._wear.failed = True
            raise GrammarFailed(first_line(self._matcher.get_error()))


class CompiledGrammar:
    """One compiled grammar, safe to share; each answer takes its own `matcher()` (5 to 60 µs)."""

    def __init__(self, text: str, matcher: LLMatcher, tokenizer: GrammarTokenizer, warnings: tuple[str, ...]) -> None:
        self.text = text
        self.warnings = warnings
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._wear = Wear()
        self._lock = threading.Lock()

    @property
    def is_worn(self) -> bool:
        """True when the next answer needs a lexer of its own: `Compiler.renew` gives it one."""
        return self._wear.failed or self._wear.tokens >= WORN_TOKENS

    def matcher(self) -> Constraint:
        """A fresh constraint at the start of the grammar."""
        with self._lock:
            return Constraint(self._matcher.deep_copy(), self._tokenizer, self._wear)

    def take_lexer(self, fresh: CompiledGrammar) -> None:
        """Go on with the lexer of `fresh`, the same grammar compiled anew. Answers that run keep the old one."""
        with self._lock:
            self._matcher, self._wear = fresh._matcher, Wear()


@dataclass(slots=True)
class _Job:
    """A call on its way through a worker."""

    run: Callable[[], CompiledGrammar]
    done: threading.Event
    running: bool = False
    abandoned: bool = False
    result: CompiledGrammar | None = None
    error: BaseException | None = None


class Compiler:
    """Compiles grammars with a cache and a time limit. Safe to call from any number of threads; never from the event loop."""

    def __init__(self, tokenizer: GrammarTokenizer, *, deadline_seconds: float = COMPILE_DEADLINE_SECONDS) -> None:
        self.tokenizer = tokenizer
        self.memo = Memo(CACHED_GRAMMARS, CACHED_TEXT_BYTES)
        """For callers that make grammars: what they made, by their own keys."""
        self._deadline_seconds = deadline_seconds
        self._compiled = Memo(CACHED_GRAMMARS, CACHED_TEXT_BYTES)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._workers = 0
        self._lost = 0

    def compile(self, grammar_text: str) -> CompiledGrammar:
        """The compiled form of a Lark grammar, from the cache where it was seen before.

        One mask is computed before it counts as compiled: some grammars fail only there. Raises `GrammarRefused`.
        """
        raw = grammar_text.encode()
        key = hashlib.blake2b(raw, digest_size=20).digest()
        known = self._compiled.get(key)
        if isinstance(known, CompiledGrammar):
            return self.renew(known)
        if len(raw) > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"the grammar has {len(raw)} bytes (limit {MAX_GRAMMAR_BYTES})")
        compiled = self._in_worker(lambda: build(self.tokenizer, grammar_text))
        self._compiled.put(key, compiled, len(grammar_text))
        return compiled

    def renew(self, grammar: CompiledGrammar) -> CompiledGrammar:
        """`grammar`, with a fresh lexer where the old one is worn: what one answer did to it must not end a later one.

        Keeps the old one, with a warning, where there is no time for that now.
        """
        if grammar.is_worn:
            try:
                grammar.take_lexer(self._in_worker(lambda: build(self.tokenizer, grammar.text)))
            except GrammarRefused as refusal:
                _log.warning("a grammar could not be built afresh: %s", refusal.reason)
        return grammar

    def _in_worker(self, run: Callable[[], CompiledGrammar]) -> CompiledGrammar:
        # llguidance cannot be interrupted: at the deadline the caller leaves and the worker is given up; another one takes its
        # place. Daemon threads, because an interpreter on its way out must not wait for them, and they hold no MLX state.
        job = _Job(run, threading.Event())
        with self._lock:
            if self._lost >= _MOST_LOST:
                raise GrammarRefused(f"{self._lost} earlier grammars are still compiling (limit {_MOST_LOST}); try again later")
            if self._workers < _WORKERS:
                self._workers += 1
                _start_worker(self._work)
        self._jobs.put(job)
        if not job.done.wait(self._deadline_seconds):
            with self._lock:
                if not job.done.is_set():
                    job.abandoned = True
                    self._workers -= job.running
                    self._lost += job.running
                    raise GrammarRefused(f"compiling takes longer than {self._deadline_seconds:g} seconds")
        if job.error is not None:
            raise job.error
        assert job.result is not None
        return job.result

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                if job.abandoned:
                    continue
                job.running = True
            try:
                job.result = job.run()
            except BaseException as error:
                job.error = error
            with self._lock:
                job.done.set()
                if job.abandoned:
                    self._lost -= 1
                    return


def _start_worker(run: Callable[[], None]) -> None:
    # The engine resolves references recursively: with the usual stack a chain of some thousands ends the process.
    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)


def build(tokenizer: GrammarTokenizer, grammar_text: str) -> CompiledGrammar:
    """Compile in the calling thread, without a time limit. Raises `GrammarRefused`."""
    matcher = LLMatcher(tokenizer.inner, LLMatcher.grammar_from_lark(grammar_text), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarRefused(first_line(matcher.get_error()))
    probe = Constraint(matcher.deep_copy(), tokenizer)
    try:
        probe.fill_mask(np.zeros(tokenizer.mask_words, dtype=np.uint32))
    except GrammarFailed as failure:
        raise GrammarRefused(f"nothing can be written under it ({failure})") from failure
    return CompiledGrammar(grammar_text, matcher, tokenizer, tuple(matcher.get_grammar_warnings()))


def check_grammar(grammar_text: str) -> str:
    """What the engine says about a grammar (compiled over bytes, one mask computed), in one line; "" where it takes it."""
    try:
        build(_bytes(), grammar_text)
    except GrammarRefused as refusal:
        return refusal.reason
    return ""


def is_unsatisfiable(reason: str) -> bool:
    """True when a refusal says that no value meets the schema, rather than that the engine cannot hold it."""
    return "nsatisfiable" in reason


@functools.cache
def _bytes() -> GrammarTokenizer:
    return GrammarTokenizer.of_bytes()


def parser_limits() -> LLParserLimits:
    """The limits under which every grammar is compiled and matched.

    Large lexemes are not run over the whole vocabulary beforehand: with a hundred bounded strings that takes a second, and the
    masks are no faster for it. The lexer's states suffice for the longest answer (65,536 tokens) in a bounded string, the rows
    for an object of some thousand optional properties (13 ms a mask).
    """
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_max_items=10 * MAX_ITEMS_IN_ROW,
        verbose_errors=False,
        precompute_large_lexemes=False,
    )


def engine_version() -> str:
    """The grammar engine and its version, for the log."""
    return llguidance.get_version()


def first_line(text: str) -> str:
    """What matters of an error of llguidance, whose further lines repeat the state and the grammar."""
    line, _, rest = text.strip().partition("\n")
    line = line.rpartition("failed to compile JSON schema: ")[2]
    if line.endswith("regex parse error:"):  # the reason stands below the expression, or its context follows
        line += next((below.removeprefix("error:") for below in rest.split("\n") if below.startswith("error:")), "")
    return line[:300]
