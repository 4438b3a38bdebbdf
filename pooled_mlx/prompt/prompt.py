"""From a request to the token ids of its prompt and the places where the pool may cut them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import bad_request
from pooled_mlx.core.request import Request, Tool
from pooled_mlx.prompt.call_form import call_form
from pooled_mlx.prompt.conversation import (
    Message,
    arrange,
    hidden,
    last_user,
    listing,
    names_of,
    read_turns,
    strings_of,
)
from pooled_mlx.prompt.defuse import ControlText, Disguise, strings_in
from pooled_mlx.prompt.exact_ids import ExactIds, Ids
from pooled_mlx.prompt.layout import lay_out
from pooled_mlx.prompt.spans import TextSpan, cut_ids, cut_text
from pooled_mlx.prompt.template_traits import learn_traits, leaves_open, template_options, without_empty_thoughts
from pooled_mlx.prompt.templates import ChatTemplate, Dates, TemplateFailed
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.prompt.tool_forms import ToolForm, ToolForms


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rendered request.

    `ids` [tokens], read-only. `boundaries` are positions 0 < b < len(ids), ascending. `head` is where the generation prompt
    begins, the turn that will be written (0 where the template has no mark for it). `system_end` is the end of system prompt
    and tools (0 where they are no turn of their own). `turns` are (start, index of the request turn), as far as they are
    known. `opened` is the text of the generation prompt after its header, `reasoning_open` whether that leaves a reasoning
    block open. `history` is the digest of the ids before `head`. `tools` are the request's tools in the order of the prompt.
    """

    ids: Ids
    boundaries: tuple[int, ...]
    head: int
    system_end: int
    reasoning_open: bool
    opened: str
    turns: tuple[tuple[int, int], ...]
    history: bytes
    tools: tuple[Tool, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


class PromptBuilder:
    """Builds prompts for one model. `build` may run in several threads at once.

    `exact_ids` gives back the ids of answers that were generated here.
    """

    def __init__(
        self,
        tokens: Tokens,
        template: ChatTemplate,
        card: ModelCard,
        *,
        exact_ids: ExactIds | None = None,
        dates: Dates | None = None,
    ) -> None:
        self.tokens = tokens
        self.template = template
        self.card = card
        self.call_form = call_form(template, tokens, card.chat_format)
        self.traits = learn_traits(template, tokens, card.thinking, self.call_form.native)
        self.exact_ids = exact_ids
        self._dates = dates or Dates()
        self._control = ControlText(tokens, template.source)
        self._forms = ToolForms(self._control.is_clean, self._control.is_clean_name)
        self._in_pieces = self._pieces_agree()

    def build(self, request: Request) -> Prompt:
        """Render and encode. CPU work only. Raises `ApiError` (400) where the conversation cannot be rendered."""
        try:
            return self._build(request)
        except RecursionError:
            raise bad_request(
                "A tool schema or the arguments of a tool call are nested too deeply. Send at most some hundred levels.",
                "messages",
            ) from None

    def _build(self, request: Request) -> Prompt:
        rule = self.card.thinking
        dropped = self.card.drop_tools_when_none and request.tool_choice.mode == "none"
        form = self._forms.form(() if dropped else request.tools)
        said = read_turns(request, self.traits)
        disguise = self._disguise(said, form)
        tools, listed = form.tools, list(form.listing)
        if disguise is not None:
            said = hidden(said, disguise)
            tools = tuple(_hidden_tool(tool, disguise) for tool in tools)
            listed = listing(tools)
        said = arrange(said, tools, self.traits)
        options = template_options(rule, request.thinking)
        strings = () if disguise or not any(map(_has_reasoning, said)) else [*strings_of(said), *strings_in(form.listing)]
        tags = disguise or Disguise(self._control, strings)
        rendered = self._render(said, listed if self.traits.native_tools else [], options, tags, form)
        layout = lay_out(self._pieces(rendered, disguise), self.tokens, self.traits, said, request.turns, self.exact_ids)
        return Prompt(
            ids=layout.ids,
            boundaries=layout.boundaries,
            head=layout.head,
            system_end=layout.system_end,
            reasoning_open=leaves_open(layout.opened),
            opened=layout.opened,
            turns=layout.turns,
            history=layout.history,
            tools=form.tools,
        )

    def _disguise(self, said: Sequence[Message], form: ToolForm) -> Disguise | None:
        """The stand-ins of a request that needs them."""
        control = self._control
        if form.clean and all(map(control.is_clean, strings_of(said))) and all(map(control.is_clean_name, names_of(said))):
            return None
        return Disguise(control, [*strings_of(said), *strings_in(form.listing)])

    def _render(
        self,
        said: Sequence[Message],
        listed: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        disguise: Disguise,
        form: ToolForm,
    ) -> str:
        """The conversation as text, every reasoning text that was sent in it."""
        now = self._moment(said, options, form) if self.template.uses_date else None
        last = last_user(said)
        traits = self.traits
        inline = {
            place
            for place, one in enumerate(said)
            if _has_reasoning(one) and not (traits.keeps_always or (traits.keeps_chain and place > last))
        }
        while True:
            messages = [self._message(one, place in inline, disguise) for place, one in enumerate(said)]
            try:
                text = self.template.render(messages, tools=listed or None, options=options, now=now)
            except TemplateFailed as error:
                raise error.refusal() from error
            lost = _lost_reasoning(text, said) - inline
            if not lost:
                if inline:
                    text = without_empty_thoughts(text, disguise.tag(self.traits.think_before))
                return disguise.show_tags(text)
            inline |= lost

    def _message(self, one: Message, inline: bool, disguise: Disguise) -> dict[str, Any]:
        message: dict[str, Any] = {"role": one.role, "content": one.text}
        if inline:
            before, after = disguise.tag(self.traits.think_before), disguise.tag(self.traits.think_after)
            # The empty string keeps templates from looking for reasoning in the text.
            message |= {"content": f"{before}{(one.reasoning or '').strip()}{after}{one.text}", "reasoning_content": ""}
        elif _has_reasoning(one):
            message |= {"reasoning_content": one.reasoning, "thinking": one.reasoning}
        if one.calls:
            message["tool_calls"] = [
                {
                    "id": self._id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call.arguments)},
                }
                for call in one.calls
            ]
        if one.role == "tool":
            message |= {"tool_call_id": self._id(one.call_id or "")} | ({"name": one.name} if one.name else {})
        return message

    def _id(self, call_id: str) -> str:
        """A call's id; templates that want nine letters and digits get them."""
        return _digest(call_id).hex()[:9] if self.traits.short_ids else call_id

    def _arguments(self, arguments: object) -> object:
        """A call's arguments; templates that take text only get JSON."""
        if isinstance(arguments, str) or not self.traits.written_arguments:
            return arguments
        return json.dumps(arguments, ensure_ascii=False)

    def _moment(self, said: Sequence[Message], options: Mapping[str, Any], form: ToolForm) -> datetime:
        system = said[0].text if said[0].role == "system" else ""
        first = next((one.text for one in said if one.role == "user"), "")
        prefix = json.dumps([system, form.digest.hex(), options], sort_keys=True, default=str)
        return self._dates.moment(_digest(prefix), _digest(prefix, first))

    def _pieces(self, rendered: str, disguise: Disguise | None) -> list[TextSpan]:
        if disguise is not None:
            return cut_text(rendered, self.tokens, disguise.show)
        pieces = cut_text(rendered, self.tokens)
        if not self._in_pieces:
            whole = cut_ids(self.tokens.encode_with_control(rendered), self.tokens)
            if [piece.control for piece in whole if piece.control] == [piece.control for piece in pieces if piece.control]:
                return whole
        return pieces

    def _pieces_agree(self) -> bool:
        """Whether encoding in pieces gives the ids of encoding the whole. Checked on real renderings of this template."""
        for text in self.traits.samples:
            whole = self.tokens.encode_with_control(text)
            pieces = cut_text(text, self.tokens)
            if not np.array_equal(whole, np.concatenate([piece.ids for piece in pieces])):
                return False
        return True


def _has_reasoning(one: Message) -> bool:
    return one.role == "assistant" and one.reasoning is not None and bool(one.reasoning.strip())


def _lost_reasoning(text: str, said: Sequence[Message]) -> set[int]:
    """The messages whose reasoning is not in the rendered text."""
    lost: set[int] = set()
    place = 0
    for number, one in enumerate(said):
        if _has_reasoning(one):
            reasoning = (one.reasoning or "").strip()
            found = text.find(reasoning, place)
            if found < 0:
                lost.add(number)
            else:
                place = found + len(reasoning)
    return lost


def _hidden_tool(tool: Tool, disguise: Disguise) -> Tool:
    return replace(
        tool,
        name=disguise.hide_name(tool.name),
        description=disguise.hide(tool.description),
        parameters=tool.parameters if isinstance(tool.parameters, bool) else disguise.hide_schema(tool.parameters),
        grammar=tool.grammar and replace(tool.grammar, definition=disguise.hide(tool.grammar.definition)),
    )


def _digest(*texts: str) -> bytes:
    return hashlib.sha256(json.dumps(texts).encode()).digest()
