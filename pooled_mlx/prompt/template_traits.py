"""What one chat template does with a conversation, learned at load by rendering short probes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pooled_mlx.chat_formats.kimi import call_id
from pooled_mlx.core.card import ThinkingRule
from pooled_mlx.core.request import Thinking
from pooled_mlx.prompt.templates import ChatTemplate, TemplateFailed
from pooled_mlx.prompt.tokens import TokenizerError, Tokens

THINK_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<reasoning>", "</reasoning>"),
)
_USER, _SECOND, _ANSWER, _THOUGHT = "quokka asks", "quokka again", "wombat says", "numbat thinks"
_SYSTEM, _RESULT, _TOOL, _ARGUMENT = "dingo rules", "bilby found", "kea_lookup", "tuatara"
_CALL_ID, _LONG_ID = "abcdefgh1", "call_0123456789abcdef"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The habits of a template.

    `speakers` are the ids that begin a turn of the user, a group of results, or any turn. `headers` are what assistant turns
    begin with, each with a control token first; where that is no speaker (Mistral's [/INST]) it ends the turn before as well.
    `openers` are the speakers and the first tokens of the headers, `enders` the ids that end a turn. `think_before` and
    `think_after` stand around a reasoning text in a past turn. `keeps_chain`: reasoning stays while no user turn follows;
    `keeps_always`: it stays.
    `native_tools`: it lists tools and renders calls and results. `text_arguments`: arguments that are no object may be text;
    `written_arguments`: all must be text. `named_ids`: it writes a call's id, which must tell the tool, in place of the name.
    `needs_user`: it wants a user turn somewhere; `alternates`: user and assistant must take turns. `opens_head`: the
    generation prompt has an opener of its own. `short_ids`: ids of calls must be nine letters and digits. `samples` are
    renderings to check encoders with.
    """

    speakers: frozenset[int] = frozenset()
    headers: tuple[str, ...] = ()
    openers: frozenset[int] = frozenset()
    enders: frozenset[int] = frozenset()
    think_before: str = "<think>\n"
    think_after: str = "\n</think>\n\n"
    keeps_chain: bool = False
    keeps_always: bool = False
    native_tools: bool = False
    text_arguments: bool = False
    written_arguments: bool = False
    named_ids: bool = False
    system: bool = True
    needs_user: bool = False
    alternates: bool = False
    opens_head: bool = False
    short_ids: bool = False
    samples: tuple[str, ...] = ()

    @property
    def header(self) -> str:
        """What the generation prompt begins with, "" where that cannot be told."""
        return self.headers[0] if self.headers else ""


def template_options(rule: ThinkingRule, thinking: Thinking) -> dict[str, Any]:
    """The template variables for a way of thinking."""
    if not rule.supported:
        return {}
    options: dict[str, Any] = {**rule.keep_options, rule.switch: thinking.on}
    if thinking.on and thinking.effort and rule.effort_variable and thinking.effort in rule.efforts:
        options[rule.effort_variable] = rule.efforts[thinking.effort]
    return options


def leaves_open(opened: str) -> bool:
    """Whether a text ends inside a reasoning block."""
    return any(opened.rfind(start) > opened.rfind(end) for start, end in THINK_TAGS)


def learn_traits(template: ChatTemplate, tokens: Tokens, rule: ThinkingRule, native_format: bool = True) -> TemplateTraits:
    """Probe a template. Raises `TokenizerError` when it cannot render the simplest conversation.

    `native_format` says that answers are read in the form in which this template writes calls. Without it the template's own
    way of tools is left alone, and the generic one is used throughout.
    """
    return _Probe(template, tokens, rule, native_format).learn()


def without_empty_thoughts(text: str, following: str) -> str:
    """Remove the empty reasoning blocks that a template wrote directly before `following`."""
    for start, end in THINK_TAGS:
        if start in text:
            empty = re.escape(start) + r"\s*" + re.escape(end) + r"\s*" + f"(?={re.escape(following)})"
            text = re.sub(empty, "", text)
    return text


class _Probe:
    def __init__(self, template: ChatTemplate, tokens: Tokens, rule: ThinkingRule, native_format: bool) -> None:
        self._native_format = native_format
        self._template = template
        self._tokens = tokens
        self._options = template_options(rule, Thinking(on=True))
        self._options_off = template_options(rule, Thinking(on=False))
        self._arguments: Any = {"query": _ARGUMENT}
        self._id = _CALL_ID

    def render(
        self, *messages: Mapping[str, Any], tools: bool = False, prompt: bool = False, options: Mapping[str, Any] | None = None
    ) -> str:
        return self._template.render(
            list(messages),
            tools=[_tool()] if tools else None,
            generation_prompt=prompt,
            options=self._options if options is None else options,
        )

    def attempt(self, *messages: Mapping[str, Any], tools: bool = False, prompt: bool = False) -> str:
        """`render`, or "" where the template refuses."""
        try:
            return self.render(*messages, tools=tools, prompt=prompt)
        except TemplateFailed:
            return ""

    def call(self, arguments: Any = None, **more: Any) -> dict[str, Any]:
        """An assistant turn with one call, in the way this template takes it."""
        return _call(self._arguments if arguments is None else arguments, **{"id": self._id, **more})

    def result(self) -> dict[str, Any]:
        return _result(self._id)

    def learn(self) -> TemplateTraits:
        try:
            prompts = {
                options: [self.render(_said("user", _USER), prompt=prompt, options=way) for prompt in (False, True)]
                for options, way in (("on", self._options), ("off", self._options_off))
            }
        except TemplateFailed as error:
            raise TokenizerError(f"The model's chat template cannot render one user message: {error}") from None
        talk = self.attempt(_said("user", _USER), _said("assistant", _ANSWER), _said("user", _SECOND))
        closers = self.controls(_between(talk, _SECOND, None))
        after_answer = self.controls(_between(talk, _ANSWER, _SECOND))
        generated = [prompt[len(_common_start([asked, prompt])) :] for asked, prompt in prompts.values()]
        first = self.controls(generated[0])
        before_answer = self.controls(_between(talk, _USER, _ANSWER))
        opener = first[0] if first else (before_answer[-1] if before_answer else None)
        eos = {self._tokens.text_of(index) for index in self._tokens.eos_ids}
        # A model may end its turn with the opener of the next one: then that opener is an end token, too.
        speakers = [text for text in after_answer if text not in eos and (text not in closers or text == opener)]
        speakers = speakers or [text for text in after_answer if text not in closers]
        native = self._native_format and self.native_tools()
        speaking = {text for text in (speakers[0] if speakers else None, self.result_opener() if native else None) if text}
        headers = [self.header(opener, generated, talk)] if opener else []
        if native and opener and not first:
            headers += self.header_after_result(opener)
        openers = speaking | {self.controls(header)[0] for header in headers}
        stop = after_answer.index(speakers[0]) if speakers else len(after_answer)
        enders = (eos | set(after_answer[:stop])) - openers
        before, after = self.think_form(headers[0] if headers else "")
        thinks = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        chain = self.attempt(_said("user", _USER), self.call(**thinks), self.result(), tools=True) if native else ""
        always = self.attempt(_said("user", _USER), _said("assistant", _ANSWER, **thinks), _said("user", _SECOND))
        keeps_always = _THOUGHT in always
        return TemplateTraits(
            speakers=self.ids(speaking),
            headers=tuple(headers),
            openers=self.ids(openers),
            enders=self.ids(enders),
            think_before=before,
            think_after=after,
            keeps_chain=keeps_always or _THOUGHT in chain,
            keeps_always=keeps_always,
            native_tools=native,
            written_arguments=native and isinstance(self._arguments, str),
            named_ids=native and self._id != _CALL_ID,
            text_arguments=native
            and _ARGUMENT in self.attempt(_said("user", _USER), self.call(_ARGUMENT), self.result(), tools=True),
            system=_SYSTEM in self.attempt(_said("system", _SYSTEM), _said("user", _USER)),
            needs_user=not self.attempt(
                *([self.call(), self.result()] if native else [_said("assistant", _ANSWER)]), tools=native
            ),
            alternates=not self.takes_rows(),
            opens_head=bool(first),
            short_ids=native
            and self._id == _CALL_ID
            and not self.attempt(_said("user", _USER), self.call(id=_LONG_ID), _result(_LONG_ID), tools=True),
            samples=tuple(text for text in (prompts["on"][1], prompts["off"][1], talk, chain, always) if text),
        )

    def native_tools(self) -> bool:
        asked = _said("user", _USER)
        if not self.attempt(asked, self.call(), self.result(), tools=True):
            self._arguments = json.dumps(self._arguments)
        called = self.attempt(asked, self.call())
        if _CALL_ID in called and _TOOL not in called:
            self._id = call_id(_TOOL, 0)
        text = self.attempt(asked, self.call(), self.result(), tools=True, prompt=True)
        bare = self.attempt(asked, self.call(), self.result(), prompt=True)
        return text.count(_TOOL) > bare.count(_TOOL) > 0 and _RESULT in text and _ARGUMENT in text

    def result_opener(self) -> str | None:
        called = self.attempt(_said("user", _USER), self.call(), tools=True)
        answered = self.attempt(_said("user", _USER), self.call(), self.result(), tools=True)
        found = self.controls(_between(answered[len(_common_start([called, answered])) :], None, _RESULT))
        return found[0] if found else None

    def header(self, opener: str, generated: Sequence[str], talk: str) -> str:
        starts = [text for text in generated if text]
        lead = _between(talk, _USER, _ANSWER) or ""
        if opener in lead:
            starts.append(lead[lead.rindex(opener) :])
        header = _common_start(starts)
        for tag, _ in THINK_TAGS:
            header = header.split(tag)[0]
        return header

    def header_after_result(self, opener: str) -> list[str]:
        """What an answer to a tool result begins with, where that is another token than after a user turn."""
        answered = self.attempt(
            _said("user", _USER), self.call(), self.result(), _said("assistant", _ANSWER), _said("user", _SECOND), tools=True
        )
        lead = _between(answered, _RESULT, _ANSWER) or ""
        found = self.controls(lead)
        return [lead[lead.rindex(found[-1]) :]] if found and opener not in found else []

    def think_form(self, header: str) -> tuple[str, str]:
        thinks = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        text = self.attempt(_said("user", _USER), _said("assistant", _ANSWER, **thinks))
        start = text.rfind(header, 0, max(text.find(_THOUGHT), 0)) if header else -1
        middle = _between(text, _THOUGHT, _ANSWER)
        if start < 0 or middle is None:
            return TemplateTraits().think_before, TemplateTraits().think_after
        return text[start + len(header) : text.index(_THOUGHT)].lstrip(), middle

    def takes_rows(self) -> bool:
        texts = [f"{_USER} {number}" for number in range(5)]
        roles = ("user", "user", "assistant", "assistant", "user")
        text = self.attempt(*[_said(role, said) for role, said in zip(roles, texts, strict=True)])
        return all(said in text for said in texts)

    def controls(self, text: str | None) -> list[str]:
        return self._tokens.control_pattern.findall(text or "")

    def ids(self, texts: set[str]) -> frozenset[int]:
        return frozenset(self._tokens.added[text] for text in texts if text in self._tokens.added)


def _between(text: str, start: str | None, end: str | None) -> str | None:
    """The part of `text` after `start` and before `end`, None where they are not in it."""
    left = text.find(start) + len(start) if start is not None and start in text else (0 if start is None else -1)
    if left < 0:
        return None
    right = len(text) if end is None else text.find(end, left)
    return text[left:right] if right >= 0 else None


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts, default=""), max(texts, default="")
    length = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(arguments: Any, *, id: str, **more: Any) -> dict[str, Any]:
    function = {"name": _TOOL, "arguments": arguments}
    return _said("assistant", "", tool_calls=[{"id": id, "type": "function", "function": function}], **more)


def _result(id: str) -> dict[str, Any]:
    return _said("tool", _RESULT, tool_call_id=id, name=_TOOL)


def _tool() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return {"type": "function", "function": {"name": _TOOL, "description": "Look it up.", "parameters": schema}}
