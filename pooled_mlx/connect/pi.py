"""pi (Chat Completions)."""

from __future__ import annotations

from typing import Any

from pooled_mlx.connect.merge import JsonMerge, json_text, shell_quote
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Target


def models(target: Target) -> dict[str, Any]:
    """The models file."""
    model = {
        "id": target.model_id,
        "name": target.label,
        "reasoning": target.thinks,
        "input": ["text"],
        "contextWindow": target.context_tokens,
        "maxTokens": target.output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": target.openai_url,
        "api": "openai-completions",
        "apiKey": target.key,
        "models": [model],
    }
    return {"providers": {"pooled": provider}}


def profile(target: Target) -> Profile:
    """A provider in the user's `models.json`."""
    values = models(target)
    command = ("pi", "--provider", "pooled", "--model", target.model_id)
    return Profile(
        name="pi",
        title="pi",
        text=f"~/.pi/agent/models.json, then: {' '.join(map(shell_quote, command))}\n\n{json_text(values)}",
        install="npm install -g @mariozechner/pi-coding-agent",
        changes=(FileChange("~/.pi/agent/models.json", JsonMerge(values), "PI_CODING_AGENT_DIR", "~/.pi/agent"),),
        launch=Launch(
            command,
            {"PI_CODING_AGENT_DIR": TEMPORARY},
            {"models.json": json_text(values)},
            own_options=("--provider", "--model", "--models"),
        ),
        after=" ".join(map(shell_quote, command)),
    )
