"""Qwen Code (Chat Completions)."""

from __future__ import annotations

from typing import Any

from pooled_mlx.connect.conflicts import in_dotenv, in_environment, in_json, project_folders
from pooled_mlx.connect.merge import JsonMerge, json_text
from pooled_mlx.connect.target import FileChange, Launch, Profile, Target

KEY_VARIABLE = "POOLED_API_KEY"


def settings(target: Target) -> dict[str, Any]:
    """The settings file. Its stream timeout ignores keep-alive comments, so it is switched off."""
    model = {
        "id": target.model_id,
        "name": target.label,
        "baseUrl": target.openai_url,
        "envKey": KEY_VARIABLE,
        "generationConfig": {
            "contextWindowSize": target.context_tokens,
            "timeout": 3_600_000,
            "samplingParams": {"max_tokens": target.output_tokens},
        },
    }
    return {
        "modelProviders": {"openai": [model]},
        "env": {KEY_VARIABLE: target.key, "QWEN_STREAM_IDLE_TIMEOUT_MS": "0"},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model_id},
        "context": {"autoCompactThreshold": round(target.compact_tokens / target.context_tokens, 2)},
    }


def profile(target: Target) -> Profile:
    """A model in the user's `settings.json`."""
    values = settings(target)
    env = {
        "OPENAI_BASE_URL": target.openai_url,
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model_id,
        KEY_VARIABLE: target.key,
        "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": "@TEMPORARY@/settings.json",
    }
    return Profile(
        name="qwen",
        title="Qwen Code",
        text=f"~/.qwen/settings.json:\n\n{json_text(values)}",
        install="npm install -g @qwen-code/qwen-code",
        changes=(FileChange("~/.qwen/settings.json", JsonMerge(values)),),
        launch=Launch(
            ("qwen", "--auth-type", "openai"),
            env,
            {"settings.json": json_text(values)},
            own_options=("--auth-type", "--openai-base-url", "--openai-api-key"),
        ),
        after="qwen",
        stronger=lambda around: [
            *in_environment(around, {"OPENAI_BASE_URL": target.openai_url}),
            *(
                line
                for folder in project_folders(around)
                for keys, ours in ((("model", "name"), target.model_id), (("security", "auth", "selectedType"), "openai"))
                for line in in_json(folder / ".qwen" / "settings.json", keys, ours)
            ),
            *in_dotenv(
                [path for folder in project_folders(around) for path in (folder / ".qwen" / ".env", folder / ".env")],
                {"OPENAI_BASE_URL": target.openai_url},
            ),
        ],
    )
