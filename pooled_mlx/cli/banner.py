"""What `serve` prints when the model is ready: addresses, memory, and the settings of the three main agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.connect import banner_lines
from pooled_mlx.core.memory import format_size
from pooled_mlx.core.ports import Engine
from pooled_mlx.mac.address import reachable
from pooled_mlx.server.settings import ServerSettings

_MEMORY_ROWS = (
    ("weights_bytes", "weights"),
    ("pool_budget_bytes", "cache pool"),
    ("working_bytes", "working space"),
    ("headroom_bytes", "kept free"),
    ("limit_bytes", "limit"),
)


def banner(settings: ServerSettings, port: int, engine: Engine) -> str:
    """The text."""
    model, health = engine.model, engine.health()
    base = f"http://{reachable(settings.host)}:{port}"
    quantization = f", {model.quantization}" if model.quantization and model.quantization != "none" else ""
    token = "needed (Authorization: Bearer … or x-api-key)" if settings.token else "none set, any key works"
    lines = [
        f"pooled-mlx {__version__}",
        f"  model      {model.label}{quantization} ({model.public_id})",
        f"  context    {model.context_tokens:,} tokens",
        f"  OpenAI     {base}/v1",
        f"  Anthropic  {base}",
        f"  status     {base}/",
        f"  token      {token}",
    ]
    if memory := memory_line(health.get("memory")):
        lines.append(f"  memory     {memory}")
    agents = banner_lines(base, model.public_id, model.context_tokens, bool(settings.token))
    return "\n".join([*lines, "", *(f"  {line}" for line in agents), ""])


def memory_line(memory: Any) -> str:
    """The memory plan in one line, "" without one."""
    if not isinstance(memory, Mapping):
        return ""
    return ", ".join(f"{name} {format_size(memory[key])}" for key, name in _MEMORY_ROWS if isinstance(memory.get(key), int))
