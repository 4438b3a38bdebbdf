"""DSML calls of DeepSeek V4: as those of V3.2, in `<｜DSML｜tool_calls>`.

Format: the encoding and the chat template published with DeepSeek-V4.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.deepseek_v32 import DSML, dsml
from pooled_mlx.chat_formats.xml_calls import XmlCalls

FORMAT = XmlCalls(dsml("tool_calls"), (DSML, "invoke name=", "tool_calls"), certainty=2)
