"""What `serve` prints when the model is ready: addresses, memory, and the settings of the three main agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.catalog import format_size
from pooled_mlx.core.ports import Engine
from pooled_mlx.mac.address import reachable
from pooled_mlx.server.settings import ServerSettings

MOST_OUTPUT_TOKENS = 16_384
"""Output limit suggested to agents, cut to a quarter of a short context."""
_COMPACT_AT = 0.85  # share of the context at which an agent should compact: the rest is for its own compaction request

_MEMORY_ROWS = (
    ("weights_bytes", "weights"),
    ("pool_budget_bytes", "cache pool"),
    ("working_bytes", "working space"),
    ("headroom_bytes", "kept free"),
    ("limit_bytes", "limit"),
)


def output_limit(context_tokens: int) -> int:
    """Tokens of output that an agent should plan for, given the context."""
    return min(MOST_OUTPUT_TOKENS, context_tokens // 4)


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
    return "\n".join([*lines, "", *agents(base, model.public_id, model.context_tokens, bool(settings.token)), ""])


def memory_line(memory: Any) -> str:
    """The memory plan in one line, "" without one."""
    if not isinstance(memory, Mapping):
        return ""
    return ", ".join(f"{name} {format_size(memory[key])}" for key, name in _MEMORY_ROWS if isinstance(memory.get(key), int))


def agents(base: str, model_id: str, context_tokens: int, has_token: bool) -> list[str]:
    """The settings of the three main agents for this context; `pooled-mlx connect` has the others, and writes them."""
    output, compact = output_limit(context_tokens), int(context_tokens * _COMPACT_AT)
    key = "YOUR_TOKEN" if has_token else "pooled"
    return [
        "  Claude Code",
        f"    ANTHROPIC_BASE_URL={base} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model_id} \\",
        f"    CLAUDE_CODE_MAX_CONTEXT_TOKENS={context_tokens} CLAUDE_CODE_MAX_OUTPUT_TOKENS={output} \\",
        "    CLAUDE_CODE_ATTRIBUTION_HEADER=0 claude",
        "  Codex (~/.codex/config.toml)",
        f'    model = "{model_id}"   model_provider = "pooled"',
        f"    model_context_window = {context_tokens}   model_auto_compact_token_limit = {compact}",
        f'    [model_providers.pooled]   base_url = "{base}/v1"   wire_api = "responses"',
        "  opencode (opencode.json)",
        f'    provider "pooled": npm "@ai-sdk/openai-compatible", options.baseURL "{base}/v1", options.apiKey "{key}"',
        f'    models."{model_id}".limit = {{"context": {context_tokens}, "output": {output}}}',
        "  more: pooled-mlx connect AGENT",
    ]
