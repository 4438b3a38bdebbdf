"""`pooled-mlx doctor --deep`: beside a running server, and what its report does not tell. tests/model has the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pooled_mlx.catalog import builtin_folder, load_catalog
from pooled_mlx.cli.checks import _parting, _schema_problem
from pooled_mlx.cli.common import Refused
from pooled_mlx.cli.deep import room_beside, without_paths
from pooled_mlx.core.memory import GIB
from pooled_mlx.mac.facts import ServerFacts
from tests.mac_devices import MACS

CARD = replace(load_catalog(builtin_folder()).cards["smollm2-135m"], id="some-8b", weights_bytes=5 * GIB)
MAC = next(facts for facts in MACS if facts.memory_bytes == 32 * GIB)
URL = "http://127.0.0.1:8080"


def running(gigabytes: float, state: str = "ready") -> ServerFacts:
    memory = {"active_bytes": gigabytes * GIB - 1, "cache_bytes": 1.0, "process_bytes": 1.0 * GIB}
    return ServerFacts(state=state, model_card="big-27b", memory=memory if gigabytes else {})


def test_without_a_server_the_limit_is_the_settings():
    assert room_beside(ServerFacts(state="stopped"), URL, CARD, MAC, None) is None
    assert room_beside(ServerFacts(state="foreign"), URL, CARD, MAC, 8 * GIB) is None


def test_beside_a_server_the_limit_is_what_it_leaves():
    assert room_beside(running(6), URL, CARD, MAC, None) == MAC.limit_bytes - 6 * GIB
    assert room_beside(running(6), URL, CARD, MAC, 8 * GIB) == 8 * GIB


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (running(18), "holds 18.0 GiB with big-27b, and some-8b does not fit beside it"),
        (running(40), "does not fit beside it"),
        (running(6, "loading"), "is loading, and what memory it takes is not known"),
        (running(0), "is ready, and what memory it takes is not known"),
        (ServerFacts(state="locked"), "is locked"),
    ],
)
def test_it_refuses_where_both_do_not_fit_or_that_is_not_known(server: ServerFacts, words: str):
    with pytest.raises(Refused) as refusal:
        room_beside(server, URL, CARD, MAC, None)
    assert words in str(refusal.value)
    assert "service stop" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_that_does_not_fit_alone_either_is_not_the_servers_fault():
    with pytest.raises(Refused, match="does not fit") as refusal:
        room_beside(running(6), URL, CARD, MAC, 4 * GIB)
    assert URL not in str(refusal.value)


def test_no_path_of_the_user_is_in_the_report():
    folder = Path("/Volumes/Models of Jane/x-4bit")
    report = {
        "a": [f"{folder}/model.safetensors is damaged", {"b": f"see {Path.home()}/.cache/x"}],
        "c": ("/Users/jane/y", "'/home/jane'", "/Volumes/Jane/z"),
        "n": 3,
    }
    assert without_paths(report, [folder]) == {
        "a": ["MODEL/model.safetensors is damaged", {"b": "see ~/.cache/x"}],
        "c": ["~/y", "'~'", "~/z"],
        "n": 3,
    }


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"name":"pear","count":3,"ripe":true,"tags":["a"]}', ""),
        ('{"name":"pear","count":3,"ripe":true,"tags":[]}', "tags"),
        ('{"name":"fig","count":3,"ripe":true,"tags":["a"]}', "name"),
        ('{"name":"plum","count":true,"ripe":1,"tags":["a"]}', "count, ripe"),
        ('{"name":"plum","count":3,"ripe":true}', "properties"),
        ('{"name":"plum"', "not JSON"),
    ],
)
def test_an_answer_against_the_schema_is_seen(text: str, wrong: str):
    assert (wrong in _schema_problem(text)) if wrong else _schema_problem(text) == ""


def test_where_answers_part():
    assert _parting([1, 2, 3], [1, 2, 3]) is None
    assert _parting([1, 2, 3], [1, 5, 3]) == 1
    assert _parting([1, 2], [1, 2, 3]) == 2
