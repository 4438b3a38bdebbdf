"""Olmo 3 calls: Python calls, one a line, between `<function_calls>` tags.

Format: the chat templates published with Olmo 3.
"""

from __future__ import annotations

from pooled_mlx.chat_formats.python_calls import PythonCalls, Row

FORMAT = PythonCalls(Row("<function_calls>", "</function_calls>", brackets=False), ("<function_calls>",))
