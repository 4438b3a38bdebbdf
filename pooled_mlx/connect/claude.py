"""Claude Code (Messages)."""

from __future__ import annotations

from pooled_mlx.connect.merge import into_json, json_text, shell_lines
from pooled_mlx.connect.target import FileChange, Launch, Profile, Target

_ALL_TOOLS_FROM = 65_536
"""From this context on all tools are declared at once: loading them on demand changes the front of the prompt each time."""


def environment(target: Target) -> dict[str, str]:
    """The variables Claude Code reads."""
    env = {
        "ANTHROPIC_BASE_URL": target.base_url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model_id,
        # Title requests and subagents would ask for models of their own otherwise.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model_id,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model_id,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model_id,
        # An unknown model counts as one with a window of a million tokens: only both limits together correct that.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output_tokens),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "80",
        # The line it would put first differs from conversation to conversation.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "600000",
    }
    if target.context_tokens >= _ALL_TOOLS_FROM:
        env["ENABLE_TOOL_SEARCH"] = "false"
    return env


def profile(target: Target) -> Profile:
    """Environment variables, or the `env` of `~/.claude/settings.json`."""
    env = environment(target)
    return Profile(
        name="claude",
        title="Claude Code",
        text=f"{shell_lines(env, 'claude')}\n\nor in ~/.claude/settings.json:\n\n{json_text({'env': env})}",
        install="npm install -g @anthropic-ai/claude-code",
        changes=(FileChange("~/.claude/settings.json", into_json({"env": env})),),
        launch=Launch(("claude",), env),
    )
