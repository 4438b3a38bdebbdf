"""Chat formats: how a model writes reasoning and calls. Markers, parser and grammar of one format stand in one module.

A format is a module here with a `FORMAT` object that satisfies `base.ChatFormat`; its file name is its name in a model
card. Nothing else has to be edited to add one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from pooled_mlx.chat_formats.base import ChatFormat

_SHARED = frozenset(
    {
        *(
            "arguments",
            "base",
            "gemma_values",
            "marked",
            "parameters",
            "python_calls",
            "raw_values",
            "rules",
            "schemas",
            "sections",
        ),
        *("tagged", "xml_calls", "xml_values"),
    }
)


def names() -> tuple[str, ...]:
    """The names of all formats."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED))


@cache
def get(name: str) -> ChatFormat:
    """The format called `name`. Raises ValueError for an unknown one."""
    if name not in names():
        raise ValueError(f"chat format {name!r} is unknown; known are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").FORMAT


def detect(template_text: str | None, added_token_names: Iterable[str]) -> str:
    """The name of the format that a chat template and the tokenizer's added tokens point to.

    The format with the most certain answer wins. A template that no format recognises gets "hermes", whose generic
    instructions teach calls to any model; no template at all gives "plain".
    """
    if not template_text:
        return "plain"
    added = frozenset(added_token_names)
    certainty = {name: get(name).recognises(template_text, added) for name in names()}
    return max(certainty, key=lambda name: (certainty[name], name == "hermes"))
