"""aider (Chat Completions through litellm)."""

from __future__ import annotations

from typing import Any

from pooled_mlx.connect.merge import into_flat_yaml, into_json, json_text, yaml_scalar
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Target


def _settings(target: Target) -> dict[str, str | int | bool]:
    return {
        "model": f"openai/{target.model_id}",
        "openai-api-base": target.openai_url,
        "openai-api-key": target.key,
        "timeout": 3600,
        "show-model-warnings": False,
    }


def metadata(target: Target) -> dict[str, Any]:
    """What litellm knows of the model: without it aider warns and never trims its history."""
    return {
        f"openai/{target.model_id}": {
            "max_input_tokens": target.context_tokens,
            "max_output_tokens": target.output_tokens,
            "max_tokens": target.output_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }


def profile(target: Target) -> Profile:
    """The user's `.aider.conf.yml` and the model's limits."""
    settings = _settings(target)
    lines = "".join(f"{name}: {yaml_scalar(value)}\n" for name, value in settings.items())
    values = metadata(target)
    return Profile(
        name="aider",
        title="aider",
        text=f"~/.aider.conf.yml:\n\n{lines}\n~/.aider.model.metadata.json:\n\n{json_text(values)}",
        install="pip install aider-chat",
        changes=(
            FileChange("~/.aider.conf.yml", into_flat_yaml(settings)),
            FileChange("~/.aider.model.metadata.json", into_json(values)),
        ),
        launch=Launch(
            (
                "aider",
                "--model",
                f"openai/{target.model_id}",
                "--model-metadata-file",
                f"{TEMPORARY}/metadata.json",
                "--timeout",
                "3600",
                "--no-show-model-warnings",
            ),
            {
                "OPENAI_API_BASE": target.openai_url,
                "OPENAI_API_KEY": target.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            {"metadata.json": json_text(values)},
        ),
    )
