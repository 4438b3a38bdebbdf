"""opencode (Chat Completions)."""

from __future__ import annotations

from typing import Any

from pooled_mlx.connect.merge import into_json, json_text
from pooled_mlx.connect.target import FileChange, Launch, Profile, Target


def config(target: Target) -> dict[str, Any]:
    """The settings. The title model is the same model: any other id would be one this server does not have."""
    model = {
        "name": target.label,
        "tool_call": True,
        "reasoning": True,
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


def profile(target: Target) -> Profile:
    """A provider in the user's `opencode.json`."""
    values = config(target)
    return Profile(
        name="opencode",
        title="opencode",
        text=f"~/.config/opencode/opencode.json (or opencode.json of a project):\n\n{json_text(values)}",
        install="npm install -g opencode-ai",
        changes=(FileChange("~/.config/opencode/opencode.json", into_json(values)),),
        launch=Launch(("opencode",), {"OPENCODE_CONFIG_CONTENT": json_text(values), "OPENCODE_DISABLE_MODELS_FETCH": "1"}),
    )
