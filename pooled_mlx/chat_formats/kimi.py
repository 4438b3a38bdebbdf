"""Kimi calls: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` (Kimi K2).

Format: the chat templates published with Kimi-K2-Instruct and Kimi-K2-Thinking; mlx-lm's kimi_k2 parser reads the same. The
text in front of the arguments is the call's id: the tool's name, and the number of the call in the conversation.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.base import GrammarBuilder
from pooled_mlx.chat_formats.sections import Marks, Sections
from pooled_mlx.core.request import Tool

_FUNCTIONS = "functions."


def call_id(name: str, number: int) -> str:
    """The id of a conversation's call `number`, counted from 0, as the model writes it."""
    return f"{_FUNCTIONS}{name}:{number}"


def _name_of(call_id: str) -> str:
    name, _, number = call_id.rpartition(":")
    return (name if number.isdecimal() and name else call_id).removeprefix(_FUNCTIONS)


def _head(lark: GrammarBuilder, tool: Tool) -> str:
    return f"{lark.text(f'{_FUNCTIONS}{tool.name}:')} /[0-9]{{1,4}}/"


FORMAT = Sections(
    Marks(
        section="<|tool_calls_section_begin|>",
        end_section="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        end_call="<|tool_call_end|>",
        arguments="<|tool_call_argument_begin|>",
        name_of=_name_of,
        head=_head,
    )
)
