"""Why a prompt was not reused, or not all of it: the nearest prompt known, the first difference, and a class of reason.

The ids of recent prompts are remembered for this even when the pool has dropped their caches. All positions are in tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.request import Request, Role, ToolCall, Turn
from pooled_mlx.prompt.exact_ids import Ids, agreement, as_ids, canonical_answer, canonical_reasoning

ReasonKind = Literal[
    "reused",
    "new",
    "evicted",
    "edited",
    "system changed",
    "tools changed",
    "reasoning missing",
    "options differ",
    "short",
]
"""`reused` means: all that could be. `short`: all of it is known, and that is less than the least checkpoint."""

Decode = Callable[[Sequence[int]], str]

_RELATED_TOKENS = 64
_RELATED_SHARE = 0.1
"""Two system prompts are versions of one from so many tokens of one client, or from this share of the whole, on."""
_WINDOW_TOKENS = 16
_WORD_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class TurnFact:
    """One turn of a prompt: where it starts, which message of the request it is, and digests of what it says.

    `reasoning` is b"" where there is none.
    """

    start: int
    message: int
    role: Role
    digest: bytes
    reasoning: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class PromptFacts:
    """What is remembered of a prompt. `head` is where its generation prompt begins: nothing behind that is history."""

    ids: Ids
    head: int
    system_end: int
    turns: tuple[TurnFact, ...]
    system: bytes
    tools: bytes
    options: str
    label: str

    def answered(self, ids: Sequence[int], text: str, calls: Sequence[ToolCall], reasoning: str = "") -> PromptFacts:
        """The same with its answer: `ids` are the generated ones."""
        whole = np.concatenate([self.ids, as_ids(ids)])
        message = self.turns[-1].message + 1 if self.turns else 0
        turn = _turn_fact(Turn("assistant", text, reasoning, tuple(calls)), self.head, message)
        return replace(self, ids=whole, head=len(whole), turns=(*self.turns, turn))

    @property
    def size_bytes(self) -> int:
        """Bytes it takes, reckoned."""
        return self.ids.nbytes + 200 * len(self.turns) + 1000


def prompt_facts(request: Request, ids: Ids, *, head: int, system_end: int, turns: Sequence[tuple[int, int]]) -> PromptFacts:
    """The facts of a rendered request. `turns` are (start, index of the request turn), ascending; `head` 0 means unknown."""
    system = next((turn.text for turn in request.turns if turn.role == "system"), "")
    tools = sorted(json.dumps([t.name, t.description, t.parameters], sort_keys=True, default=str) for t in request.tools)
    thinking = request.thinking
    return PromptFacts(
        ids=ids,
        head=head or len(ids),
        system_end=system_end,
        turns=tuple(_turn_fact(request.turns[index], start, index) for start, index in turns),
        system=_digest(system),
        tools=_digest(*tools),
        options=f"{thinking.on} {thinking.effort} {request.tool_choice.mode == 'none'}",
        label=request.client,
    )


def _turn_fact(turn: Turn, start: int, message: int) -> TurnFact:
    if turn.role == "assistant":
        said = canonical_answer(turn.text, turn.tool_calls).digest[:16]
        reasoning = canonical_reasoning(turn.reasoning or "")
        return TurnFact(start, message, turn.role, said, _digest(reasoning) if reasoning else b"")
    return TurnFact(start, message, turn.role, _digest(turn.role, turn.text.strip()))


def _digest(*texts: str) -> bytes:
    return hashlib.sha256(json.dumps(texts).encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Reason:
    """How much of a prompt was reused and why not more.

    `position` is the first token that differs from the nearest known prompt and `message` the number of its message, counted
    from 1; `before` and `now` are the words there. All are None or "" where nothing differs.
    """

    kind: ReasonKind
    cached: int
    total: int
    position: int | None = None
    message: int | None = None
    before: str = ""
    now: str = ""

    def note(self, *, words: bool = True) -> str:
        """One line for people. Without `words` nothing of the conversation is in it."""
        count = f"reused {self.cached} of {self.total}"
        if self.kind == "reused":
            return f"{count} tokens"
        if self.kind == "short":
            return f"{count}: shorter than the least checkpoint"
        text = f"{count}: {self.kind}"
        if self.message is not None and self.kind not in ("system changed", "tools changed"):
            text += f" in turn {self.message}"
        elif self.position is not None:
            text += f" at token {self.position}"
        if words and self.position is not None:
            text += f" (…{_quoted(self.before)}… / …{_quoted(self.now)}…)"
        return text

    def as_json(self) -> Mapping[str, Any]:
        """The shape in `GET /pool`."""
        return {
            "kind": self.kind,
            "cached_tokens": self.cached,
            "prompt_tokens": self.total,
            "position": self.position,
            "turn": self.message,
            "before": self.before,
            "now": self.now,
            "note": self.note(),
        }


class RecentPrompts:
    """The newest prompts of recent conversations, the least recently used forgotten first. Owned by the engine thread."""

    def __init__(self, rule: CutRule, *, divisible: bool, budget_bytes: int = 32 << 20, most: int = 64) -> None:
        self._slack = rule.step if divisible else rule.spacing
        self._minimum = rule.minimum
        self._budget_bytes = budget_bytes
        self._most = most
        self._known: list[PromptFacts] = []

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        """Bytes held, at most the budget."""
        return sum(facts.size_bytes for facts in self._known)

    def remember(self, facts: PromptFacts) -> None:
        """Keep a prompt; it takes the place of those that it continues."""
        self._known = [known for known in self._known if agreement(known.ids[: known.head], facts.ids) < known.head]
        self._known.append(facts)
        size = self.bytes
        while self._known and (len(self._known) > self._most or size > self._budget_bytes):
            size -= self._known.pop(0).size_bytes

    def explain(self, facts: PromptFacts, cached: int, matched: int, decode: Decode) -> Reason:
        """Why `cached` tokens of a prompt were reused. `matched` of its ids agree with what the pool holds.

        Call it before the prompt itself is remembered. `decode` turns ids into text.
        """
        total = len(facts.ids)
        known, common = self._nearest(facts)
        if known is None:
            return Reason("new", cached, total)
        common = min(common, known.head, facts.head)
        lost = matched < common - self._minimum or cached < matched - self._slack
        if common == min(known.head, facts.head):
            # Nothing that is history in both differs.
            short = not cached and 0 < common < self._minimum
            return Reason("evicted" if lost else "short" if short else "reused", cached, total)
        kind, message = self._difference(facts, known, common)
        if kind == "new":
            # A shared system prompt is all that a new conversation can reuse.
            return Reason("evicted" if lost and common >= self._minimum else "new", cached, total)
        if matched < common - self._minimum:
            kind = "evicted"
        before, now = words_apart(known.ids, facts.ids, common, decode)
        return Reason(kind, cached, total, common, message, before, now)

    def _nearest(self, facts: PromptFacts) -> tuple[PromptFacts | None, int]:
        """The known prompt that agrees longest with this one, the newest of equals."""
        best: PromptFacts | None = None
        most = 0
        said = {turn.digest for turn in facts.turns if turn.role != "system"}
        shares_most = -1
        for known in reversed(self._known):
            common = agreement(known.ids, facts.ids)
            # Among prompts that differ at the same place, the one with more of the same turns is the same conversation.
            shares = sum(1 for turn in known.turns if turn.digest in said) if common >= most else 0
            if common > most or (common == most and shares > shares_most):
                best, most, shares_most = known, common, shares
        if most == 0 and shares_most <= 0:
            return None, 0
        return best, most

    def _difference(self, facts: PromptFacts, known: PromptFacts, common: int) -> tuple[ReasonKind, int | None]:
        said = {turn.digest for turn in known.turns if turn.role != "system"}
        shared_later = any(turn.digest in said for turn in facts.turns if turn.start > common and turn.role != "system")
        if common < max(facts.system_end, known.system_end):
            if not shared_later and not self._related(facts, known, common):
                return "new", None
            return _front_difference(facts, known), 1 if facts.turns and facts.turns[0].role == "system" else None
        place = max((n for n, turn in enumerate(facts.turns) if turn.start <= common), default=None)
        if place is None:
            return "new" if not shared_later else _front_difference(facts, known), None
        turn = facts.turns[place]
        first = next((n for n, one in enumerate(facts.turns) if one.role != "system"), 0)
        if place <= first and not shared_later:
            return "new", None
        other = next((one for one in known.turns if one.start == turn.start), None)
        if other is not None and other.digest == turn.digest and other.role == turn.role:
            if other.reasoning and not turn.reasoning:
                return "reasoning missing", turn.message + 1
            if other.reasoning == turn.reasoning and known.options != facts.options:
                return "options differ", turn.message + 1
        return "edited", turn.message + 1

    @staticmethod
    def _related(facts: PromptFacts, known: PromptFacts, common: int) -> bool:
        if facts.system == known.system or (facts.label == known.label and common >= _RELATED_TOKENS):
            return True
        return common >= max(_RELATED_TOKENS, _RELATED_SHARE * max(facts.system_end, known.system_end))


def _front_difference(facts: PromptFacts, known: PromptFacts) -> ReasonKind:
    if facts.system != known.system:
        return "system changed"
    if facts.tools != known.tools:
        return "tools changed"
    return "options differ" if facts.options != known.options else "system changed"


def words_apart(one: Ids, two: Ids, at: int, decode: Decode) -> tuple[str, str]:
    """The first words in which two texts differ that agree up to token `at`, each at most some dozens of characters long."""
    start, end = max(0, at - _WINDOW_TOKENS), at + _WINDOW_TOKENS
    texts = [decode([int(i) for i in ids[start:end]]) for ids in (one, two)]
    shorter = min(map(len, texts))
    apart = next((n for n in range(shorter) if texts[0][n] != texts[1][n]), shorter)
    begin = max(texts[0].rfind(character, 0, apart) for character in " \n\t") + 1
    begin = max(begin, apart - _WORD_CHARACTERS)
    words = [_word(text, begin, apart) for text in texts]
    if words[0] == words[1]:  # they differ in white space
        words = [text[begin : apart + _WORD_CHARACTERS] for text in texts]
    return words[0], words[1]


def _word(text: str, begin: int, apart: int) -> str:
    end = apart
    while end < len(text) and not text[end].isspace() and end < apart + _WORD_CHARACTERS:
        end += 1
    return text[begin:end]


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in quoted)
