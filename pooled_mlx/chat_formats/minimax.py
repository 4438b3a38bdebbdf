"""MiniMax calls: `<invoke name="…">` with a `<parameter name="…">` tag for each argument (M2 to M2.7).

Format: the chat templates published with MiniMax-M2 and M2.7; mlx-lm's minimax_m2 parser reads the same tags. Several functions
may stand in one `<minimax:tool_call>`.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.xml_calls import XmlCalls
from pooled_mlx.chat_formats.xml_values import Notation

FORMAT = XmlCalls(
    Notation(
        call="<minimax:tool_call>",
        end_call="</minimax:tool_call>",
        function="<invoke name=",
        end_function="</invoke>",
        parameter="<parameter name=",
        frame="",
        quoted=True,
        several=True,
    ),
    ("<minimax:tool_call>", "<invoke name="),
)
