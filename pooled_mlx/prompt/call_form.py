"""Whether a model's own way of calling tools is one of ours: its chat template writes a call, the format's parser reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pooled_mlx import chat_formats
from pooled_mlx.core.request import Request, Tool
from pooled_mlx.prompt.template_traits import THINK_TAGS
from pooled_mlx.prompt.templates import ChatTemplate, TemplateFailed
from pooled_mlx.prompt.tokens import Tokens
from pooled_mlx.text.answer_stream import AnswerStream
from pooled_mlx.text.tokens import TokenTable

GENERIC = "hermes"
"""The format that is taught to models whose own calls are not known."""

_NAME, _KEY, _VALUE = "kea_lookup", "query", "tuatara"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Look it up.", "parameters": _SCHEMA}}
_CALL_TOKEN = re.compile(r"(tool|function).?calls?", re.IGNORECASE)
_ID = "abcdefgh1"
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model's calls are read. `native`: in the form in which its template writes them. `foreign` shows its own form where
    that is not read, "" where it is, or where the model has none."""

    format: str
    native: bool
    foreign: str = ""

    @property
    def notice(self) -> str:
        """What the user should know, "" where there is nothing."""
        if not self.foreign:
            return ""
        return (
            f"this model's own way of calling tools ({self.foreign}) is not known here: tools are explained to it in a general "
            f"way ({self.format} JSON), which it follows less surely. For agents choose a model of docs/tool-calling.md"
        )


def call_form(template: ChatTemplate, tokens: Tokens, chat_format: str | None = None) -> CallForm:
    """The form for a model; a card's `chat_format` is taken at its word.

    A format that recognises the marks of a template but cannot read the call that this very template writes is not used.
    """
    if chat_format is not None:
        return CallForm(chat_format, True)
    added = frozenset(tokens.added)
    name = chat_formats.detect(template.source, added)
    certainty = chat_formats.get(name).recognises(template.source, added)
    marked = certainty > 1
    written = _written_call(template)
    if marked and not _tells_of_tools(template):
        return CallForm(GENERIC, False, "its template writes calls, and does not tell the model of its tools")
    if written is None and marked:
        return CallForm(GENERIC, False, "its template does not write its past calls")
    if written is None:
        return CallForm(name, False, _unwritten(template, tokens, name))
    if _reads(name, written, tokens):
        return CallForm(name, marked)
    tags = chat_formats.get(name).tags - {tag for pair in THINK_TAGS for tag in pair}
    if certainty > 2 and any(tag in written for tag in tags):  # its very tags, around a call that the probe made odd
        return CallForm(name, True)
    shown = " ".join(written.split(_VALUE)[0].replace(_NAME, "NAME").replace(_KEY, "KEY").split())
    return CallForm(GENERIC, False, shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…")


def folder_call_form(folder: Path, chat_format: str | None = None) -> CallForm:
    """The form for the model in a folder. Raises `TokenizerError`."""
    tokens = Tokens.load(folder)
    return call_form(ChatTemplate.load(folder, tokens.named), tokens, chat_format)


def _render(template: ChatTemplate, *messages: Mapping[str, Any], tools: bool = True, prompt: bool = False) -> str:
    """The rendered text, "" where the template refuses."""
    try:
        return template.render(messages, tools=[_TOOL] if tools else None, generation_prompt=prompt, options={})
    except TemplateFailed:
        return ""


def _written_call(template: ChatTemplate) -> str | None:
    """What an assistant turn with one call is after its header, None where the template writes none."""
    user = {"role": "user", "content": "quokka asks"}
    arguments: Any
    # Some templates take text only, and some write the id in place of the name.
    for call_id, arguments in product((_ID, f"functions.{_NAME}:0"), ({_KEY: _VALUE}, json.dumps({_KEY: _VALUE}))):
        function = {"name": _NAME, "arguments": arguments}
        said = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
        asked, called = _render(template, user), _render(template, user, said)
        turn = called[_common(asked, called) :]
        if _NAME in turn and _VALUE in turn:
            header = _render(template, user, prompt=True)[len(asked) :]
            for tag, _ in THINK_TAGS:
                header = header.split(tag)[0]
            return turn[_common(header, turn) :]
    return None


def _tells_of_tools(template: ChatTemplate) -> bool:
    """Whether the template lists the tools that it is given."""
    user = {"role": "user", "content": "quokka asks"}
    return _NAME in _render(template, user)


def _common(first: str, second: str) -> int:
    """Characters that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def _reads(name: str, written: str, tokens: Tokens) -> bool:
    """Whether the format's parser finds the call in what the template writes, and no text beside it."""
    names = {index: text for text, index in tokens.added.items()}
    request = Request("probe", (), tools=(Tool(_NAME, parameters=_SCHEMA),))
    stream = AnswerStream(
        TokenTable(tokens.bytes_of, names, tokens.eos_ids),
        chat_formats.get(name),
        request,
        reasoning_open=False,
        new_call_id=lambda: "call",
    )
    ids: Sequence[int] = tokens.encode_with_control(written).tolist()
    end = next((place for place, index in enumerate(ids) if index in tokens.eos_ids), len(ids))
    for index in ids[:end]:
        stream.feed(index)
    stream.finish("stop")
    text, _, calls = stream.parsed()
    return not text.strip() and any(call.name == _NAME and _VALUE in call.arguments for call in calls)


def _unwritten(template: ChatTemplate, tokens: Tokens, name: str) -> str:
    """A sign of a form of its own in a template that writes no calls: it lists tools, or there are tokens for calls."""
    tags = chat_formats.get(name).tags
    foreign = sorted(text for text in tokens.added if _CALL_TOKEN.search(text) and text not in tags)
    if foreign:
        return foreign[0]
    if _tells_of_tools(template):
        return "its template lists tools, and does not tell how it calls them"
    return ""
