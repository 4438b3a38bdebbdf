"""Qwen XML calls: `<function=name>` with one `<parameter=name>` block for each argument (Qwen3-Coder, Qwen3.5 to 3.8)."""

from __future__ import annotations

from pooled_mlx.chat_formats.xml_calls import XmlCalls
from pooled_mlx.chat_formats.xml_values import Notation

FORMAT = XmlCalls(Notation(), ("<function=", "<parameter="))
