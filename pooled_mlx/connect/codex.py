"""Codex CLI (Responses)."""

from __future__ import annotations

import json

from pooled_mlx.connect.merge import Replacing
from pooled_mlx.connect.target import FileChange, Launch, Profile, Target

TOKEN_VARIABLE = "POOLED_TOKEN"


def _provider(target: Target) -> dict[str, str | int]:
    provider: dict[str, str | int] = {
        "name": "pooled-mlx",
        "base_url": target.openai_url,
        "wire_api": "responses",
        "request_max_retries": 2,
        "stream_max_retries": 2,
        "stream_idle_timeout_ms": 600_000,
    }
    if target.token is not None:
        provider["env_key"] = TOKEN_VARIABLE
    return provider


def _settings(target: Target) -> dict[str, str | int | bool]:
    return {
        "model": target.model_id,
        "model_provider": "pooled",
        "model_context_window": target.context_tokens,
        "model_auto_compact_token_limit": target.compact_tokens,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
    }


def _toml(values: dict[str, str | int | bool] | dict[str, str | int]) -> str:
    # JSON's strings, numbers and booleans are TOML's.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def config_text(target: Target) -> str:
    """The TOML of a profile file, or of a whole `config.toml`."""
    return f"{_toml(_settings(target))}\n[model_providers.pooled]\n{_toml(_provider(target))}\n[analytics]\nenabled = false\n"


def profile(target: Target) -> Profile:
    """A profile file of its own beside `config.toml`, which stays as it is."""
    text = config_text(target)
    overrides: list[str] = []
    for name, value in _settings(target).items():
        overrides += ["-c", f"{name}={json.dumps(value)}"]
    for name, value in _provider(target).items():
        overrides += ["-c", f"model_providers.pooled.{name}={json.dumps(value)}"]
    export = f"export {TOKEN_VARIABLE}=...\n" if target.token is not None else ""
    return Profile(
        name="codex",
        title="Codex",
        text=f"# ~/.codex/pooled.config.toml, then:\n\n{export}codex --profile pooled\n\n{text}",
        install="npm install -g @openai/codex",
        changes=(FileChange("~/.codex/pooled.config.toml", Replacing(text), "CODEX_HOME", "~/.codex"),),
        launch=Launch(("codex", *overrides), {TOKEN_VARIABLE: target.key}),
        after="codex --profile pooled" + (f", with the token in {TOKEN_VARIABLE}" if target.token is not None else ""),
    )
