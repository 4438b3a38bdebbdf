"""Cline's command line (Chat Completions)."""

from __future__ import annotations

from typing import Any

from pooled_mlx.connect.merge import JsonMerge, json_text, shell_quote
from pooled_mlx.connect.target import TEMPORARY, FileChange, Launch, Profile, Target

_PROVIDER = "openai-compatible"


def providers(target: Target) -> dict[str, Any]:
    """The provider file that `cline auth` writes."""
    settings = {
        "provider": _PROVIDER,
        "apiKey": target.key,
        "model": target.model_id,
        "baseUrl": target.openai_url,
    }
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    return {"version": 1, "lastUsedProvider": _PROVIDER, "modes": {}, "providers": {_PROVIDER: entry}}


def profile(target: Target) -> Profile:
    """One `cline auth` command; in the editor the same values go into its settings page."""
    auth = ["cline", "auth", "-p", _PROVIDER, "-k", target.key, "-m", target.model_id, "-b", target.openai_url]
    text = (
        f"{' '.join(map(shell_quote, auth))}\n"
        f"cline -P {_PROVIDER} -m {shell_quote(target.model_id)}\n\n"
        "In the editor extension:\n\n"
        f"API Provider    OpenAI Compatible\nBase URL        {target.openai_url}\nAPI Key         {target.key}\n"
        f"Model ID        {target.model_id}\nContext Window  {target.context_tokens}\nMax Output      {target.output_tokens}\n"
    )
    return Profile(
        name="cline",
        title="Cline",
        text=text,
        install="npm install -g cline",
        changes=(FileChange("~/.cline/data/settings/providers.json", JsonMerge(providers(target))),),
        launch=Launch(
            ("cline", "--data-dir", TEMPORARY, "-P", _PROVIDER, "-m", target.model_id),
            files={"settings/providers.json": json_text(providers(target))},
            own_options=("--data-dir", "-P", "--provider", "-m", "--model"),
        ),
        after=f"cline -P {_PROVIDER} -m {shell_quote(target.model_id)}",
    )
