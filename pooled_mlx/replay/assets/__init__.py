"""The parts of the scripted model: SmolLM2's tokenizer with the tags of Qwen3.6 added, and a chat template in its manner."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pooled_mlx.prompt.tokens import TokenizerError

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added as single tokens that are not special, as in Qwen3.6."""


def replay_template() -> str:
    """The chat template of the scripted model."""
    return resources.files(__name__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


def replay_tokenizer_json(smollm2_folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json (with the chat template) of the scripted model.

    Raises `TokenizerError` when the folder of SmolLM2 has none.
    """
    files: list[dict[str, Any]] = []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            files.append(json.loads((smollm2_folder / name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise TokenizerError(f"The scripted model needs SmolLM2's {name}: {error}. Fetch SmolLM2 first.") from None
    tokenizer, config = files
    taken = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for place, text in enumerate(TAGS, max(taken) + 1):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": place, "content": text, **flags})
    return tokenizer, config | {"chat_template": replay_template()}
