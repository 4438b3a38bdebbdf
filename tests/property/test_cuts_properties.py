from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pooled_mlx.core.cuts import CutRule, checkpoints, pieces, resume_positions


@st.composite
def rules(draw: st.DrawFn) -> CutRule:
    minimum = draw(st.integers(1, 80))
    step = draw(st.integers(1, 200))
    shrinks: list[tuple[int, int]] = []
    for position in sorted(draw(st.sets(st.integers(1, 500), max_size=3))):
        before = shrinks[-1][1] if shrinks else step
        if smaller := [size for size in range(1, before) if before % size == 0]:
            shrinks.append((position, draw(st.sampled_from(smaller))))
    return CutRule(step, draw(st.integers(minimum, 300)), minimum, tuple(shrinks))


lengths = st.integers(1, 600)
boundary_lists = st.lists(st.integers(1, 600), max_size=20)


@settings(deadline=None)
@given(boundary_lists, lengths, lengths, rules())
def test_checkpoints_are_prefix_stable(boundaries: list[int], length: int, shorter: int, rule: CutRule):
    prefix = min(length, shorter)
    whole = checkpoints(boundaries, length, rule)
    inside = checkpoints([b for b in boundaries if b <= prefix], prefix, rule)
    assert inside == tuple(p for p in whole if p <= prefix)


@settings(deadline=None)
@given(boundary_lists, boundary_lists, lengths, lengths, rules())
def test_what_follows_does_not_move_a_checkpoint(
    boundaries: list[int], others: list[int], length: int, shared: int, rule: CutRule
):
    shared = min(shared, length)
    common = [b for b in boundaries if b <= shared]
    one = checkpoints(common + [b for b in boundaries if b > shared], length, rule)
    two = checkpoints(common + [b for b in others if b > shared], length, rule)
    assert [p for p in one if p <= shared] == [p for p in two if p <= shared]


@settings(deadline=None)
@given(boundary_lists, lengths, rules())
def test_checkpoints_are_neither_too_close_nor_too_far(boundaries: list[int], length: int, rule: CutRule):
    kept = checkpoints(boundaries, length, rule)
    for before, after in zip((0, *kept), kept, strict=False):
        assert rule.minimum <= after - before <= rule.spacing
    last = kept[-1] if kept else 0
    assert length - last < rule.spacing
    for boundary in boundaries:
        if boundary <= length:
            # Nothing that is merged away costs more than `minimum` tokens.
            nearest = max([0, *(p for p in kept if p <= boundary)])
            assert boundary == nearest or boundary - nearest < rule.minimum


@settings(deadline=None)
@given(boundary_lists, lengths, st.integers(0, 600), rules())
def test_pieces_cover_exactly_what_is_left(boundaries: list[int], length: int, start: int, rule: CutRule):
    start = min(start, length - 1)
    kept = checkpoints(boundaries, length, rule)
    result = pieces(start, kept, length, rule)
    assert result[0].start == start
    assert result[-1].end == length
    assert all(before.end == after.start for before, after in pairwise(result))
    assert all(1 <= len(piece) <= rule.step_at(piece.start) for piece in result)
    cut = [piece.end for piece in result if piece.checkpoint]
    missing = [p for p in kept if p > start and p not in cut]
    assert set(cut) <= set(kept)
    assert all(p - start < rule.minimum for p in missing)
    assert len(missing) <= 1


@settings(deadline=None)
@given(boundary_lists, lengths, rules())
def test_warm_pieces_are_cold_pieces(boundaries: list[int], length: int, rule: CutRule):
    kept = checkpoints(boundaries, length, rule)
    cold = pieces(0, kept, length, rule)
    resumable = [p for p in kept if p < length]
    for start, end in zip((0, *kept), (*kept, length), strict=False):
        resumable += [p for p in resume_positions(start, end, rule) if p < length]
    for start in resumable:
        assert pieces(start, kept, length, rule) == tuple(piece for piece in cold if piece.start >= start)


@settings(deadline=None)
@given(st.integers(0, 600), st.integers(0, 600), rules())
def test_the_grid_is_where_whole_pieces_end(anchor: int, more: int, rule: CutRule):
    ends = [anchor, *resume_positions(anchor, anchor + more + 1, rule)]
    assert rule.floor(anchor, anchor + more) == ends[-1]


@settings(deadline=None)
@given(boundary_lists, lengths, st.integers(1, 600), rules())
def test_a_longer_prompt_runs_in_the_same_pieces(boundaries: list[int], length: int, more: int, rule: CutRule):
    short = pieces(0, checkpoints([b for b in boundaries if b <= length], length, rule), length, rule)
    total = length + more
    long = pieces(0, checkpoints(boundaries, total, rule), total, rule)
    cuts = [piece.end for piece in short if piece.checkpoint]
    last = cuts[-1] if cuts else 0
    assert [piece for piece in short if piece.end <= last] == [piece for piece in long if piece.end <= last]
