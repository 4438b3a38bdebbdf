"""The responses this process remembers, for `previous_response_id`, `item_reference` and the GET and DELETE routes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pooled_mlx.api.common import show
from pooled_mlx.api.store import IDLE_SECONDS, MAX_BYTES, MAX_RECORDS, BoundedStore, Piece
from pooled_mlx.core.errors import ApiError, ErrorKind, bad_request

Item = dict[str, Any]
_BOUNDS = "kept are the last 256 responses, 64 MB at most, one hour after last use; none survives a restart"
_PAGE = 20
_LARGEST_PAGE = 100


def item_piece(item: Item) -> Piece:
    """An item as the store counts it."""
    return Piece(item, len(json.dumps(item)))


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response: its body, the items it answered (earlier responses included), and its own output items."""

    body: dict[str, Any]
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]

    @property
    def history(self) -> tuple[Piece, ...]:
        """What the next response continues from; a call that was cut off is no part of it."""
        whole = (
            piece for piece in self.outputs if piece.value["type"] == "message" or piece.value.get("status") != "incomplete"
        )
        return (*self.inputs, *whole)


class ResponseStore:
    """At most 256 responses or 64 MB, least recently used dropped first, an hour after last use at the latest."""

    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store: BoundedStore[StoredResponse] = BoundedStore(max_records, max_bytes, idle_seconds, clock)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def size_bytes(self) -> int:
        """Bytes held; items that several responses share are counted once."""
        return self._store.size_bytes

    def keep(self, stored: StoredResponse) -> None:
        """Remember a finished response under its id."""
        body = Piece(None, len(json.dumps({**stored.body, "output": []})))
        self._store.put(stored.body["id"], stored, [body, *stored.inputs, *stored.outputs])

    def previous(self, response_id: str) -> StoredResponse:
        """The response to continue from. Raises `ApiError` 400 `previous_response_not_found`."""
        stored = self._store.get(response_id)
        if stored is None:
            raise bad_request(
                f"Previous response with id {show(response_id)} not found: {_BOUNDS}. Send the whole conversation in input.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return stored

    def item(self, item_id: str, param: str) -> Piece:
        """The stored item of an `item_reference`. Raises `ApiError` 400 when no stored response has it."""

        def own(stored: StoredResponse) -> Piece | None:
            return next((piece for piece in stored.history if piece.value.get("id") == item_id), None)

        found = self._store.find(lambda stored: own(stored) is not None)
        piece = own(found) if found is not None else None
        if piece is None:
            raise bad_request(f"Item with id {show(item_id)} not found: {_BOUNDS}. Send the item itself.", param)
        return piece

    def retrieve(self, response_id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The body of `GET /v1/responses/{id}`. Raises `ApiError` 404, or 400 for `stream=true`."""
        if query.get("stream", "false").lower() not in ("false", "0", ""):
            raise bad_request("Streaming a stored response is not supported: read it without stream.", "stream")
        return self._known(response_id).body

    def delete(self, response_id: str) -> dict[str, Any]:
        """The body of `DELETE /v1/responses/{id}`. Raises `ApiError` 404."""
        if not self._store.delete(response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def input_items(self, response_id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """One page of `GET /v1/responses/{id}/input_items`, newest first unless `order=asc`. Raises `ApiError`."""
        items = [_listed(piece.value, index) for index, piece in enumerate(self._known(response_id).inputs)]
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request(f"order must be asc or desc, not {show(order)}.", "order")
        if order == "desc":
            items.reverse()
        limit = _page_size(query.get("limit"))
        start = 0
        if after := query.get("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_request(f"after names no item of this response: {show(after)}.", "after")
            start = ids.index(after) + 1
        page = items[start : start + limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(items),
        }

    def _known(self, response_id: str) -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _not_found(response_id: str) -> ApiError:
    return ApiError(ErrorKind.NOT_FOUND, f"Response with id {show(response_id)} not found: {_BOUNDS}.")


def _page_size(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _LARGEST_PAGE:
        raise bad_request(f"limit must be a whole number from 1 to {_LARGEST_PAGE}, not {show(text)}.", "limit")
    return int(text)


def _listed(item: Item, index: int) -> Item:
    """An input item as the list shows it: with an id, a type, and message text as parts."""
    listed = {"type": "message", **item}
    listed["id"] = item.get("id") or f"item_{index}"
    if listed["type"] == "message" and isinstance(listed.get("content"), str):
        kind = "output_text" if listed.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": listed["content"]}]
    return listed


def expand(items: Sequence[Item], paths: Sequence[str], store: ResponseStore, measure: bool) -> list[Piece]:
    """The items of one request as pieces, references replaced by the stored items; sizes only where they will be kept."""
    pieces: list[Piece] = []
    for item, path in zip(items, paths, strict=True):
        if item.get("type") == "item_reference" or set(item) == {"id"}:
            pieces.append(store.item(str(item.get("id")), f"{path}.id"))
        else:
            pieces.append(item_piece(item) if measure else Piece(item, 0))
    return pieces
