"""Continue, the editor extension and its command line `cn` (Chat Completions)."""

from __future__ import annotations

from pooled_mlx.connect.merge import Replacing, yaml_scalar
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Target


def config_text(target: Target) -> str:
    """A whole configuration with this one model."""
    return (
        "name: pooled\nversion: 1.0.0\nschema: v1\nmodels:\n"
        f"  - name: {yaml_scalar(target.label)}\n"
        "    provider: openai\n"
        f"    model: {yaml_scalar(target.model_id)}\n"
        f"    apiBase: {yaml_scalar(target.openai_url)}\n"
        f"    apiKey: {yaml_scalar(target.key)}\n"
        "    roles: [chat, edit, apply]\n"
        "    capabilities: [tool_use]\n"
        "    defaultCompletionOptions:\n"
        f"      contextLength: {target.context_tokens}\n"
        f"      maxTokens: {target.output_tokens}\n"
        "    requestOptions:\n"
        "      timeout: 3600\n"
    )


def profile(target: Target) -> Profile:
    """A configuration file of its own, chosen with `--config`."""
    text = config_text(target)
    return Profile(
        name="continue",
        title="Continue",
        text=f"~/.continue/pooled.yaml, then: cn --config ~/.continue/pooled.yaml\n(the extension: the same model in "
        f"~/.continue/config.yaml)\n\n{text}",
        install="npm install -g @continuedev/cli",
        changes=(FileChange("~/.continue/pooled.yaml", Replacing(text), "CONTINUE_GLOBAL_DIR", "~/.continue"),),
        launch=Launch(
            ("cn", "--config", f"{TEMPORARY}/pooled.yaml"),
            {"CONTINUE_TELEMETRY_ENABLED": "0"},
            {"pooled.yaml": text},
            own_options=("--config",),
        ),
        after="cn --config ~/.continue/pooled.yaml",
    )
