"""LiteLLM, as a proxy and as a library (Chat Completions)."""

from __future__ import annotations

from pooled_mlx.connect.merge import Replacing, yaml_scalar
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Target


def config_text(target: Target) -> str:
    """A proxy configuration with this one model under the name `pooled`."""
    return (
        "model_list:\n"
        "  - model_name: pooled\n"
        "    litellm_params:\n"
        f"      model: {yaml_scalar(f'openai/{target.model_id}')}\n"
        f"      api_base: {yaml_scalar(target.openai_url)}\n"
        f"      api_key: {yaml_scalar(target.key)}\n"
        "      timeout: 3600\n"
        "      stream_timeout: 3600\n"
        "    model_info:\n"
        f"      max_input_tokens: {target.context_tokens}\n"
        f"      max_output_tokens: {target.output_tokens}\n"
    )


def profile(target: Target) -> Profile:
    """A configuration file in the working folder."""
    text = config_text(target)
    return Profile(
        name="litellm",
        title="LiteLLM",
        text=f"litellm-pooled.yaml, then: litellm --config litellm-pooled.yaml\n\n{text}\n"
        "In Python:\n\n"
        f'litellm.completion(model="openai/{target.model_id}", api_base="{target.openai_url}", api_key="{target.key}", '
        "messages=messages)\n",
        install="pip install 'litellm[proxy]'",
        changes=(FileChange("litellm-pooled.yaml", Replacing(text)),),
        launch=Launch(("litellm", "--config", f"{TEMPORARY}/litellm.yaml"), files={"litellm.yaml": text}),
    )
