"""A random walk over the pool against an oracle that forgets nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pooled_mlx.core.cuts import CutRule, checkpoints, pieces
from pooled_mlx.engine.pool import MOST_STATES, Lease, Pool, Segment
from tests.pool_fakes import Clock, FakeData, check_match

CUTS = CutRule(step=4, spacing=12, minimum=3)
KV_BYTES, STATE_BYTES = 10, 100
# Few ids and few texts, so that prompts share beginnings of every length.
TEXTS = [[1] * 4, [1, 2, 1, 2, 1, 2], [2] * 9, [1, 1, 2, 3], [3, 1, 2] * 5, [1] * 25, [2, 2, 1]]

texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=7)
kinds = st.sampled_from(["prompt", "prompt", "prompt", "side"])
labels = st.sampled_from("abcdef")


@dataclass
class Running:
    """A request in the middle of its work."""

    ids: list[int]
    parent: Segment
    lease: Lease
    todo: list
    fork: int | None
    kind: str
    label: str


class PoolWalk(RuleBasedStateMachine):
    divisible = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = Pool(20_000, b"walk", divisible=self.divisible, rule=CUTS, clock=self.clock)
        self.resumable: set[tuple[int, ...]] = set()
        self.forgot = False
        self.running: list[Running] = []
        self.reserved: list[int] = []

    # What the oracle knows

    def know(self, prefix: list[int], start: int) -> None:
        if self.divisible:
            for end in range(start + CUTS.step, len(prefix), CUTS.step):
                self.resumable.add(tuple(prefix[:end]))
        self.resumable.add(tuple(prefix))

    def best(self, ids: list[int]) -> int:
        return max((n for n in range(1, len(ids)) if tuple(ids[:n]) in self.resumable), default=0)

    def look(self, ids: list[int]):
        match = self.pool.lookup(ids)
        check_match(self.pool, match, ids)
        best = self.best(ids)
        assert match.tokens <= best
        forgot = self.forgot or any(not name.startswith(("hits", "misses", "known", "inserted")) for name in self.pool.counters)
        if not forgot:
            assert match.tokens == best
        return match

    # What happens

    @rule(parts=texts, kind=kinds, label=labels, opening=st.sampled_from([0, 10, 100]))
    def begin(self, parts, kind, label, opening):
        if len(self.running) == 3:
            return
        ids = [i for part in parts for i in part]
        ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
        match = self.look(ids)
        lease = self.pool.lease(match, label)
        parent = match.path[-1] if match.path else self.pool.root
        todo = list(pieces(match.tokens, checkpoints(ends, len(ids), CUTS), len(ids), CUTS))
        fork = self.pool.learn_fork(match, todo, len(ids), opening)
        self.running.append(Running(ids, parent, lease, todo, fork, kind, label))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), count=st.integers(1, 6), boundary=st.sampled_from(["system", "user", "turn", "inside"]))
    def go_on(self, which, count, boundary):
        row = self.running[which % len(self.running)]
        for _ in range(count):
            if not row.todo:
                return
            piece = row.todo.pop(0)
            if piece.checkpoint:
                self.store(row, row.ids[: piece.end], row.kind, boundary)
            elif piece.end == row.fork:
                self.store(row, row.ids[: piece.end], row.kind, "fork")

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), answer=st.sampled_from(TEXTS), give_up=st.booleans())
    def end(self, which, answer, give_up):
        row = self.running.pop(which % len(self.running))
        if not give_up and not row.todo:
            self.store(row, row.ids + answer, "side" if row.kind == "side" else "answer", "turn")
        row.lease.release()

    def store(self, row: Running, prefix: list[int], kind: str, boundary: str) -> None:
        start = row.parent.end
        data = FakeData(prefix, start, divisible=self.divisible, kv_bytes=KV_BYTES, state_bytes=STATE_BYTES)
        segment = self.pool.insert(
            row.parent, prefix[start:], data, kind=kind, boundary=boundary, label=row.label, lease=row.lease
        )
        if segment is None:
            assert data.released
            return
        # A known link whose state there was no room for stays a link.
        assert segment.has_state or data.released
        assert [i for above in segment.path() for i in above.ids] == prefix
        row.parent = segment
        self.know(prefix, start)

    @rule(parts=texts)
    def ask(self, parts):
        self.look([i for part in parts for i in part])

    @rule(budget=st.integers(0, 12_000))
    def press(self, budget):
        self.pool.set_budget(budget)

    @rule(size=st.integers(0, 6_000))
    def reserve(self, size):
        before = self.pool.used_bytes
        if self.pool.reserve(size):
            assert self.pool.used_bytes <= self.pool.budget_bytes
            self.reserved.append(size)
        else:
            assert self.pool.used_bytes == before

    @precondition(lambda self: self.reserved)
    @rule()
    def unreserve(self):
        self.pool.unreserve(self.reserved.pop())

    @precondition(lambda self: self.pool.segment_bytes)
    @rule(which=st.integers(0, 1000))
    def poison(self, which):
        segments = list(self.pool.segments())
        self.pool.drop(segments[which % len(segments)], "poisoned")

    @rule(really=st.integers(0, 9))
    def clear(self, really):
        if not really:
            self.pool.clear()
            self.forgot = True
            assert self.pool.segment_bytes == 0

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds):
        self.clock.advance(seconds)

    # What always holds

    @invariant()
    def bytes_are_right(self):
        segments = list(self.pool.segments())
        for segment in segments:
            assert isinstance(segment.data, FakeData)
            assert not segment.data.released
            assert segment.bytes == 4 * segment.tokens + KV_BYTES * segment.tokens + segment.state_bytes
        assert self.pool.segment_bytes == sum(segment.bytes for segment in segments)
        assert self.pool.reserved_bytes == sum(self.reserved)
        if self.pool.used_bytes > self.pool.budget_bytes:
            assert self.pool.evictable_bytes() == 0

    @invariant()
    def the_tree_is_sound(self):
        leases: dict[int, int] = {}
        for row in self.running:
            for tip, _ in row.lease._tips:
                for segment in tip.path():
                    leases[id(segment)] = leases.get(id(segment), 0) + 1
        for segment in self.pool.segments():
            assert segment.held
            assert segment.parent is not None
            assert segment.start == segment.parent.end
            assert segment in segment.parent.children[int(segment.ids[0])]
            assert segment.leases == leases.get(id(segment), 0)
            if segment.is_leaf and not segment.leases:
                assert segment.has_state
        for pinned in self.pool.pins.values():
            assert pinned.held

    @invariant()
    def a_conversation_keeps_few_states(self):
        for leaf in self.pool.leaves():
            for side in (False, True):
                if (leaf.kind == "side") != side:
                    continue
                states = [s for s in leaf.path() if s.state_bytes and (s.kind == "side") == side]
                free = [s for s in states if not s.tips and s not in self.pool.pins.values() and s is not states[-1]]
                assert len(states) <= MOST_STATES or not free

    def teardown(self):
        for row in self.running:
            row.lease.release()
        for size in self.reserved:
            self.pool.unreserve(size)
        assert all(segment.leases == segment.tips == 0 for segment in self.pool.segments())
        assert self.pool.used_bytes <= self.pool.budget_bytes
        self.pool.clear()
        assert self.pool.used_bytes == 0


class DivisibleWalk(PoolWalk):
    divisible = True


@pytest.mark.parametrize("walk", [PoolWalk, DivisibleWalk])
def test_ten_thousand_steps(walk):
    # 2 x 100 walks of 50 steps.
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        walk, settings=settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=quiet)
    )
