import json
import threading

from pooled_mlx.engine.exact_ids import ExactIds, Known, as_ids, canonical_answer, history_digest
from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.pool_report import MOST_CONVERSATIONS, MOST_REASONS, MOST_SEGMENTS, PoolReporter, pool_report
from pooled_mlx.engine.reasons import Reason
from tests.pool_fakes import RULE, Chat, Clock, FakeData, FakeModel, words


def make() -> tuple[Pool, FakeModel, Clock]:
    clock = Clock()
    pool = Pool(10**6, b"model", divisible=False, rule=RULE, clock=clock)
    return pool, FakeModel(pool), clock


def test_an_empty_pool():
    pool, _, clock = make()
    report = pool_report(pool, ExactIds(), clock())
    assert report["counts"] == {"segments": 0, "states": 0, "conversations": 0, "tokens": 0}
    assert (report["conversations"], report["segments"], report["pins"]) == ([], [], [])
    assert report["cut_rule"] == {"step": RULE.step, "spacing": RULE.spacing, "minimum": RULE.minimum}
    json.dumps(report)


def test_two_conversations_with_one_system_prompt():
    pool, model, clock = make()
    for name in "ab":
        clock.advance(10)
        ids, boundaries = Chat(words("system", 100)).user(words(name, 50)).prompt()
        model.serve(ids, boundaries, words(f"{name}!", 20), label=f"agent-{name}")
    clock.advance(5)
    exact = ExactIds()
    exact.remember(history_digest([1]), canonical_answer("hi", ()), Known(as_ids([1, 2])))
    report = pool_report(pool, exact, clock())
    second, first = report["conversations"]
    assert [second["client"], first["client"]] == ["agent-b", "agent-a"]
    assert (second["idle_seconds"], first["idle_seconds"]) == (5.0, 15.0)
    assert second["tokens"] == first["tokens"] == 100 + 50 + 3 + 20
    assert second["shared_tokens"] == first["shared_tokens"] == 100
    assert second["bytes"] - second["own_bytes"] == 14 * 100 + 1000
    assert second["segments"][0] == first["segments"][0]
    assert second["segments"][-1] == second["id"]
    by_id = {segment["id"]: segment for segment in report["segments"]}
    for conversation in report["conversations"]:
        path = [by_id[one] for one in conversation["segments"]]
        assert [segment["parent"] for segment in path] == [None, *conversation["segments"][:-1]]
        assert path[-1]["end"] == conversation["tokens"]
        assert sum(segment["bytes"] for segment in path) == conversation["bytes"]
    assert by_id[first["segments"][0]]["hits"] == 1
    assert by_id[first["segments"][0]]["boundary"] == "system"
    assert report["used_bytes"] == report["segment_bytes"] == sum(segment["bytes"] for segment in report["segments"])
    assert [pin["client"] for pin in report["pins"]] == ["agent-b", "agent-a"]
    assert report["counts"]["tokens"] == 100 + 2 * 73
    assert report["exact_ids"]["answers"] == 1
    assert report["counters"]["hits"] == 1


def test_a_report_is_bounded():
    pool, _, clock = make()
    pool.set_budget(10**9)
    for number in range(MOST_SEGMENTS + 10):
        clock.advance(1)
        ids = [number, 1, 2]
        pool.insert(pool.root, ids, FakeData(ids, 0))
    report = pool_report(pool, ExactIds(), clock())
    assert len(report["segments"]) == MOST_SEGMENTS
    assert len(report["conversations"]) == MOST_CONVERSATIONS
    assert report["left_out"] == {"conversations": MOST_SEGMENTS + 10 - MOST_CONVERSATIONS, "segments": 10}
    assert report["segments"][0]["age_seconds"] == 0.0
    assert report["counts"]["segments"] == MOST_SEGMENTS + 10


def test_reasons_are_the_newest_first_and_bounded():
    pool, _, clock = make()
    reporter = PoolReporter(pool, ExactIds(), clock)
    for number in range(MOST_REASONS + 5):
        clock.advance(1)
        reporter.explained(f"r{number}", "agent", Reason("edited", number, 100, 7, 3, "28", "29"))
    reporter.refresh(force=True)
    reasons = reporter.latest()["reasons"]
    assert len(reasons) == MOST_REASONS
    assert reasons[0] == {
        "request": f"r{MOST_REASONS + 4}",
        "client": "agent",
        "kind": "edited",
        "cached_tokens": MOST_REASONS + 4,
        "prompt_tokens": 100,
        "position": 7,
        "turn": 3,
        "before": "28",
        "now": "29",
        "note": f'reused {MOST_REASONS + 4} of 100: edited in turn 3 (…"28"… / …"29"…)',
        "age_seconds": 0.0,
    }


def test_a_snapshot_says_how_old_it_is():
    pool, model, clock = make()
    reporter = PoolReporter(pool, ExactIds(), clock)
    model.serve(words("a", 100), {})
    clock.advance(0.2)
    reporter.refresh()
    assert reporter.latest()["counters"] == {}
    clock.advance(0.4)
    reporter.refresh()
    assert reporter.latest()["counters"]["misses"] == 1
    clock.advance(7)
    assert reporter.latest()["snapshot_age_seconds"] == 7.0


def test_a_snapshot_may_be_read_while_the_pool_changes():
    pool, model, clock = make()
    reporter = PoolReporter(pool, ExactIds(), clock)
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(len(json.dumps(reporter.latest())))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(60):
            ids, boundaries = Chat(words("system", 60)).user(words(str(number), 40)).prompt()
            model.serve(ids, boundaries)
            reporter.refresh(force=True)
    finally:
        done.set()
        reader.join()
    assert seen
    assert reporter.latest()["counts"]["conversations"] == 60
