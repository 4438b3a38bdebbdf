"""Claude Code (Messages)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pooled_mlx.connect.conflicts import in_json, project_folders
from pooled_mlx.connect.merge import JsonMerge, json_text, shell_lines
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Surroundings, Target

_ALL_TOOLS_FROM = 65_536
"""From this context on all tools are declared at once: loading them on demand changes the front of the prompt each time."""
_OTHER_WAYS = (
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_ANTHROPIC_GOOGLE_CLOUD",
    "CLAUDE_CODE_USE_GATEWAY",
    "ANTHROPIC_UNIX_SOCKET",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Variables that lead requests past the base URL, or to models that this server does not have; empty, they do not."""
_MANAGED = ("/Library/Application Support/ClaudeCode", "/etc/claude-code")
"""Folders of an organisation's settings: nothing wins over them."""


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
        **dict.fromkeys(_OTHER_WAYS, ""),
    }
    if target.context_tokens >= _ALL_TOOLS_FROM:
        env["ENABLE_TOOL_SEARCH"] = "false"
    return env


def profile(target: Target) -> Profile:
    """Environment variables, or the `env` of `~/.claude/settings.json`."""
    env = environment(target)
    shown = {name: value for name, value in env.items() if value}
    # The model's own search would run on Anthropic's servers.
    settings = {"env": env, "permissions": {"deny": ["WebSearch"]}}

    def overruled(paths: Iterable[Path]) -> list[str]:
        names = ("ANTHROPIC_BASE_URL", *_OTHER_WAYS)
        return [line for path in paths for name in names for line in in_json(path, ("env", name), env[name])]

    def stronger(around: Surroundings) -> list[str]:
        names = ("settings.local.json", "settings.json")
        return overruled(folder / ".claude" / name for folder in project_folders(around) for name in names)

    def managed(_: Surroundings) -> list[str]:
        folders = [Path(folder) for folder in _MANAGED]
        files = [folder / "managed-settings.json" for folder in folders]
        return overruled([*files, *(path for folder in folders for path in sorted(folder.glob("managed-settings.d/*.json")))])

    return Profile(
        name="claude",
        title="Claude Code",
        text=f"{shell_lines(shown, 'claude')}\n\nor in ~/.claude/settings.json:\n\n{json_text(settings)}",
        install="npm install -g @anthropic-ai/claude-code",
        changes=(FileChange("~/.claude/settings.json", JsonMerge(settings), "CLAUDE_CONFIG_DIR", "~/.claude"),),
        # Its settings files may set variables too, and win over the environment; these settings win over the files.
        launch=Launch(
            ("claude", "--settings", f"{TEMPORARY}/settings.json"),
            env,
            {"settings.json": json_text(settings)},
            without=("ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_OAUTH_TOKEN"),
            own_options=("--settings",),
        ),
        after="claude",
        stronger=stronger,
        managed=managed,
    )
