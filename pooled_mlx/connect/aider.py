"""aider (Chat Completions through litellm)."""

from __future__ import annotations

from typing import Any

from pooled_mlx.connect.conflicts import in_dotenv, in_environment, in_yaml, project_folders
from pooled_mlx.connect.merge import JsonMerge, YamlMerge, json_text, yaml_scalar
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Surroundings, Target

_ADDRESSES = ("OPENAI_API_BASE", "OPENAI_BASE_URL")
_MODELS = ("--weak-model", "--editor-model")


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


def _stronger(around: Surroundings, target: Target, settings: dict[str, str | int | bool]) -> list[str]:
    addresses = {**dict.fromkeys(_ADDRESSES, target.openai_url), "AIDER_OPENAI_API_BASE": target.openai_url}
    addresses["AIDER_MODEL"] = f"openai/{target.model_id}"
    folders = project_folders(around)
    ours = {name: settings[name] for name in ("model", "openai-api-base")}
    return [
        *in_environment(around, addresses),
        *in_dotenv([around.home / ".env", *(folder / ".env" for folder in folders)], addresses),
        *(line for folder in folders for line in in_yaml(folder / ".aider.conf.yml", ours)),
    ]


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
            FileChange("~/.aider.conf.yml", YamlMerge(settings)),
            FileChange("~/.aider.model.metadata.json", JsonMerge(values)),
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
                # Flags win over its settings files, and it sets these variables after it has read all .env files.
                *(word for name in _MODELS for word in (name, f"openai/{target.model_id}")),
                "--openai-api-base",
                target.openai_url,
                "--openai-api-key",
                target.key,
                *(word for name in _ADDRESSES for word in ("--set-env", f"{name}={target.openai_url}")),
            ),
            {
                **dict.fromkeys(_ADDRESSES, target.openai_url),
                "OPENAI_API_KEY": target.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            {"metadata.json": json_text(values)},
            without=("AIDER_OPENAI_API_BASE", "AIDER_OPENAI_API_KEY", "AIDER_MODEL", "AIDER_WEAK_MODEL", "AIDER_SET_ENV"),
            own_options=("--model", *_MODELS, "--openai-api-base", "--openai-api-key", "--set-env"),
        ),
        after="aider",
        stronger=lambda around: _stronger(around, target, settings),
    )
