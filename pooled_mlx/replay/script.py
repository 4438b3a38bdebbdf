"""Scripted answers: the lines of an ANSWERS.jsonl file, which of them answers a request, and as which tokens."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Request
from pooled_mlx.grammar.match import Constraint
from pooled_mlx.prompt.spans import cut_text
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.replay.faults import FaultKind, Faults, ScriptHook
from pooled_mlx.replay.follow import CannotFollow, Vocabulary, follow

Split = Literal["token", "byte", "all"]
_FIELDS = frozenset({"match", "text", "token_seconds", "prefill_seconds_per_1000", "split", "fault", "free"})
_FAULT_FIELDS = frozenset({"kind", "at_token"})
_SHOWN_CHARACTERS = 80


class ScriptError(Exception):
    """A script file cannot be used; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """One scripted answer. `text` is what the model writes, tags included; `match` must be in the last turn, None fits any.

    `split`: as ordinary tokens, one token for each byte, or ordinary tokens forced as one run. `free` lifts the grammar.
    """

    number: int
    text: str
    match: str | None = None
    split: Split = "token"
    faults: Faults = field(default_factory=Faults)
    free: bool = False


def parse_script(text: str) -> tuple[ScriptLine, ...]:
    """Read ANSWERS.jsonl. Blank lines are skipped. Raises `ScriptError`."""
    lines = tuple(_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    if not lines:
        raise ScriptError('The script holds no answer. Write at least one line such as {"text": "Hello."}.')
    return lines


class ReplayScript:
    """Which line answers a request. Safe to use from any thread."""

    def __init__(self, lines: Sequence[ScriptLine]) -> None:
        self.lines = tuple(lines)
        self._used: set[int] = set()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path) -> ReplayScript:
        """Read a script file. Raises `ScriptError`."""
        try:
            return cls(parse_script(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise ScriptError(f"The script {path} cannot be read: {error}.") from None

    def choose(self, request: Request) -> ScriptLine:
        """The first unused line that fits the last turn, else the last line of those that fit, again.

        Raises `ApiError` (400) when none fits.
        """
        last = request.turns[-1].text
        fitting = [line for line in self.lines if line.match is None or line.match in last]
        if not fitting:
            raise bad_request(
                f"None of the {len(self.lines)} scripted answers fits this request: no `match` is part of its last turn, "
                f"which begins {last[:_SHOWN_CHARACTERS]!r}. Add a line for it, or one without `match`.",
                "messages",
            )
        with self._lock:
            line = next((line for line in fitting if line.number not in self._used), fitting[-1])
            self._used.add(line.number)
        return line

    def give_back(self, line: ScriptLine) -> None:
        """The line could not be said after all: it counts as not used, so that a client's next try meets it again."""
        with self._lock:
            self._used.discard(line.number)


class ScriptedAnswers:
    """Scripted answers as token ids of one model."""

    def __init__(self, script: ReplayScript, tokens: Tokens) -> None:
        """`tokens` must have an end token."""
        self.script = script
        self._tokens = tokens
        self._eos = min(tokens.eos_ids)

    def answer(self, request: Request) -> ScriptedAnswer:
        """The next scripted answer for a request. Raises `ApiError` (400) when none fits."""
        return self.encode(self.script.choose(request))

    def encode(self, line: ScriptLine) -> ScriptedAnswer:
        """The tokens of a line, up to the first end token in its text, else with one behind it."""
        ids: list[int] = []
        for piece in cut_text(line.text, self._tokens):
            if piece.control is None and line.split == "byte":
                ids.extend(self._byte_ids(piece.text, piece.ids.tolist()))
            else:
                ids.extend(piece.ids.tolist())
        end = next((place for place, index in enumerate(ids) if index in self._tokens.eos_ids), None)
        ids = [*ids, self._eos] if end is None else ids[: end + 1]
        return ScriptedAnswer(line, tuple(ids), self)

    def under(self, answer: ScriptedAnswer, request: Request, constraint: Constraint) -> ScriptedAnswer:
        """The same text in the tokens that a fresh `constraint` of the request takes; white space is added where it must be.

        Raises `ApiError` (400) with the place where the grammar does not take the text; the line then counts as not used.
        """
        try:
            return replace(answer, ids=follow(answer.ids, constraint, self._vocabulary))
        except CannotFollow as failure:
            self.script.give_back(answer.line)
            raise bad_request(self._explained(answer, request, failure), "messages") from None

    def _explained(self, answer: ScriptedAnswer, request: Request, failure: CannotFollow) -> str:
        text = self._tokens.bytes_for(answer.ids[:-1])
        said, rest = (part.decode("utf-8", "replace") for part in (text[: failure.said_bytes], text[failure.said_bytes :]))
        follows = f"it goes on with {rest[:_SHOWN_CHARACTERS]!r}" if rest else "it ends"
        wanted = failure.wanted.decode("utf-8", "replace")
        wants = f"where the grammar wants {wanted!r}" if wanted else "which the grammar does not allow"
        return (
            f"The scripted answer in line {answer.line.number} cannot be said to this request, whose last turn begins "
            f"{request.turns[-1].text[:_SHOWN_CHARACTERS]!r}: after {len(said)} characters of its text "
            f"({said[-_SHOWN_CHARACTERS:]!r}) {follows}, {wants}. Compare the text with the request's tools, "
            'response_format and thinking, or lift the grammar with "free": true.'
        )

    def _byte_ids(self, text: str, ids: list[int]) -> list[int]:
        """One token for each byte; a vocabulary that lacks one of them keeps its ordinary tokens."""
        found = [self._vocabulary.ordinary.get(bytes([byte])) for byte in text.encode("utf-8", "replace")]
        known = [index for index in found if index is not None]
        return known if len(known) == len(found) else ids

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        added = frozenset(self._tokens.added.values())
        texts = self._tokens.bytes_of
        ordinary = {text: index for index, text in enumerate(texts) if text and index not in added}
        return Vocabulary(texts, ordinary, max(map(len, ordinary), default=1), frozenset(self._tokens.eos_ids))


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One scripted answer as tokens, its end token last."""

    line: ScriptLine
    ids: tuple[int, ...]
    answers: ScriptedAnswers

    @property
    def free(self) -> bool:
        """True when no grammar holds it."""
        return self.line.free

    def forced(self) -> list[int]:
        """The run of tokens to force at once (split "all"), else none."""
        return list(self.ids) if self.line.split == "all" else []

    def under(self, request: Request, constraint: Constraint) -> ScriptedAnswer:
        """See `ScriptedAnswers.under`."""
        return self.answers.under(self, request, constraint)

    def hook(self) -> ScriptHook:
        """What makes a row say it."""
        return ScriptHook(self.ids, self.line.faults)


def _line(text: str, number: int) -> ScriptLine:
    def wrong(what: str) -> ScriptError:
        return ScriptError(f"Line {number} of the script: {what}")

    try:
        value = json.loads(text)
    except ValueError as error:
        raise wrong(f"this is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise wrong(f"it must be a JSON object, not {_kind(value)}.")
    unknown = sorted(set(value) - _FIELDS)
    if unknown:
        raise wrong(f"the field {unknown[0]!r} is unknown; known are {', '.join(sorted(_FIELDS))}.")
    if not isinstance(value.get("text"), str):
        raise wrong(f"`text` must be a string, not {_kind(value.get('text'))}.")
    match, free, split = value.get("match"), value.get("free", False), value.get("split", "token")
    if match is not None and not isinstance(match, str):
        raise wrong(f"`match` must be a string, not {_kind(match)}.")
    if not isinstance(free, bool):
        raise wrong(f"`free` must be true or false, not {_kind(free)}.")
    if split not in get_args(Split):
        raise wrong(f"`split` must be one of {', '.join(get_args(Split))}, not {split!r}.")
    seconds: dict[str, float] = {}
    for name in ("token_seconds", "prefill_seconds_per_1000"):
        amount = value.get(name, 0)
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not math.isfinite(amount) or amount < 0:
            raise wrong(f"`{name}` must be a number of seconds, 0 or more, not {amount!r}.")
        seconds[name] = float(amount)
    kind, at_token = _fault(value.get("fault"), wrong)
    return ScriptLine(number, value["text"], match, split, Faults(kind, at_token, **seconds), free)


def _fault(value: Any, wrong: Any) -> tuple[FaultKind | None, int]:
    if value is None:
        return None, 0
    if not isinstance(value, dict):
        raise wrong(f"`fault` must be an object, not {_kind(value)}.")
    unknown = sorted(set(value) - _FAULT_FIELDS)
    if unknown:
        raise wrong(f"the field 'fault.{unknown[0]}' is unknown; known are {', '.join(sorted(_FAULT_FIELDS))}.")
    kind, at_token = value.get("kind"), value.get("at_token", 0)
    if kind not in get_args(FaultKind):
        raise wrong(f"`fault.kind` must be one of {', '.join(get_args(FaultKind))}, not {kind!r}.")
    if isinstance(at_token, bool) or not isinstance(at_token, int) or at_token < 0:
        raise wrong(f"`fault.at_token` must be a whole number, 0 or more, not {at_token!r}.")
    return kind, at_token


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names[type(value)]
