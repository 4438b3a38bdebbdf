import json
import threading

from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.report import MOST_CONVERSATIONS, MOST_REASONS, MOST_SEGMENTS, PoolReporter, pool_report
from pooled_mlx.prompt.exact_ids import ExactIds, Known, as_ids, canonical_answer, history_digest
from pooled_mlx.prompt.reasons import Reason
from tests.pool_fakes import RULE, Chat, Clock, FakeData, FakeModel, words


def make() -> tuple[Pool, FakeModel, Clock]:
    clock = Clock()
    pool = Pool(10**6, b"model", divisible=False, rule=RULE, clock=clock)
    return pool, FakeModel(pool), clock


def test_an_empty_pool():
    pool, _, clock = make()
    report = pool_report(pool, ExactIds(), clock())
    assert [report[name] for name in ("segments", "states", "conversation_count", "tokens", "used_bytes")] == [0] * 5
    assert (report["conversations"], report["pins"]) == ([], [])
    assert report["cut_rule"] == {"step": RULE.step, "spacing": RULE.spacing, "minimum": RULE.minimum, "shrinks": []}
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
    (system,) = report["conversations"]
    assert (system["kind"], system["tokens"], system["hits"], system["states"]) == ("system", 100, 1, 1)
    assert system["label"] == "agent-a: system + tools"
    assert system["bytes"] == 14 * 100 + 1000
    assert system["lifetime_seconds"] == 15.0
    second, first = system["children"]
    assert [second["label"], first["label"]] == ["agent-b", "agent-a"]
    assert (second["age_seconds"], first["age_seconds"], system["age_seconds"]) == (5.0, 15.0, 5.0)
    for node in (first, second):
        assert (node["kind"], node["start"], node["end"], node["tokens"]) == ("conversation", 100, 173, 73)
        assert node["children"] == []
        assert [(segment["kind"], segment["start"], segment["end"]) for segment in node["segments"]] == [
            ("prompt", 100, 150),
            ("answer", 150, 173),
        ]
        assert sum(segment["bytes"] for segment in node["segments"]) == node["bytes"]
        assert node["segments"][-1]["id"] == node["id"]
    assert report["used_bytes"] == system["bytes"] + first["bytes"] + second["bytes"]
    assert [pin["client"] for pin in report["pins"]] == ["agent-b", "agent-a"]
    assert [pin["id"] for pin in report["pins"]] == [system["id"]] * 2
    assert (report["tokens"], report["segments"], report["conversation_count"]) == (246, 5, 2)
    assert report["exact_ids"]["answers"] == 1
    assert report["counters"]["hits"] == 1


def test_forks_and_side_requests():
    pool, model, clock = make()
    chat = Chat(words("system", 100)).user(words("question", 50)).answer(words("reply", 40))
    for name in "ab":
        clock.advance(1)
        ids, boundaries = chat.copy().user(words(name, 50)).prompt()
        model.serve(ids, boundaries)
    ids, boundaries = Chat(words("title", 60)).user(words("of what", 50)).prompt()
    model.serve(ids, boundaries, kind="side")
    side, system = sorted(pool_report(pool, ExactIds(), clock())["conversations"], key=lambda node: node["tokens"])
    assert (side["kind"], side["tokens"]) == ("system", 60)
    assert side["children"][0]["kind"] == "side"
    (shared,) = system["children"]
    assert (shared["kind"], shared["tokens"], shared["hits"]) == ("shared", 93, 1)
    assert [node["kind"] for node in shared["children"]] == ["conversation"] * 2


def test_a_report_is_bounded():
    pool, _, clock = make()
    pool.set_budget(10**9)
    for number in range(MOST_CONVERSATIONS + 10):
        clock.advance(1)
        parent = pool.root
        for turn in range(12):
            ids = [number, turn, 2]
            above = [int(i) for segment in parent.path() for i in segment.ids]
            new = pool.insert(parent, ids, FakeData([*above, *ids], len(above)))
            assert new is not None
            parent = new
    report = pool_report(pool, ExactIds(), clock())
    assert len(report["conversations"]) == MOST_CONVERSATIONS
    assert report["conversation_count"] == MOST_CONVERSATIONS + 10
    assert report["segments"] == 12 * (MOST_CONVERSATIONS + 10)
    assert sum(len(node["segments"]) for node in report["conversations"]) == MOST_SEGMENTS
    assert len(report["conversations"][0]["segments"]) == 12
    assert report["conversations"][-1]["segments"] == []
    assert report["conversations"][-1]["tokens"] == 36


def test_a_very_long_conversation_is_one_node():
    pool, _, clock = make()
    pool.set_budget(10**9)
    lease = pool.lease(pool.lookup([1]))
    parent = pool.root
    for turn in range(1500):
        new = pool.insert(parent, [turn], FakeData([turn], 0, divisible=True), lease=lease)
        assert new is not None
        parent = new
    (node,) = pool_report(pool, ExactIds(), clock())["conversations"]
    assert node["tokens"] == 1500


def test_the_tree_is_never_too_deep_for_json():
    pool, _, clock = make()
    pool.set_budget(10**9)
    lease = pool.lease(pool.lookup([1]))
    parent = pool.root
    for turn in range(600):
        # Every turn was answered twice.
        clock.advance(1)
        pool.insert(parent, [turn, 1], FakeData([turn, 1], 0, divisible=True))
        new = pool.insert(parent, [turn, 2], FakeData([turn, 2], 0, divisible=True), lease=lease)
        assert new is not None
        parent = new
    report = pool_report(pool, ExactIds(), clock())
    assert report["conversation_count"] == 600 + 1
    assert json.loads(json.dumps(report)) == report


def test_a_conversation_carries_its_last_reason():
    pool, model, clock = make()
    reporter = PoolReporter(pool, ExactIds(), clock)
    ids, boundaries = Chat(words("system", 100)).user(words("a", 50)).prompt()
    model.serve(ids, boundaries, words("a!", 20))
    (leaf,) = pool.leaves()
    reporter.explained("r1", "agent", Reason("new", 0, 153), leaf)
    reporter.refresh(force=True)
    (system,) = reporter.latest()["conversations"]
    assert system["children"][0]["why"] == "reused 0 of 153: new"
    assert system["why"] == ""


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
    assert reporter.latest()["conversation_count"] == 60
