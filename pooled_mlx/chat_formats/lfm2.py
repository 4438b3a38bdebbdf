"""LFM2 calls: a Python list of calls between `<|tool_call_start|>` and `<|tool_call_end|>` (LFM2, LFM2.5).

Format: the chat templates published with LFM2 and LFM2.5; mlx-lm's pythonic parser reads the same.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.python_calls import PythonCalls, Row

FORMAT = PythonCalls(Row("<|tool_call_start|>", "<|tool_call_end|>"), ("<|tool_call_start|>",))
