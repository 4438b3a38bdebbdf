"""What the pool keeps and what goes first."""

import pytest

from pooled_mlx.core.cuts import CutRule
from pooled_mlx.engine.pool import MOST_PINS, MOST_STATES, Lease, Pool
from tests.pool_fakes import RULE, Chat, Clock, FakeData, FakeModel, make_pool, put, words


def test_a_conversation_keeps_few_states():
    # 30,000 tokens with 20 checkpoints in the proportions of a hybrid model: one state is worth 3,144 tokens of K/V.
    rule = CutRule(step=512, spacing=2048)
    pool = Pool(10**12, b"hybrid", divisible=False, rule=rule, clock=Clock())
    model = FakeModel(pool, kv_bytes=20_480, state_bytes=3_144 * 20_480)
    chat = Chat(words("system", 1500))
    for turn in range(10):
        chat.user(words(f"question {turn}", 1400))
        ids, boundaries = chat.prompt()
        model.serve(ids, boundaries, words(f"answer {turn}", 1447))
        chat.answer(words(f"answer {turn}", 1447))
    ids, _ = chat.prompt()
    kept = [segment for segment in pool.segments() if segment.state_bytes]
    assert len(kept) == MOST_STATES
    assert pool.used_bytes <= 1.2 * (20_480 * len(ids) + MOST_STATES * 3_144 * 20_480)
    ends = [segment.end for segment in kept]
    assert ends[0] == 1500
    assert ends[-1] == len(ids) - len(Chat.HEADER)


def test_a_path_never_has_more_states_than_it_may():
    pool = make_pool()
    tip = pool.root
    for number in range(3 * MOST_STATES):
        tip = put(pool, tip, words(f"turn {number}", 60), boundary="user")
        assert sum(1 for segment in tip.path() if segment.state_bytes) == min(number + 1, MOST_STATES)


def test_thinning_spares_the_state_that_a_request_stands_on():
    def grown(leased: int | None) -> tuple[set[int], Lease]:
        """Ends of the states after one turn too many, while a request resumes at the end of turn `leased`."""
        pool = make_pool()
        tip = pool.root
        path = [tip := put(pool, tip, words(f"turn {number}", 60), boundary="user") for number in range(MOST_STATES)]
        lease = Lease(pool, [path[leased]] if leased is not None else [])
        tip = put(pool, tip, words("one more", 60), boundary="user")
        return {segment.end for segment in tip.path() if segment.state_bytes}, lease

    kept, _ = grown(None)
    gone = next(number for number in range(MOST_STATES) if 60 * (number + 1) not in kept)
    assert gone < MOST_STATES - 1
    spared, lease = grown(gone)
    assert 60 * (gone + 1) in spared
    assert len(spared) == MOST_STATES
    lease.release()


def test_old_states_are_kept_at_growing_distances():
    pool = make_pool()
    model = FakeModel(pool)
    chat = Chat(words("system", 200))
    for turn in range(60):
        chat.user(words(f"question {turn}", 100))
        ids, boundaries = chat.prompt()
        model.serve(ids, boundaries, words(f"answer {turn}", 100))
        chat.answer(words(f"answer {turn}", 100))
    length = len(chat.prompt()[0])
    ends = [segment.end for segment in pool.segments() if segment.has_state]
    assert len(ends) == MOST_STATES
    assert ends[0] == 200
    # Recent turns are all there; older ones thin out, but no stretch of the history is without a state for long.
    recent = [end for end in ends if length - end < 500]
    assert len(recent) >= 4
    old = [end for end in ends[1:] if length - end >= 500]
    assert old
    assert min(length - end for end in old) < length / 2


def test_editing_a_recent_turn_computes_from_there():
    pool = make_pool()
    model = FakeModel(pool)
    chat = Chat(words("system", 200))
    for turn in range(20):
        chat.user(words(f"question {turn}", 100))
        ids, boundaries = chat.prompt()
        model.serve(ids, boundaries, words(f"answer {turn}", 100))
        chat.answer(words(f"answer {turn}", 100))
    for back in (1, 2):
        edited = chat.copy()
        del edited.turns[-2 * back + 1 :]
        position = len(edited.prompt()[0]) - len(Chat.HEADER) - 100
        edited.turns[-1] = ("user", words(f"edited {back}", 100))
        ids, boundaries = edited.prompt()
        assert model.serve(ids, boundaries) == position


def test_older_states_go_before_another_conversation():
    pool = make_pool()
    model = FakeModel(pool)
    chats = {name: Chat(words("system", 200)) for name in "ABC"}
    for turn in range(4):
        for name, chat in chats.items():
            pool.clock.advance(1)  # type: ignore[attr-defined]
            chat.user(words(f"{name} {turn}", 60))
            ids, boundaries = chat.prompt()
            model.serve(ids, boundaries, words(f"{name} answer {turn}", 60))
            chat.answer(words(f"{name} answer {turn}", 60))
    tips = sum(1 for segment in pool.segments() if segment.is_leaf)
    stored = sum(1 for segment in pool.segments() if segment.state_bytes)
    assert stored > 4 * tips
    pool.set_budget(pool.used_bytes - 1000 * (stored - 2 * tips - 1))
    for chat in chats.values():
        ids, _ = chat.user(words("next", 60)).prompt()
        assert pool.lookup(ids).tokens == len(ids) - 60 - len(Chat.HEADER)
    assert pool.counters["evicted: conversation"] == 0


def test_the_least_recently_used_of_equal_conversations_goes():
    pool = make_pool()
    leaves = []
    for name in "abcd":
        pool.clock.advance(1)  # type: ignore[attr-defined]
        leaves.append(put(pool, pool.root, words(name, 100)))
    pool.clock.advance(1)  # type: ignore[attr-defined]
    pool.lease(pool.lookup([*words("a", 100), 1])).release()
    pool.set_budget(pool.used_bytes - 1)
    assert [leaf.held for leaf in leaves] == [True, False, True, True]


def test_what_saves_more_per_byte_stays():
    pool = make_pool()
    long = put(pool, pool.root, words("long", 1000))
    short = put(pool, pool.root, words("short", 20))
    pool.set_budget(pool.used_bytes - 1)
    assert long.held
    assert not short.held


def test_age_wears_down_the_worth_of_a_long_conversation():
    pool = make_pool()
    long = put(pool, pool.root, words("long", 1000))
    pool.clock.advance(24 * 3600)  # type: ignore[attr-defined]
    short = put(pool, pool.root, words("short", 100))
    pool.set_budget(pool.used_bytes - 1)
    assert not long.held
    assert short.held


def test_a_shared_prefix_goes_after_its_conversations():
    pool = make_pool()
    shared = put(pool, pool.root, words("shared", 100))
    other = put(pool, pool.root, words("other", 60))
    tails = [put(pool, shared, words(name, 100)) for name in "abc"]
    last = put(pool, pool.root, words("the last one", 300))
    while sum(tail.held for tail in tails) > 1:
        assert shared.has_state
        pool.set_budget(pool.used_bytes - 1)
    assert not other.held
    assert last.held
    assert shared.held


def test_a_client_keeps_its_system_and_tools():
    pool = make_pool()
    names = [f"client {n}" for n in range(MOST_PINS + 1)]
    for name in names:
        pool.clock.advance(1)  # type: ignore[attr-defined]
        system = put(pool, pool.root, words(name, 100), boundary="system", label=name)
        put(pool, system, words(f"{name} talks", 200), label=name)
    assert list(pool.pins) == names[1:]
    pool.set_budget(4 * (100 * 14 + 1000))
    held = [segment.label for segment in pool.segments()]
    assert sorted(held) == names[1:]
    # The pins go too when there is no other way.
    assert pool.set_budget(0)
    assert not pool.pins


def test_what_clients_begin_with_can_be_kept_beyond_the_budget():
    pool = make_pool()
    system = put(pool, pool.root, words("system", 100), boundary="system", label="agent")
    talk = put(pool, system, words("talk", 200), label="agent")
    assert not pool.set_budget(0, keep_pins=True)
    assert (system.held, talk.held) == (True, False)
    data = FakeData(words("other", 80), 0, divisible=True)
    assert pool.insert(pool.root, words("other", 80), data) is None, "nothing that comes meanwhile takes its place"
    assert system.held
    assert pool.set_budget(0)
    assert not system.held


def test_a_side_request_is_no_reason_to_move_a_pin():
    pool = make_pool()
    main = put(pool, pool.root, words("main", 100), boundary="system", label="agent")
    put(pool, pool.root, words("title", 100), boundary="system", label="agent", kind="side")
    assert pool.pins["agent"] is main
    pool.lease(pool.lookup([*words("title", 100), 1]), "agent").release()
    assert pool.pins["agent"] is main


def test_a_side_request_that_comes_back_is_one_no_more():
    pool = make_pool()
    title = put(pool, pool.root, words("title", 100), kind="side")
    other = put(pool, pool.root, words("other", 80))
    pool.clock.advance(1)  # type: ignore[attr-defined]
    pool.lease(pool.lookup([*words("title", 100), 1])).release()
    pool.set_budget(pool.used_bytes - 1)
    assert title.held
    assert not other.held


def test_side_requests_take_no_room_from_conversations():
    pool = make_pool(3 * (100 * 14 + 1000))
    for name in ("a", "b", "c"):
        put(pool, pool.root, words(name, 100))
    assert put(pool, pool.root, words("title", 50), kind="side") is None
    assert pool.counters["refused: no room"] == 1
    pool.set_budget(pool.budget_bytes + 50 * 14 + 1000)
    first = put(pool, pool.root, words("title", 50), kind="side")
    pool.clock.advance(1)  # type: ignore[attr-defined]
    second = put(pool, pool.root, words("tags", 50), kind="side")
    assert not first.held
    assert second.held
    assert len(pool.leaves()) == 4


def test_eviction_is_the_same_each_time():
    def run() -> list[bytes]:
        pool = make_pool(40_000)
        model = FakeModel(pool)
        for round_number in range(3):
            for name in "abcdef":
                chat = Chat(words("system", 100))
                for turn in range(round_number + 1):
                    chat.user(words(f"{name} {turn}", 40 + 10 * len(name))).answer(words(f"{name}! {turn}", 30))
                ids, boundaries = chat.user(words(f"{name} last {round_number}", 40)).prompt()
                model.serve(ids, boundaries, words(f"{name} end", 30))
        return [segment.key for segment in pool.segments()]

    assert run() == run()


INCOMING = (40, -120, -80, 30, -250, -60, -90, 50, -150, -40, 70, -110)
"""Tokens of the turns of an agent; tool results have a minus."""


@pytest.mark.parametrize("answer", [9, 25, 70])
@pytest.mark.parametrize("again", [(10,), (3, 7, 10), (7, 10)], ids=str)
def test_an_agents_recent_user_turns_can_be_sent_again(answer: int, again: tuple[int, ...]):
    """Also where answers are so short that a state more or less hardly counts, until its neighbour goes."""
    pool = make_pool()
    model = FakeModel(pool)
    chat = Chat(words("system", 1500))
    begins: list[tuple[int, Chat]] = []
    for turn, size in enumerate(INCOMING):
        begins.append((len(chat.prompt()[0]) - len(Chat.HEADER), chat.copy()))
        (chat.user if size > 0 else chat.tool)(words(f"turn {turn}", abs(size)))
        ids, boundaries = chat.prompt()
        calls = turn + 1 < len(INCOMING) and INCOMING[turn + 1] < 0
        model.serve(ids, boundaries, words(f"answer {turn}", answer), calls=calls)
        chat.answer(words(f"answer {turn}", answer))
    recent = [number for number, size in enumerate(INCOMING) if size > 0][-2:]
    for name in ("same", "edited"):
        for number in again:
            start, before = begins[number]
            chat = before.copy().user(words(f"turn {number}" if name == "same" else f"{name} {number}", INCOMING[number]))
            ids, boundaries = chat.prompt()
            reused = model.serve(ids, boundaries, words(f"{name} answer {number}", 4))
            if number in recent:
                assert start - reused <= RULE.minimum, f"turn {number}, {name}"
