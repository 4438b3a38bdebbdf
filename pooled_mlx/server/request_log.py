"""One log line for each finished request. Never a word of a prompt or an answer."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

from pooled_mlx.core.errors import ApiError
from pooled_mlx.core.events import Event, Failed, Finished, Usage

logger = logging.getLogger("pooled.request")

_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._+@-]")
_LABEL_CHARACTERS = 40


def client_label(user_agent: str | None) -> str:
    """The product of a User-Agent (the text before the first slash), `unknown` without one."""
    product = (user_agent or "").strip().partition("/")[0].strip()
    return _NOT_IN_LABEL.sub("-", product)[:_LABEL_CHARACTERS] or "unknown"


@dataclass(slots=True)
class RequestRecord:
    """What the log line says. `seconds` runs from the arrival of the head to the last byte."""

    id: str
    api: str
    client: str
    stream: bool = False
    status: int = 0
    finish: str = ""
    usage: Usage = field(default_factory=Usage)
    cache_note: str = ""
    _started: float = field(default_factory=time.monotonic)

    def event(self, event: Event) -> None:
        """Take the end of the stream out of its events."""
        if isinstance(event, Finished):
            self.finish, self.usage, self.cache_note = event.reason, event.usage, event.cache_note
        elif isinstance(event, Failed):
            self.refuse(event.error)

    def refuse(self, error: ApiError) -> None:
        """The request ended with `error`."""
        self.finish = error.kind.name.lower()

    def fields(self) -> dict[str, Any]:
        """The line as values."""
        usage = self.usage
        return {
            "id": self.id,
            "api": self.api,
            "client": self.client,
            "stream": self.stream,
            "status": self.status,
            "finish": self.finish or "cancelled",
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "prefilled_tokens": usage.prompt_tokens - usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "seconds": round(time.monotonic() - self._started, 3),
            "cache": self.cache_note,
        }

    def write(self) -> dict[str, Any]:
        """Log the line; its fields are the record's `request` attribute."""
        fields = self.fields()
        logger.info(
            "%(api)s %(client)s %(status)s %(finish)s prompt=%(prompt_tokens)s cached=%(cached_tokens)s "
            "prefilled=%(prefilled_tokens)s generated=%(generated_tokens)s drafted=%(drafted_tokens)s "
            "accepted=%(accepted_tokens)s seconds=%(seconds)s cache=%(cache)r",
            fields,
            extra={"request": fields},
        )
        return fields
