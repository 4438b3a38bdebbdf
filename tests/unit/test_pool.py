import numpy as np
import pytest

from pooled_mlx.engine.pool import Pool
from tests.pool_fakes import RULE, FakeData, Reserved, check_match, make_pool, put, words

# Lookup


def test_an_empty_pool_matches_nothing():
    match = make_pool().lookup([1, 2, 3])
    assert (match.path, match.tokens, match.partial, match.matched) == ((), 0, None, 0)


def test_one_token_is_left_to_compute():
    pool = make_pool()
    first = put(pool, pool.root, words("a", 100))
    put(pool, first, words("b", 50))
    ids = [*words("a", 100), *words("b", 60)]
    assert [pool.lookup(ids[:length]).tokens for length in (1, 100, 101, 150, 151)] == [0, 0, 100, 100, 150]


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


def test_a_divisible_cache_leaves_one_token_to_compute_on_the_grid_as_well():
    pool = make_pool(divisible=True)
    first = put(pool, pool.root, words("a", 100))
    put(pool, first, words("b", 100))
    whole = [*words("a", 100), *words("b", 100)]
    for end in (32, 64, 132, 164):
        match = pool.lookup(whole[:end])
        check_match(pool, match, whole[:end])
        assert match.tokens == end - 32


def test_siblings_of_equal_length_are_told_apart():
    pool = make_pool()
    trunk = put(pool, pool.root, words("trunk", 50))
    twins = [[7, *words(name, 40)] for name in "ab"]
    stored = [put(pool, trunk, ids) for ids in twins]
    assert stored[0] is not stored[1]
    for ids, segment in zip(twins, stored, strict=True):
        prompt = [*words("trunk", 50), *ids, 9]
        match = pool.lookup(prompt)
        check_match(pool, match, prompt)
        assert match.path == (trunk, segment)


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


@pytest.mark.parametrize("leased", [True, False])
def test_a_state_that_comes_back_may_push_out_what_hangs_below(leased: bool):
    pool = make_pool()
    link = put(pool, pool.root, words("a", 100))
    below = put(pool, link, words("b", 20))
    link.data.drop_state()
    pool._measure(link)
    pool.set_budget(pool.used_bytes)
    lease = pool.lease(pool.lookup(words("x", 5))) if leased else None
    again = put(pool, pool.root, words("a", 100), lease=lease)
    assert again is link
    assert (link.held, below.held) == (True, False)
    assert link.has_state
    assert pool.segment_bytes == sum(segment.bytes for segment in pool.segments()) <= pool.budget_bytes
    if lease is not None:
        assert (link.leases, link.tips) == (1, 1)
        lease.release()
    assert (link.leases, link.tips) == (0, 0)
    assert pool.lookup([*words("a", 100), 1]).path == (link,)


def test_a_link_that_is_pushed_out_with_what_hangs_below_is_stored_again_or_not_at_all():
    pool = make_pool()
    link = put(pool, pool.root, words("a", 100))
    put(pool, link, words("b", 20))
    link.data.drop_state()
    pool._measure(link)
    assert pool.set_budget(pool.used_bytes)
    Reserved(pool).live_bytes = 600
    data = FakeData(words("a", 100), 0)
    again = put(pool, pool.root, words("a", 100), data=data)
    assert again is None or again.held
    assert data.released or (again is not None and again.data is data)
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


def test_what_is_live_counts_and_evicts():
    pool = make_pool(10_000)
    reserved = Reserved(pool)
    first = put(pool, pool.root, words("a", 500))
    assert not reserved.take(10_001)
    assert first.held
    assert reserved.take(10_000)
    assert not first.held
    assert pool.used_bytes == 10_000
    assert put(pool, pool.root, words("b", 10)) is None
    assert pool.counters["refused: no room"] == 1
    reserved.give_back(10_000)
    assert put(pool, pool.root, words("b", 10)) is not None


def test_slack_goes_before_anything_is_evicted():
    pool = make_pool(10_000)
    first = put(pool, pool.root, words("a", 200))
    reserved = Reserved(pool)
    reserved.slack_bytes = 10_000 - first.bytes
    assert pool.make_room(5_000)
    assert (pool.used_bytes, reserved.slack_bytes) == (5_000, 5_000 - first.bytes)
    assert first.held
    assert pool.make_room(9_000)
    assert reserved.slack_bytes <= 1_000
    assert not first.held


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
        reserved = Reserved(pool)
        reserved.live_bytes = 15_000
        assert not pool.make_room(0)
        assert first.held
        assert not second.held
        reserved.give_back(15_000)
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
