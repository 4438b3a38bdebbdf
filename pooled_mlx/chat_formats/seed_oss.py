"""Seed-OSS calls: Qwen's XML in tags of their own, without newlines around a value.

Format: the chat template published with Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.xml_calls import XmlCalls
from pooled_mlx.chat_formats.xml_values import Notation

FORMAT = XmlCalls(
    Notation(
        call="<seed:tool_call>",
        end_call="</seed:tool_call>",
        frame="",
        think_tags=("<seed:think>", "</seed:think>"),
        gap="\n",
    ),
    ("<seed:tool_call>", "<function="),
    certainty=4,
)
