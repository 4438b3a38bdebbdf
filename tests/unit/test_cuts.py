import pytest

from pooled_mlx.core.cuts import CutRule, Piece, checkpoints, pieces, resume_positions

RULE = CutRule(step=128, spacing=512, minimum=64)


def test_boundaries_are_kept_and_close_ones_merged_away():
    assert checkpoints([100, 163, 164, 400], 450, RULE) == (100, 164, 400)
    assert checkpoints([63], 450, RULE) == ()
    assert checkpoints([64], 450, RULE) == (64,)


def test_the_distance_counts_from_the_last_kept_position():
    # 140 is dropped for 100, so 180 is measured from 100 and stays.
    assert checkpoints([100, 140, 180], 200, RULE) == (100, 180)


def test_long_stretches_are_cut_at_the_spacing_from_the_last_kept_position():
    assert checkpoints([100], 1700, RULE) == (100, 612, 1124, 1636)
    assert checkpoints([], 1024, RULE) == (512, 1024)


def test_a_boundary_close_behind_a_spacing_cut_is_merged_into_it():
    assert checkpoints([570], 600, RULE) == (512,)
    assert checkpoints([576], 600, RULE) == (512, 576)
    assert checkpoints([512], 600, RULE) == (512,)


def test_boundaries_may_be_unsorted_repeated_and_outside():
    assert checkpoints([300, 0, -5, 100, 100, 900], 400, RULE) == (100, 300)


def test_the_end_of_a_prompt_may_be_a_checkpoint():
    assert checkpoints([200], 200, RULE) == (200,)
    assert pieces(0, (200,), 200, RULE) == (Piece(0, 128, False), Piece(128, 200, True))


def test_the_grid_restarts_at_each_checkpoint():
    assert pieces(0, (200,), 350, RULE) == (
        Piece(0, 128, False),
        Piece(128, 200, True),
        Piece(200, 328, False),
        Piece(328, 350, False),
    )


def test_a_resume_point_on_the_grid_leaves_the_cold_pieces():
    cold = pieces(0, (150, 290), 400, RULE)
    for start in (128, 150, 278, 290):
        assert pieces(start, (150, 290), 400, RULE) == tuple(piece for piece in cold if piece.start >= start)


def test_an_adopted_end_takes_the_place_of_a_checkpoint_just_behind_it():
    # 301 is where the next turn starts; nothing is won by a state one token after the adopted answer's.
    assert pieces(300, (200, 301, 450), 460, RULE) == (Piece(300, 428, False), Piece(428, 450, True), Piece(450, 460, False))
    assert pieces(300, (200, 364), 370, RULE) == (Piece(300, 364, True), Piece(364, 370, False))


def test_a_checkpoint_at_the_very_end_behind_an_adopted_answer_is_still_computed():
    assert pieces(300, (200, 301), 301, RULE) == (Piece(300, 301, False),)


@pytest.mark.parametrize("start", [-1, 10, 11])
def test_at_least_one_token_is_computed(start: int):
    with pytest.raises(ValueError, match="at least one token"):
        pieces(start, (), 10, RULE)


def test_pieces_shrink_with_the_position():
    rule = CutRule(128, 512, 64, ((300, 64), (600, 16)))
    assert [rule.step_at(position) for position in (0, 299, 300, 599, 600, 10**6)] == [128, 128, 64, 64, 16, 16]
    # A piece that begins before the shrink is whole; the spacing's checkpoints are where they were.
    ends = [piece.end for piece in pieces(0, checkpoints([], 700, rule), 700, rule)]
    assert ends == [128, 256, 384, 448, 512, 576, 640, 656, 672, 688, 700]
    assert [rule.floor(0, position) for position in (127, 128, 383, 384, 447, 448, 639, 640, 655, 690)] == [
        *(0, 128, 256, 384, 384, 448, 576, 640, 640, 688)
    ]


@pytest.mark.parametrize("shrinks", [((0, 64),), ((300, 128),), ((300, 50),), ((300, 64), (300, 32)), ((300, 64), (400, 64))])
def test_a_table_that_makes_no_sense_is_refused(shrinks: tuple[tuple[int, int], ...]):
    with pytest.raises(ValueError, match="the step is"):
        CutRule(128, 512, 64, shrinks)


def test_resume_positions_are_the_grid_inside_a_segment():
    assert list(resume_positions(100, 484, RULE)) == [228, 356]
    assert list(resume_positions(100, 485, RULE)) == [228, 356, 484]
    assert list(resume_positions(100, 228, RULE)) == []


@pytest.mark.parametrize(("step", "spacing", "minimum"), [(0, 512, 64), (128, 32, 64), (128, 512, 0)])
def test_a_rule_that_makes_no_sense_is_refused(step: int, spacing: int, minimum: int):
    with pytest.raises(ValueError, match="tokens"):
        CutRule(step, spacing, minimum)
