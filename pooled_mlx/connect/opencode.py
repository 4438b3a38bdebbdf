"""opencode (Chat Completions)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pooled_mlx.connect.conflicts import in_json, project_folders
from pooled_mlx.connect.merge import JsonMerge, json_text
from pooled_mlx.connect.target import FileChange, Launch, Profile, Surroundings, Target

_AGENTS = ("build", "plan", "general", "explore", "title", "summary", "compaction")
"""The agents that come with opencode."""


def config(target: Target) -> dict[str, Any]:
    """The settings. The title model is the same model: any other id would be one this server does not have."""
    model = {
        "name": target.label,
        "tool_call": True,
        "reasoning": target.thinks,
        "limit": {"context": target.context_tokens, "output": target.output_tokens},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": f"pooled/{target.model_id}",
        "small_model": f"pooled/{target.model_id}",
        "provider": {
            "pooled": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "pooled-mlx",
                "options": {"baseURL": target.openai_url, "apiKey": target.key, "timeout": False},
                "models": {target.model_id: model},
            }
        },
    }


def _stronger(around: Surroundings, values: dict[str, Any]) -> list[str]:
    files = [folder / name for folder in project_folders(around) for name in ("opencode.json", "opencode.jsonc")]
    if around.env.get("OPENCODE_CONFIG"):
        files.append(Path(around.env["OPENCODE_CONFIG"]))
    found = [line for path in files for key in ("model", "small_model") for line in in_json(path, (key,), values[key])]
    if around.env.get("OPENCODE_CONFIG_CONTENT"):
        found.append("OPENCODE_CONFIG_CONTENT is exported and wins over every file: unset it")
    return found


def profile(target: Target) -> Profile:
    """A provider in the user's `opencode.json`."""
    values = config(target)
    agents = {name: {"model": values["model"]} for name in _AGENTS}
    return Profile(
        name="opencode",
        title="opencode",
        text=f"~/.config/opencode/opencode.json (or opencode.json of a project):\n\n{json_text(values)}",
        install="npm install -g opencode-ai",
        changes=(
            FileChange(
                "~/.config/opencode/opencode.json", JsonMerge(values), "XDG_CONFIG_HOME", "~/.config", ("opencode.jsonc",)
            ),
        ),
        # Agents of the user's may name models of their own: with one provider none of them can ask another server, and
        # opencode's own agents get ours.
        launch=Launch(
            ("opencode",),
            {
                "OPENCODE_CONFIG_CONTENT": json_text({**values, "enabled_providers": ["pooled"], "agent": agents}),
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
            },
        ),
        after="opencode",
        stronger=lambda around: _stronger(around, values),
    )
