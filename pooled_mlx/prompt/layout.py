"""Lays out the pieces of a rendered prompt: boundaries, turns, and the exact ids of answers that were generated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pooled_mlx.core.request import Turn
from pooled_mlx.prompt.conversation import Message, last_user
from pooled_mlx.prompt.exact_ids import ExactIds, HistoryHash, Ids, Known, canonical_answer
from pooled_mlx.prompt.spans import TextSpan, control_span, cut_text
from pooled_mlx.prompt.template_traits import TemplateTraits
from pooled_mlx.prompt.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is in the final ids [tokens]; see `Prompt`."""

    ids: Ids
    boundaries: tuple[int, ...]
    head: int
    system_end: int
    turns: tuple[tuple[int, int], ...]
    history: bytes
    opened: str


@dataclass(slots=True)
class _Writer:
    """The final ids so far."""

    parts: list[Ids] = field(default_factory=list[Ids])
    length: int = 0
    boundaries: set[int] = field(default_factory=set[int])
    history: HistoryHash = field(default_factory=HistoryHash)

    def write(self, ids: Ids) -> None:
        self.parts.append(ids)
        self.length += len(ids)
        self.history.add(ids)


def lay_out(
    pieces: Sequence[TextSpan],
    tokens: Tokens,
    traits: TemplateTraits,
    said: Sequence[Message],
    turns: Sequence[Turn],
    exact_ids: ExactIds | None,
) -> Layout:
    """Join the pieces, with the known ids of answers in place of their rendering. `said` are the messages that were rendered.

    Where the turns in the pieces cannot be told apart for sure, nothing is replaced: a miss, never a wrong hit.
    """
    plan = _Plan(pieces, traits, said)
    writer = _Writer()
    starts: dict[int, int] = {}
    head, history, place = 0, b"", 0
    closed: int | None = None
    while place < len(pieces):
        piece = pieces[place]
        if piece.control in traits.openers:
            # What stands between an answer's end token and the next opener belongs to the next turn.
            starts[place] = writer.length if closed is None else closed
            writer.boundaries.add(starts[place])
            closed = None
        if place == plan.head:
            head, history = writer.length, writer.history.digest()
            writer.boundaries.add(head)
        if place in plan.ends:
            end = plan.ends[place]
            known = _known(plan, place, writer, turns, exact_ids)
            if known is not None:
                writer.write(_without_next_opener(known.ids, tokens, traits))
                if end is not None and int(known.ids[-1]) not in traits.enders:
                    writer.boundaries.add(writer.length)
                    writer.write(pieces[end].ids)
            else:
                turn_pieces, source = pieces[place : plan.stop(place)], plan.only_source(place)
                if source is not None:
                    turn_pieces = with_lost_text(turn_pieces, plan.headers[place], turns[source], traits, tokens)
                for turn_piece in turn_pieces:
                    writer.write(turn_piece.ids)
            place = plan.stop(place)
            closed = None if end is None else writer.length
            if closed is not None:
                writer.boundaries.add(closed)
            continue
        writer.write(piece.ids)
        if not traits.openers and piece.control in traits.enders:
            writer.boundaries.add(writer.length)
        place += 1
    ids = np.concatenate(writer.parts) if writer.parts else np.zeros(0, dtype=np.uint32)
    ids.flags.writeable = False
    return Layout(
        ids=ids,
        boundaries=tuple(sorted(b for b in writer.boundaries if 0 < b < len(ids))),
        head=head,
        system_end=starts.get(plan.first_turn, 0) if plan.first_turn is not None else 0,
        turns=tuple((starts[place], source) for place, source in plan.turns if place in starts),
        history=history or writer.history.digest(),
        opened=plan.opened,
    )


class _Plan:
    """Which piece begins which message.

    `headers` maps the piece that opens an assistant turn to what it begins with, `ends` the one of a past turn to the piece
    that ends it (None without an end token). `head` is the piece that opens the generation prompt.
    """

    def __init__(self, pieces: Sequence[TextSpan], traits: TemplateTraits, said: Sequence[Message]) -> None:
        self._pieces = pieces
        self._traits = traits
        self._said = said
        self._last_user = last_user(said)
        self._openers = [place for place, piece in enumerate(pieces) if piece.control in traits.openers]
        self.headers = {place: header for place in self._openers if (header := self._header(place)) is not None}
        answers = list(self.headers)
        spoken = [number for number, one in enumerate(said) if one.role == "assistant"]
        sure = len(answers) == len(spoken) + 1
        is_last = bool(answers) and all(not piece.text.strip() for piece in pieces[answers[-1] + 1 :])
        self.head = answers[-1] if answers and (sure or traits.opens_head or is_last) else -1
        self.ends: dict[int, int | None] = {}
        self.message: dict[int, int] = dict(zip(answers, spoken, strict=False)) if sure else {}
        self._stops: dict[int, int] = {}
        for place in self.message:
            following = next((other for other in self._openers if other > place), len(pieces))
            end = next((other for other in range(place + 1, following) if pieces[other].control in traits.enders), None)
            self.ends[place] = end
            self._stops[place] = following if end is None else end + 1
        self.turns: list[tuple[int, int]] = []
        self.first_turn: int | None = None
        if sure:
            self._place_turns(answers)
        self.opened = self._opened()

    def stop(self, place: int) -> int:
        """The piece after the assistant turn that begins at `place`."""
        return self._stops[place]

    def keeps(self, number: int) -> bool:
        """Whether the template keeps the reasoning of message `number`."""
        return self._traits.keeps_always or (self._traits.keeps_chain and number > self._last_user)

    def only_source(self, place: int) -> int | None:
        """The one request turn in the message that begins at `place`."""
        sources = self._said[self.message[place]].sources
        return sources[0] if len(sources) == 1 else None

    def _header(self, place: int) -> str | None:
        """The header of the assistant turn that begins at `place`, None where another turn begins."""
        for header in self._traits.headers:
            bare = header.rstrip()
            if not self._text_from(place, len(bare)).startswith(bare):
                continue
            if self._pieces[place].control not in self._traits.speakers:
                following = next((piece for piece in self._pieces[place + 1 :] if piece.text.strip()), None)
                if following is not None and following.control in self._traits.speakers:
                    return None
            return header
        return None

    def _text_from(self, place: int, characters: int) -> str:
        text = ""
        while len(text) < characters and place < len(self._pieces):
            text += self._pieces[place].text
            place += 1
        return text

    def _opened(self) -> str:
        if self.head < 0:
            return ""
        text = "".join(piece.text for piece in self._pieces[self.head :])
        header = self.headers[self.head]
        return text[len(header if text.startswith(header) else header.rstrip()) :]

    def _place_turns(self, answers: Sequence[int]) -> None:
        """Pair the openers between two assistant turns with the messages between them."""
        number = 0
        before = -1
        for answer in answers:
            places = [
                place
                for place in self._openers
                if before < place < answer and self._pieces[place].control in self._traits.speakers
            ]
            run: list[Message] = []
            while number < len(self._said) and self._said[number].role != "assistant":
                run.append(self._said[number])
                number += 1
            self._place_run(places, run, leading=before < 0)
            if answer in self.message:
                self._place(answer, self._said[self.message[answer]])
                number += 1
            before = answer

    def _place_run(self, places: list[int], run: list[Message], *, leading: bool) -> None:
        has_system = leading and bool(run) and run[0].role == "system"
        for groups in ([[one] for one in run], _grouped(run)):
            if len(places) == len(groups):
                pairs = list(zip(places, groups, strict=True))
            elif leading and has_system and len(places) == len(groups) - 1:
                pairs = list(zip(places, groups[1:], strict=True))
            elif leading and len(places) == len(groups) + 1:
                pairs = list(zip(places[1:], groups, strict=True))
            else:
                continue
            for place, group in pairs:
                self._place(place, group[0])
                if leading and self.first_turn is None and group[0].role != "system":
                    self.first_turn = place
            return

    def _place(self, place: int, one: Message) -> None:
        if one.sources:
            self.turns.append((place, one.sources[0]))


def _grouped(run: Sequence[Message]) -> list[list[Message]]:
    groups: list[list[Message]] = []
    for one in run:
        if groups and one.role == "tool" and groups[-1][-1].role == "tool":
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _known(plan: _Plan, place: int, writer: _Writer, turns: Sequence[Turn], exact_ids: ExactIds | None) -> Known | None:
    """The ids of a turn that was generated here and came back unedited.

    Reasoning that was sent must be the one that was generated. Reasoning that was not sent is restored while the template
    would keep it; where it would drop it, only an answer without reasoning is restored.
    """
    source = plan.only_source(place)
    if exact_ids is None or source is None:
        return None
    turn = turns[source]
    history, answer = writer.history.digest(), canonical_answer(turn.text, turn.tool_calls)
    if turn.reasoning is not None and turn.reasoning.strip():
        return exact_ids.find(history, answer, turn.reasoning)
    if plan.keeps(plan.message[place]):
        return exact_ids.find(history, answer)
    return exact_ids.find(history, answer, "")


def _without_next_opener(ids: Ids, tokens: Tokens, traits: TemplateTraits) -> Ids:
    """Some models end their turn with the opener of the next one, which the template writes anyway."""
    last = int(ids[-1])
    return ids[:-1] if last in traits.openers and last in tokens.eos_ids else ids


# --- what a template leaves out

_THOUGHT, _TEXT = "\ue000", "\ue001"
"""Stand for a thought and a text while their surroundings are encoded."""


def with_lost_text(
    pieces: Sequence[TextSpan], header: str, turn: Turn, traits: TemplateTraits, tokens: Tokens
) -> list[TextSpan]:
    """The pieces of one assistant turn, with what the template left out of it right after its `header`."""
    if not turn.tool_calls:
        return list(pieces)
    whole = "".join(piece.text for piece in pieces)
    text, reasoning = turn.text.strip(), (turn.reasoning or "").strip()
    form = ""
    if reasoning and reasoning not in whole:
        form = f"{traits.think_before}{_THOUGHT}{traits.think_after}"
    if text and text not in whole:
        form += _TEXT
    if not form:
        return list(pieces)
    found = {ord(_THOUGHT): reasoning, ord(_TEXT): text}
    lost = [(piece.text, piece.control) for piece in cut_text(form, tokens, lambda part: part.translate(found))]
    before, after = _split(pieces, len(header if whole.startswith(header) else header.rstrip()))
    if after and after[0][1] is None:
        lost.append(("\n\n", None))
    return _encoded([*before, *lost, *after], tokens)


def _split(pieces: Sequence[TextSpan], characters: int) -> tuple[list[tuple[str, int | None]], list[tuple[str, int | None]]]:
    before: list[tuple[str, int | None]] = []
    after: list[tuple[str, int | None]] = []
    for piece in pieces:
        head, rest = piece.text[:characters], piece.text[characters:]
        if head:
            before.append((head, piece.control))
        if rest:
            after.append((rest, piece.control))
        characters = max(characters - len(piece.text), 0)
    return before, after


def _encoded(spans: Sequence[tuple[str, int | None]], tokens: Tokens) -> list[TextSpan]:
    joined: list[tuple[str, int | None]] = []
    for text, control in spans:
        if control is None and joined and joined[-1][1] is None:
            joined[-1] = (joined[-1][0] + text, None)
        else:
            joined.append((text, control))
    pieces: list[TextSpan] = []
    for text, control in joined:
        pieces.append(
            TextSpan(tokens.encode_plain(text, inside=True), text) if control is None else control_span(control, text)
        )
    return pieces
