"""DSML calls of DeepSeek V3.2: `<｜DSML｜invoke name="…">` with a tag for each argument, in `<｜DSML｜function_calls>`.

Format: the encoding published with DeepSeek-V3.2; mlx-lm has a template for it. An attribute of each argument tells strings
from other values. `｜DSML｜` is a token inside of every tag.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.xml_calls import XmlCalls
from pooled_mlx.chat_formats.xml_values import Notation

DSML = "｜DSML｜"


def dsml(block: str) -> Notation:
    """The notation with `block` as the tag around the calls."""
    return Notation(
        call=f"<{DSML}{block}>",
        end_call=f"</{DSML}{block}>",
        function=f"<{DSML}invoke name=",
        end_function=f"</{DSML}invoke>",
        parameter=f"<{DSML}parameter name=",
        end_parameter=f"</{DSML}parameter>",
        frame="",
        quoted=True,
        typed=True,
        several=True,
        mark=DSML,
    )


FORMAT = XmlCalls(dsml("function_calls"), (DSML, "invoke name=", "function_calls>"))
