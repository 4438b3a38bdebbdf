"""All profiles by name, and the few lines that `serve` prints of the main ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pooled_mlx.connect import (
    aider,
    claude,
    cline,
    codex,
    continue_dev,
    curl,
    litellm,
    open_webui,
    opencode,
    pi,
    qwen,
)
from pooled_mlx.connect.target import Profile, Target

AGENTS: Mapping[str, Callable[[Target], Profile]] = {
    "claude": claude.profile,
    "codex": codex.profile,
    "opencode": opencode.profile,
    "qwen": qwen.profile,
    "cline": cline.profile,
    "continue": continue_dev.profile,
    "aider": aider.profile,
    "pi": pi.profile,
    "open-webui": open_webui.profile,
    "litellm": litellm.profile,
    "curl": curl.profile,
}
"""Name on the command line -> the profile of a server."""


DEFAULT_URL = "http://127.0.0.1:8080"
"""Where `pooled-mlx connect` looks without settings and flags."""


def profile_of(name: str, target: Target) -> Profile:
    """The profile of one client. Raises `KeyError` for an unknown name."""
    return AGENTS[name](target)


def banner_lines(base_url: str, model_id: str, context_tokens: int, has_token: bool) -> list[str]:
    """The settings of the three main agents for this server, without the token itself."""
    target = Target(base_url, model_id, context_tokens, "YOUR_TOKEN" if has_token else None)
    variables = claude.environment(target)
    main = ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL")
    limits = ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_MAX_OUTPUT_TOKENS", "CLAUDE_CODE_ATTRIBUTION_HEADER")
    limit = f'{{"context": {context_tokens}, "output": {target.output_tokens}}}'
    where = "" if base_url == DEFAULT_URL else f" --url {base_url}"
    return [
        f"Claude Code   pooled-mlx connect claude{where}",
        "  " + " ".join(f"{name}={variables[name]}" for name in main) + " \\",
        "  " + " ".join(f"{name}={variables[name]}" for name in limits) + " claude",
        f"Codex         pooled-mlx connect codex{where}",
        f'  model = "{model_id}"   model_provider = "pooled"   model_context_window = {context_tokens}',
        f"  model_auto_compact_token_limit = {target.compact_tokens}",
        f'  [model_providers.pooled]   base_url = "{target.openai_url}"   wire_api = "responses"'
        + ('   env_key = "POOLED_TOKEN"' if has_token else ""),
        f"opencode      pooled-mlx connect opencode{where}",
        f'  npm "@ai-sdk/openai-compatible"   options.baseURL "{target.openai_url}"   options.apiKey "{target.key}"',
        f'  models."{model_id}".limit = {limit}',
        f"others        pooled-mlx connect AGENT{where} (--write changes its file, --run starts it)",
    ]
