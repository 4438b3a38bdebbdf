"""DeepSeek calls: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), with a fence in V3 and R1.

Format: the chat templates published with DeepSeek-V3.1, DeepSeek-V3-0324 and DeepSeek-R1-0528. The older two write
`function` before the separator, then the name and the arguments as a fence of JSON. Later models write DSML instead.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.base import GrammarBuilder
from pooled_mlx.chat_formats.sections import Marks, Sections
from pooled_mlx.core.request import Tool


def _head(lark: GrammarBuilder, tool: Tool) -> str:
    return lark.text(tool.name)


FORMAT = Sections(
    Marks(
        section="<｜tool▁calls▁begin｜>",
        end_section="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>",
        end_call="<｜tool▁call▁end｜>",
        arguments="<｜tool▁sep｜>",
        name_of=str,
        head=_head,
        fenced="function",
    )
)
