"""What one answer's grammar must hold: the values that a chat format writes its rules from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pooled_mlx.core.request import Request, Tool


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What one answer's grammar must hold.

    `tools` are the callable tools in prompt order (`Request.callable_tools`). `reasoning_open`: the prompt ends inside a
    thinking block; `may_think`: the model may open one itself. `json_schema` is the schema of the answer text, None for
    free text. `markers` are the tags that the model has as single tokens. The end of the turn is the matcher's business.

    `degraded` maps names of tools whose schema is not used to the reason: their calls keep name and shape, their arguments
    are free. The caller puts tools in whose rules do not compile, a format adds those whose schema is broken.
    """

    request: Request
    tools: tuple[Tool, ...] = ()
    reasoning_open: bool = False
    may_think: bool = False
    json_schema: Mapping[str, Any] | bool | None = None
    markers: frozenset[str] = frozenset()
    degraded: dict[str, str] = field(default_factory=dict[str, str])
