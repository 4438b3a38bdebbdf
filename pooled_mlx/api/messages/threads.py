"""Message threads: conversations of which the client sends only what is new."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from pooled_mlx.api.common import Fields, show
from pooled_mlx.api.store import BoundedStore, Piece
from pooled_mlx.core.errors import bad_request

_KEPT_FIELDS = ("system", "tools")


@dataclass(frozen=True, slots=True)
class MessageThread:
    """A conversation as the client sent it: `fields` holds system and tools, `messages` one piece for each message."""

    fields: Piece
    messages: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Everything the store counts."""
        return (self.fields, *self.messages)

    def body(self) -> dict[str, Any]:
        """The fields of the request that sends the whole conversation."""
        return {**self.fields.value, "messages": [piece.value for piece in self.messages]}

    def with_message(self, *messages: Any) -> MessageThread:
        """The conversation with more messages behind it."""
        return replace(self, messages=(*self.messages, *map(_piece, messages)))


def read_thread(body: Fields, known: BoundedStore[MessageThread]) -> MessageThread | None:
    """The whole conversation of a threaded request, None without `thread`. Raises `ApiError` 400 `thread_not_found`."""
    thread = body.object("thread")
    if thread is None:
        return None
    messages = body.list("messages") or ()
    kind = thread.get("type")
    if kind == "create":
        return MessageThread(_piece({name: body.get(name) for name in _KEPT_FIELDS}), ()).with_message(*messages)
    if kind != "continue":
        raise bad_request(f"thread.type must be 'create' or 'continue', not {show(kind)}.", "thread.type")
    earlier_id = thread.required_text("previous_message_id")
    earlier = known.get(earlier_id)
    if earlier is None:
        raise bad_request(
            f"thread.previous_message_id {show(earlier_id)} is not kept here (256 threads, 64 MB, one hour after last use). "
            'Send the whole conversation with thread {"type": "create"}.',
            "thread.previous_message_id",
            "thread_not_found",
        )
    return earlier.with_message(*messages)


def _piece(value: Any) -> Piece:
    return Piece(value, len(json.dumps(value)))
