"""Calls as a Python list that is the whole answer: `[name(key="value"), other()]` (Llama 3.2 and 4 with pythonic templates).

Format: the pythonic chat templates published with vLLM for these models.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.python_calls import PythonCalls, Row

FORMAT = PythonCalls(Row("", ""), ("[func_name1(",))
