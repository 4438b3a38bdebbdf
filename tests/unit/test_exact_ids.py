import json
import threading

import numpy as np
import pytest

from pooled_mlx.core.request import ToolCall
from pooled_mlx.prompt.exact_ids import ExactIds, HistoryHash, Known, canonical_answer, history_digest

HISTORY = history_digest([1, 2, 3])


def call(arguments: str, name: str = "read", *, custom: bool = False, id: str = "c1") -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments, custom=custom)


def known(*ids: int, reasoning: str = "") -> Known:
    return Known(np.array(ids, np.uint32), reasoning)


def ids_of(found: Known | None) -> list[int] | None:
    return None if found is None else found.ids.tolist()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('{"b": 1, "a": 2}', '{"a":2,"b":1}'),
        ('{"a": 1.0}', '{"a":1}'),
        ('{"a": 1e3}', '{"a":1000}'),
        ('{"a": "\\u00e9"}', '{"a":"é"}'),
        ('{"a": "\\/"}', '{"a":"/"}'),
        ("", "{}"),
        ("  \n", "{ }"),
        ('{"a": {"d": [1, {"y": 1, "x": 2}], "c": null}}', '{"a":{"c":null,"d":[1,{"x":2,"y":1}]}}'),
    ],
)
def test_another_serialisation_is_the_same_call(one: str, two: str):
    assert canonical_answer("", [call(one, id="a")]) == canonical_answer("", [call(two, id="b")])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": true}', '{"a": 1}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 1.5}', '{"a": 1.25}'),
        ('{"a": 1e999}', '{"a": 2e999}'),
        ('{"a": 1', '{"a": 1}'),
        ('{"a": NaN}', '{"a": null}'),
        ("[" * 100_000, "[" * 100_001),
    ],
)
def test_another_meaning_is_another_call(one: str, two: str):
    assert canonical_answer("", [call(one)]) != canonical_answer("", [call(two)])


def test_arguments_that_are_no_json_are_kept_raw():
    assert canonical_answer("", [call("{'a': 1} ")]).calls == (("read", "{'a': 1} "),)


def test_the_input_of_a_custom_tool_is_compared_as_it_is():
    assert canonical_answer("", [call('{"b": 1}', custom=True)]) != canonical_answer("", [call('{"b":1}', custom=True)])


def test_name_number_and_order_of_calls_count():
    one, two = call("{}", "read"), call("{}", "write")
    answers = [canonical_answer("", calls) for calls in ([one], [two], [one, two], [two, one], [one, one], [])]
    assert len(set(answers)) == len({answer.digest for answer in answers}) == 6


def test_text_counts_in_nfc_without_outer_whitespace():
    assert canonical_answer(" cafe\u0301\n", ()) == canonical_answer("café", ())
    assert canonical_answer("a  b", ()) != canonical_answer("a b", ())


def test_a_text_is_never_taken_for_a_call():
    assert canonical_answer('[["read","{}"]]', ()).digest != canonical_answer("", [call("{}")]).digest


def test_lone_surrogates_do_no_harm():
    assert canonical_answer("\ud800", ()).digest != canonical_answer("\ud801", ()).digest
    assert canonical_answer("", [call('{"a": "\\ud800"}')]) == canonical_answer("", [call(json.dumps({"a": "\ud800"}))])


def test_the_digest_of_a_history_is_independent_of_how_it_is_given():
    growing = HistoryHash()
    for part in ([1, 2], np.array([3], np.int64), [], np.array([70_000, 2**32 - 1], np.uint32)):
        growing.add(part)
    assert growing.digest() == history_digest([1, 2, 3, 70_000, 2**32 - 1])
    assert growing.digest() == history_digest(np.array([1, 2, 3, 70_000, 2**32 - 1])[::1])
    assert len(growing.digest()) == 32
    assert history_digest([1, 2]) != history_digest([2, 1])


def test_what_was_remembered_is_found_for_the_same_history_only():
    exact = ExactIds()
    answer = canonical_answer("Japan", ())
    exact.remember(HISTORY, answer, known(5, 6, 2))
    assert ids_of(exact.find(HISTORY, canonical_answer("  Japan\n", ()))) == [5, 6, 2]
    assert exact.find(history_digest([1, 2, 4]), answer) is None
    assert exact.find(HISTORY, canonical_answer("Japan.", ())) is None


def test_a_turn_remembered_one_way_stays_so():
    exact = ExactIds()
    answer = canonical_answer("Japan", ())
    exact.remember(HISTORY, answer, known(5, 6))
    exact.remember(HISTORY, answer, known(7))
    assert ids_of(exact.find(HISTORY, answer)) == [5, 6]


def test_reasoning_picks_among_answers_that_are_otherwise_equal():
    exact = ExactIds()
    answer = canonical_answer("OK", ())
    exact.remember(HISTORY, answer, known(1, 9, reasoning="first thought"))
    exact.remember(HISTORY, answer, known(2, 9, reasoning="second thought"))
    assert ids_of(exact.find(HISTORY, answer, "first thought\n")) == [1, 9]
    assert ids_of(exact.find(HISTORY, answer, "second thought")) == [2, 9]
    assert exact.find(HISTORY, answer, "edited thought") is None
    assert exact.find(HISTORY, answer, "") is None


def test_without_reasoning_the_newest_answer_is_taken_and_stays():
    exact = ExactIds()
    answer = canonical_answer("OK", ())
    exact.remember(HISTORY, answer, known(1, reasoning="first"))
    exact.remember(HISTORY, answer, known(2, reasoning="second"))
    assert ids_of(exact.find(HISTORY, answer)) == [2]
    exact.remember(HISTORY, answer, known(3, reasoning="third"))
    assert ids_of(exact.find(HISTORY, answer)) == [2]


def test_variants_are_bounded_and_the_settled_one_survives():
    exact = ExactIds()
    answer = canonical_answer("OK", ())
    exact.remember(HISTORY, answer, known(0, reasoning="0"))
    assert ids_of(exact.find(HISTORY, answer)) == [0]
    for n in range(1, 10):
        exact.remember(HISTORY, answer, known(n, reasoning=str(n)))
    assert ids_of(exact.find(HISTORY, answer)) == [0]
    found = [exact.find(HISTORY, answer, str(n)) for n in range(10)]
    assert sum(1 for one in found if one) == 4


def test_the_budget_holds_and_the_least_recently_used_goes_first():
    exact = ExactIds(budget_bytes=20_000)
    answers = [canonical_answer(str(n), ()) for n in range(30)]
    for answer in answers:
        exact.remember(HISTORY, answer, Known(np.arange(200, dtype=np.uint32)))
        assert exact.find(HISTORY, answers[0]) is not None
        assert 0 < exact.bytes <= exact.budget_bytes
    assert exact.find(HISTORY, answers[1]) is None
    assert exact.find(HISTORY, answers[-1]) is not None
    assert len(exact) == 20_000 // (800 + 400)


def test_an_answer_larger_than_the_budget_is_not_kept():
    exact = ExactIds(budget_bytes=1000)
    answer = canonical_answer("long", ())
    exact.remember(HISTORY, answer, Known(np.zeros(1000, np.uint32)))
    assert exact.find(HISTORY, answer) is None
    assert exact.bytes == 0


def test_remembered_ids_are_private():
    exact = ExactIds()
    ids = np.array([1, 2, 3], np.uint32)
    answer = canonical_answer("a", ())
    exact.remember(HISTORY, answer, Known(ids))
    ids[0] = 99
    found = exact.find(HISTORY, answer)
    assert found is not None
    assert found.ids.tolist() == [1, 2, 3]
    assert not found.ids.flags.writeable
    exact.clear()
    assert exact.find(HISTORY, answer) is None
    assert exact.bytes == 0


def test_threads_may_remember_and_find_at_once():
    exact = ExactIds(budget_bytes=50_000)
    answers = [canonical_answer(str(n), ()) for n in range(40)]
    wrong: list[object] = []

    def work(offset: int) -> None:
        for round_number in range(300):
            n = (round_number * 7 + offset) % len(answers)
            exact.remember(HISTORY, answers[n], Known(np.full(300, n, np.uint32)))
            found = exact.find(HISTORY, answers[(n + offset) % len(answers)])
            if found is not None and not (found.ids == (n + offset) % len(answers)).all():
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert exact.bytes <= exact.budget_bytes
