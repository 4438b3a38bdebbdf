"""The promises of the other files here on weights, caches and logits of 16 bits, as Macs run them, where the CPU can too.

Mixture-of-experts models are not among them: the CPU backend gathers experts in float32 only.
"""

from __future__ import annotations

import numpy as np
import pytest

from pooled_mlx.runner.model import LoadedModel, mx
from tests.engine import test_exactness as exactness
from tests.engine import test_forks as forks
from tests.engine import test_last_logits as last_logits
from tests.engine import test_loop as loops
from tests.engine import test_not_finite as not_finite
from tests.tiny_models import gemma3, in_16_bits, llama, qwen3_5

MODELS = {
    "llama": lambda: in_16_bits(llama(layers=2), mx.bfloat16),
    "gemma3": lambda: in_16_bits(gemma3(layers=2, pattern=2), mx.bfloat16),
    "qwen3_5": lambda: in_16_bits(qwen3_5(layers=2, interval=2), mx.bfloat16),
}
_models: dict[str, LoadedModel] = {}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param not in _models:
        _models[request.param] = MODELS[request.param]()
    return _models[request.param]

no_log = not_finite.no_log

test_1 = exactness.test_warm_equals_cold_at_every_length_around_the_borders
test_2 = exactness.test_a_wrong_prefix_would_show
test_3 = exactness.test_edits_branches_and_repeats_are_exact
test_4 = exactness.test_parallel_conversations_do_not_mix
test_5 = exactness.test_the_shared_part_is_stored_once
test_6 = forks.test_what_a_learned_fork_gives_is_exact
test_7 = loops.test_batch_rows_equal_solo_greedy
test_8 = loops.test_a_seeded_row_draws_the_same_alone_and_in_company
test_8b = loops.test_a_later_turn_goes_on_from_the_answer
test_9a = not_finite.test_stored_numbers_that_went_bad_are_dropped_and_read_anew
test_9b = not_finite.test_a_hot_cache_that_went_bad_is_dropped_and_read_anew
test_9c = not_finite.test_only_what_went_bad_is_dropped
test_9d = not_finite.test_a_request_whose_own_numbers_are_bad_costs_others_nothing
test_9e = not_finite.test_a_number_that_is_none_only_warm_is_read_anew_once
test_9f = not_finite.test_nothing_is_kept_of_an_answer_after_its_numbers_went_bad
test_10 = exactness.test_an_adopted_answer_is_near_exact
