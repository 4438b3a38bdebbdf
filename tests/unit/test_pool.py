import numpy as np
import pytest

from pooled_mlx.engine.cuts import CutRule
from pooled_mlx.engine.pool import MOST_PINS, MOST_STATES, Pool
from tests.pool_fakes import RULE, Chat, Clock, FakeData, FakeModel, check_match, words


def make_pool(budget: int = 10**9, *, divisible: bool = False) -> Pool:
    clock = Clock()
    return Pool(budget, b"model", divisible=divisible, rule=RULE, clock=clock)


def put(pool: Pool, parent, ids, **options):
    above = [int(i) for segment in parent.path() for i in segment.ids]
    data = options.pop("data", None) or FakeData([*above, *ids], len(above), divisible=pool.divisible)
    return pool.insert(parent, ids, data, **options)


def states(pool: Pool, ids) -> list[int]:
    """The ends of all states along a stored path."""
    return [segment.end for segment in pool.lookup([*ids, 0]).path if segment.has_state]


# Lookup


def test_an_empty_pool_matches_nothing():
    match = make_pool().lookup([1, 2, 3])
    assert (match.path, match.tokens, match.partial, match.matched) == ((), 0, None, 0)


def test_the_deepest_stored_prefix_is_found():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    second = put(pool, first, words("b", 50))
    match = pool.lookup([*words("a", 100), *words("b", 50), 9, 9])
    assert match.path == (first, second)
    assert (match.tokens, match.matched) == (150, 150)
    assert pool.lookup([*words("a", 100), 9]).path == (first,)


def test_at_least_one_token_is_left_to_compute():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    put(pool, first, words("b", 50))
    match = pool.lookup([*words("a", 100), *words("b", 50)])
    assert (match.tokens, match.matched) == (100, 150)
    assert pool.lookup(words("a", 100)).tokens == 0
    assert pool.lookup([]).tokens == 0


def test_a_limit_is_obeyed():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    put(pool, first, words("b", 50))
    ids = [*words("a", 100), *words("b", 60)]
    assert [pool.lookup(ids, limit).tokens for limit in (99, 100, 149, 150, 500)] == [0, 100, 100, 150, 150]


def test_one_other_id_anywhere_is_a_miss_from_there_on():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    put(pool, first, words("b", 50))
    whole = [*words("a", 100), *words("b", 50)]
    for at in range(150):
        changed = [*whole, 7]
        changed[at] += 1
        match = pool.lookup(changed)
        check_match(pool, match, changed)
        assert (match.tokens, match.matched) == (100 if at >= 100 else 0, at)


def test_siblings_may_begin_alike_and_the_longest_way_wins():
    pool = make_pool()
    ids = words("a", 300)
    short = put(pool, pool.root, ids[:100])
    long = put(pool, pool.root, ids[:200])
    assert pool.lookup([*ids[:250]]).path == (long,)
    deeper = put(pool, short, ids[100:230])
    assert pool.lookup([*ids[:250]]).path == (short, deeper)
    assert pool.lookup([*ids[:220]]).path == (long,)


def test_without_a_state_a_path_is_resumed_at_the_last_one():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    second = put(pool, first, words("b", 50))
    third = put(pool, second, words("c", 50))
    second.data.drop_state()
    whole = [*words("a", 100), *words("b", 50), *words("c", 50)]
    assert pool.lookup([*whole, 1]).path == (first, second, third)
    match = pool.lookup([*whole[:160], 1])
    assert match.path == (first,)
    assert (match.tokens, match.matched) == (100, 160)


def test_a_divisible_cache_resumes_inside_a_segment_on_the_step_grid():
    pool = make_pool(divisible=True)
    first = put(pool, pool.root, words("a", 100))
    second = put(pool, first, words("b", 100))
    whole = [*words("a", 100), *words("b", 100)]
    match = pool.lookup([*whole[:170], 1, 2])
    assert match.path == (first,)
    assert match.partial == (second, 64)
    assert (match.tokens, match.matched) == (164, 170)
    check_match(pool, match, [*whole[:170], 1, 2])
    assert pool.lookup([*whole[:131], 1]).partial is None
    assert pool.lookup([*whole[:50], 1]).tokens == 32
    # A resend of the whole prompt leaves the last stretch of the grid to compute.
    assert pool.lookup(whole).tokens == 196


# Insert


def test_an_equal_segment_is_stored_once():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    again = FakeData(words("a", 100), 0)
    used = pool.used_bytes
    assert put(pool, pool.root, words("a", 100), data=again) is first
    assert again.released
    assert not first.data.released
    assert pool.used_bytes == used


def test_a_dropped_state_comes_back_when_it_is_computed_again():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    put(pool, first, words("b", 50))
    old = first.data
    pool._drop_state(first)
    assert pool.lookup([*words("a", 100), 1]).tokens == 0
    assert put(pool, pool.root, words("a", 100)) is first
    assert old.released
    assert pool.lookup([*words("a", 100), 1]).tokens == 100
    assert pool.segment_bytes == sum(segment.bytes for segment in pool.segments())


def test_keys_are_those_of_the_path_under_the_fingerprint():
    one, two = make_pool(), make_pool()
    other = Pool(10**9, b"another model", divisible=False, rule=RULE)
    keys = []
    for pool in (one, two, other):
        first = put(pool, pool.root, words("a", 100))
        keys.append((first.key, put(pool, first, words("b", 50)).key))
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])
    assert put(one, one.root, words("b", 50)).key not in keys[0]


def test_an_empty_segment_is_refused():
    pool = make_pool()
    with pytest.raises(ValueError, match="at least one token"):
        pool.insert(pool.root, [], FakeData([], 0))


def test_nothing_hangs_on_what_has_left_the_pool():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    pool.drop(first, "poisoned")
    data = FakeData(words("b", 50), 0)
    assert pool.insert(first, words("b", 50), data) is None
    assert data.released
    assert pool.counters["refused: parent gone"] == 1
    assert pool.used_bytes == 0


def test_stored_ids_are_private():
    pool = make_pool()
    ids = np.array(words("a", 100), np.uint32)
    first = put(pool, pool.root, ids)
    ids[:] = 0
    assert first.ids.tolist() == words("a", 100)


# Leases, reservations, budget


def test_what_is_leased_stays():
    pool = make_pool(20_000)
    first = put(pool, pool.root, words("a", 500))
    match = pool.lookup([*words("a", 500), 1])
    with pool.lease(match):
        assert not pool.set_budget(1000)
        assert first.held
        assert first.has_state
    assert pool.set_budget(1000)
    assert not first.held
    assert pool.used_bytes == 0


def test_a_lease_follows_the_request():
    pool = make_pool()
    lease = pool.lease(pool.lookup([1, 2]))
    first = put(pool, pool.root, words("a", 100), lease=lease)
    second = put(pool, first, words("b", 50), lease=lease)
    assert (first.leases, first.tips, second.leases, second.tips) == (1, 0, 1, 1)
    pool.set_budget(0)
    assert second.has_state
    assert not first.has_state
    lease.release()
    lease.release()
    assert (first.leases, second.leases, second.tips) == (0, 0, 0)


def test_a_partly_used_segment_is_leased_until_the_request_moves_on():
    pool = make_pool(divisible=True)
    first = put(pool, pool.root, words("a", 100))
    second = put(pool, first, words("b", 100))
    ids = [*words("a", 100), *words("b", 70), *words("c", 50)]
    lease = pool.lease(pool.lookup(ids))
    assert second.leases == 1
    new = put(pool, first, ids[100:], lease=lease)
    assert (second.leases, new.leases, first.leases) == (0, 1, 1)
    lease.release()


def test_a_segment_without_state_lives_as_long_as_its_request():
    pool = make_pool()
    data = FakeData(words("a", 100), 0)
    data.drop_state()
    assert put(pool, pool.root, words("a", 100), data=data) is None
    assert pool.counters["refused: no state"] == 1
    lease = pool.lease(pool.lookup([1, 2]))
    data = FakeData(words("a", 100), 0)
    data.drop_state()
    link = put(pool, pool.root, words("a", 100), data=data, lease=lease)
    assert link.held
    lease.release()
    assert not link.held
    assert pool.used_bytes == 0


def test_the_state_a_request_would_be_rebuilt_from_stays():
    pool = make_pool()
    lease = pool.lease(pool.lookup([1, 2]))
    first = put(pool, pool.root, words("a", 100), lease=lease)
    link = FakeData([*words("a", 100), *words("b", 50)], 100)
    link.drop_state()
    put(pool, first, words("b", 50), data=link, lease=lease)
    assert not pool.set_budget(0)
    assert first.has_state
    lease.release()
    assert pool.used_bytes == 0


def test_reservations_count_and_evict():
    pool = make_pool(10_000)
    first = put(pool, pool.root, words("a", 500))
    assert not pool.reserve(10_001)
    assert first.held
    assert pool.reserve(10_000)
    assert not first.held
    assert pool.used_bytes == 10_000
    assert put(pool, pool.root, words("b", 10)) is None
    assert pool.counters["refused: no room"] == 1
    pool.unreserve(10_000)
    assert put(pool, pool.root, words("b", 10)) is not None
    with pytest.raises(ValueError, match="only 0 are reserved"):
        pool.unreserve(1)


def test_room_that_cannot_be_made_costs_nothing():
    pool = make_pool(20_000)
    first = put(pool, pool.root, words("a", 500))
    second = put(pool, pool.root, words("b", 500))
    with pool.lease(pool.lookup([*words("a", 500), 1])):
        assert not pool.make_room(15_000)
        assert second.held
        assert pool.make_room(10_000)
        assert not second.held
    assert first.held


def test_what_is_above_the_budget_goes_even_if_more_room_cannot_be_made():
    pool = make_pool(20_000)
    first = put(pool, pool.root, words("a", 500))
    second = put(pool, pool.root, words("b", 500))
    with pool.lease(pool.lookup([*words("a", 500), 1])):
        # A running request's bytes are real whatever the budget says.
        pool.reserved_bytes += 15_000
        assert not pool.make_room(0)
        assert first.held
        assert not second.held
        pool.unreserve(15_000)
    assert pool.used_bytes == first.bytes


def test_a_poisoned_segment_goes_with_everything_below_it_even_when_leased():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    second = put(pool, first, words("b", 50))
    third = put(pool, second, words("c", 50))
    whole = [*words("a", 100), *words("b", 50), *words("c", 50), 1]
    lease = pool.lease(pool.lookup(whole))
    assert pool.drop(second, "poisoned") == 2
    assert pool.drop(second, "poisoned") == 0
    assert second.data.released
    assert third.data.released
    assert pool.lookup(whole).tokens == 100
    lease.release()
    assert (first.leases, first.tips) == (0, 0)
    assert pool.counters["dropped: poisoned"] == 2
    assert pool.segment_bytes == first.bytes


def test_dropping_a_tail_takes_a_stateless_link_with_it():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    second = put(pool, first, words("b", 50))
    third = put(pool, second, words("c", 50))
    pool._drop_state(second)
    pool.drop(third, "poisoned")
    assert not second.held
    assert first.held


def test_clear_empties_the_pool():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100), boundary="system", label="agent")
    put(pool, first, words("b", 50))
    lease = pool.lease(pool.lookup([*words("a", 100), 1]))
    pool.clear()
    assert (pool.used_bytes, list(pool.segments()), dict(pool.pins)) == (0, [], {})
    lease.release()
    assert pool.lookup([*words("a", 100), 1]).tokens == 0


# Thinning and eviction


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
