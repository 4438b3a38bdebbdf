"""The bounded stores: count, bytes, age, sharing, and the pages of stored responses."""

from __future__ import annotations

from typing import Any

import pytest

from pooled_mlx.api.responses.stored import ResponseStore, StoredResponse, item_piece
from pooled_mlx.api.store import BoundedStore, Piece
from pooled_mlx.core.errors import ApiError, ErrorKind


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def piece(size: int) -> Piece:
    return Piece(object(), size)


def test_the_least_recently_used_goes_first() -> None:
    store: BoundedStore[str] = BoundedStore(max_records=2)
    for key in ("a", "b"):
        store.put(key, key, [piece(1)])
    assert store.get("a") == "a"
    store.put("c", "c", [piece(1)])
    assert (store.get("a"), store.get("b"), store.get("c")) == ("a", None, "c")


def test_bytes_bound_and_shared_pieces_count_once() -> None:
    store: BoundedStore[str] = BoundedStore(max_bytes=100)
    shared = piece(60)
    store.put("a", "a", [shared, piece(10)])
    store.put("b", "b", [shared, piece(20)])
    assert store.size_bytes == 90
    store.put("c", "c", [piece(15)])
    assert store.get("a") is None
    assert store.size_bytes == 95
    assert store.delete("b")
    assert store.size_bytes == 15


def test_a_record_over_the_limit_is_not_kept() -> None:
    store: BoundedStore[str] = BoundedStore(max_bytes=100)
    assert not store.put("a", "a", [piece(101)])
    assert len(store) == 0
    assert store.size_bytes == 0


def test_an_hour_after_last_use() -> None:
    clock = Clock()
    store: BoundedStore[str] = BoundedStore(clock=clock)
    store.put("a", "a", [piece(1)])
    store.put("b", "b", [piece(1)])
    clock.now += 3000
    assert store.get("a") == "a"
    clock.now += 600
    assert store.get("b") is None
    assert store.get("a") == "a"
    clock.now += 3600
    assert len(store) == 0


def test_storing_again_replaces() -> None:
    store: BoundedStore[str] = BoundedStore()
    store.put("a", "old", [piece(5)])
    store.put("a", "new", [piece(7)])
    assert store.get("a") == "new"
    assert store.size_bytes == 7


def message(number: int) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": f"text {number}", "id": f"msg_{number}"}


def response(number: int, items: int = 1) -> StoredResponse:
    inputs = tuple(item_piece(message(index)) for index in range(items))
    answer = item_piece({"type": "message", "role": "assistant", "id": f"out_{number}", "content": []})
    cut = item_piece({"type": "function_call", "id": f"fc_{number}", "status": "incomplete", "arguments": '{"a'})
    return StoredResponse({"id": f"resp_{number}", "object": "response", "output": []}, inputs, (answer, cut))


def test_256_responses_at_most() -> None:
    store = ResponseStore()
    for number in range(300):
        store.keep(response(number))
    assert len(store) == 256
    with pytest.raises(ApiError) as caught:
        store.previous("resp_0")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert store.previous("resp_299").body["id"] == "resp_299"


def test_the_history_leaves_out_a_cut_call() -> None:
    assert [piece.value["id"] for piece in response(1).history] == ["msg_0", "out_1"]


def test_items_are_found_by_id() -> None:
    store = ResponseStore()
    store.keep(response(1))
    assert store.item("out_1", "input[0].id").value["role"] == "assistant"
    with pytest.raises(ApiError) as caught:
        store.item("nothing", "input[0].id")
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.param == "input[0].id"


def test_retrieve_and_delete() -> None:
    store = ResponseStore()
    store.keep(response(1))
    assert store.retrieve("resp_1", {})["id"] == "resp_1"
    with pytest.raises(ApiError) as caught:
        store.retrieve("resp_1", {"stream": "true"})
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert store.delete("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}
    for call in (store.delete, lambda name: store.retrieve(name, {}), lambda name: store.input_items(name, {})):
        with pytest.raises(ApiError) as caught:
            call("resp_1")
        assert caught.value.kind is ErrorKind.NOT_FOUND


def test_input_items_pages() -> None:
    store = ResponseStore()
    store.keep(response(1, items=5))
    newest = store.input_items("resp_1", {"limit": "2"})
    assert [item["id"] for item in newest["data"]] == ["msg_4", "msg_3"]
    assert newest["has_more"]
    assert newest["data"][0]["content"] == [{"type": "input_text", "text": "text 4"}]
    rest = store.input_items("resp_1", {"after": "msg_3", "order": "desc"})
    assert [item["id"] for item in rest["data"]] == ["msg_2", "msg_1", "msg_0"]
    assert not rest["has_more"]
    oldest = store.input_items("resp_1", {"order": "asc", "limit": "1"})
    assert (oldest["first_id"], oldest["last_id"]) == ("msg_0", "msg_0")


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}])
def test_bad_pages(query: dict[str, str]) -> None:
    store = ResponseStore()
    store.keep(response(1))
    with pytest.raises(ApiError) as caught:
        store.input_items("resp_1", query)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.param in query
