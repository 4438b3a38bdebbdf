from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooled_mlx.catalog import builtin_folder, load_catalog
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.cuts import CutRule
from pooled_mlx.core.memory import (
    GIB,
    MIB,
    CacheShape,
    DeviceFacts,
    DoesNotFitError,
    MemoryPlan,
    Steps,
    Wired,
    loaded_bytes,
    plan_memory,
    refuse_weights,
    score_cell_bytes,
    scores_of,
    step_table,
    wires_weights,
)
from tests.mac_devices import MACS

CARDS = load_catalog(builtin_folder()).cards
QWEN36 = CacheShape(20_480, 64_389_120)


def plan(card: ModelCard, facts: DeviceFacts, **wishes: int) -> MemoryPlan:
    shape = CacheShape(card.kv_bytes_per_token, card.state_bytes)
    weights = loaded_bytes(card.weights_bytes, facts.has_metal)
    return plan_memory(
        facts, weights, shape, context_max=card.context_max, context_default=card.context_default, model=card.id, **wishes
    )


def context(card_id: str, facts: DeviceFacts) -> int | None:
    try:
        return plan(CARDS[card_id], facts).context_tokens
    except DoesNotFitError:
        return None


@pytest.mark.parametrize("facts", MACS, ids=lambda facts: facts.name)
def test_every_plan_adds_up_and_stays_under_the_limit(facts: DeviceFacts):
    for card in CARDS.values():
        if context(card.id, facts) is None:
            continue
        made = plan(card, facts)
        parts = made.weights_bytes + made.pool_bytes + made.working_bytes + made.headroom_bytes
        assert parts == made.limit_bytes <= (facts.recommended_bytes or 0)
        assert made.fits(made.context_tokens, 0).ok
        assert made.limits.wires_weights == (made.weights_bytes > 0.6 * (facts.recommended_bytes or 0))
        assert made.context_tokens % 1024 == 0


def test_a_context_that_the_user_wants_is_kept_or_refused_with_numbers():
    facts = DeviceFacts("test", 64 * GIB, True, 48 * GIB, 36 * GIB)
    assert plan_memory(facts, 20 * GIB, QWEN36, context_max=262_144, context=262_144).context_tokens == 262_144
    small = DeviceFacts("test", 32 * GIB, True, 22 * GIB, 16 * GIB)
    with pytest.raises(
        DoesNotFitError, match=r"a context of 131072 tokens does not fit: it needs 2\.\d GiB of cache.*At most \d+ tokens"
    ):
        plan_memory(small, 19 * GIB, QWEN36, context_max=262_144, context=131_072)
    with pytest.raises(DoesNotFitError, match="a context of 300000 tokens is more than the model can have: 262144"):
        plan_memory(facts, GIB, QWEN36, context_max=262_144, context=300_000)


def test_an_exact_wish_need_not_be_a_multiple():
    facts = DeviceFacts("test", 64 * GIB, True, 48 * GIB, 36 * GIB)
    assert plan_memory(facts, GIB, QWEN36, context_max=262_144, context=10_000).context_tokens == 10_000


def test_a_short_context_model_keeps_its_own_length():
    facts = DeviceFacts("test", 64 * GIB, True, 48 * GIB, 36 * GIB)
    assert plan_memory(facts, GIB, CacheShape(1000), context_max=500).context_tokens == 500


def test_too_large_model_is_refused_with_numbers_and_the_way_on():
    facts = DeviceFacts("Apple M1, 16 GB", 16 * GIB, True, 11_453_251_584, 8 * GIB)
    text = refuse_weights(facts, 20_400_000_000, "qwen3.6-35b-moe")
    assert text is not None
    assert "qwen3.6-35b-moe does not fit: it needs 20." in text
    assert "this machine allows 10.7 GiB" in text
    assert "pooled-mlx models list" in text
    assert "of cache" not in text
    assert refuse_weights(facts, 10**9, "small") is None


def test_a_limit_of_the_users_own_is_named_as_such():
    facts = DeviceFacts("test", 64 * GIB, True, 48 * GIB, 36 * GIB)
    with pytest.raises(DoesNotFitError) as refusal:
        plan_memory(facts, GIB, CacheShape(20_480), context_max=8192, limit_bytes=GIB, model="small")
    text = str(refusal.value)
    assert "--memory-limit allows 1.0 GiB. Raise it to 1.4 GiB or more, or choose a smaller model" in text
    assert "25.0 MiB of cache for a context of 1024 tokens" in text


def test_a_large_mac_is_not_filled_with_caches():
    made = plan(CARDS["qwen3.6-35b-moe"], MACS[-1])
    assert made.pool_bytes == made.limit_bytes // 4
    assert made.headroom_bytes > 50 * GIB


def test_pool_and_limit_that_the_user_wants():
    facts = DeviceFacts("test", 64 * GIB, True, 48 * GIB, 36 * GIB)
    made = plan_memory(facts, 20 * GIB, QWEN36, context_max=262_144, pool_bytes=2 * GIB)
    assert made.pool_bytes == 2 * GIB
    assert made.context_tokens == (2 * GIB - 4 * QWEN36.state_bytes - 256 * 20_480) // 20_484 // 1024 * 1024
    assert plan_memory(facts, 20 * GIB, QWEN36, context_max=8192, limit_bytes=30 * GIB).limit_bytes == 30 * GIB
    assert plan_memory(facts, 20 * GIB, QWEN36, context_max=8192, limit_bytes=60 * GIB).limit_bytes == 48 * GIB
    with pytest.raises(DoesNotFitError, match=r"a pool of 40\.0 GiB does not fit.*leave"):
        plan_memory(facts, 20 * GIB, QWEN36, context_max=262_144, pool_bytes=40 * GIB)


def test_a_request_is_refused_with_needed_and_allowed_bytes():
    facts = DeviceFacts("test", 32 * GIB, True, 22 * GIB, 16 * GIB)
    made = plan_memory(facts, 19 * GIB, QWEN36, context_max=262_144)
    assert made.fits(1000, 1000).ok
    fit = made.fits(100_000, 16_384)
    assert not fit.ok
    assert f"({fit.needed_bytes} bytes)" in fit.refusal()
    assert f"({made.pool_bytes} bytes)" in fit.refusal()


def test_float32_weights_on_the_cpu_are_counted():
    card = CARDS["smollm2-135m"]
    made = plan(card, DeviceFacts("x86_64", 4 * GIB))
    assert made.weights_bytes > 500 * 1024**2
    assert not made.limits.wires_weights
    assert made.context_tokens == 8192
    text = refuse_weights(DeviceFacts("x86_64", 24 * GIB), 20_400_000_000, "qwen3.6-35b-moe")
    assert text is not None
    assert "does not fit" in text


def test_the_embedded_model_fits_its_minimum_memory():
    card = CARDS["smollm2-135m"]
    assert plan(card, DeviceFacts("x86_64", card.minimum_memory_bytes)).context_tokens == 8192


def test_table_and_facts():
    facts = DeviceFacts("Apple M2 Pro, 32 GB", 32 * GIB, True, 22_906_503_168, 17_179_869_184)
    made = plan(CARDS["qwen3.6-35b-moe"], facts)
    lines = made.table().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["weights", "cache pool", "working space", "headroom", "limit"]
    assert "a state" in lines[1]
    assert lines[0].endswith("wired")
    assert "Metal's recommendation" in lines[4]
    small = plan_memory(facts, GIB, QWEN36, context_max=8192, limit_bytes=8 * GIB).table().splitlines()
    assert "wired" not in small[0]
    assert small[4].endswith("--memory-limit")
    assert made.facts()["context_tokens"] == made.context_tokens


@pytest.mark.parametrize(
    ("weights", "wish", "expected"),
    [
        (13.2 * GIB, "auto", False),
        (13.3 * GIB, "auto", True),
        (0, "weights", True),
        (13.2 * GIB, "weights", True),
        (20 * GIB, "off", False),
        (27.1 * GIB, "weights", True),
        (27.3 * GIB, "weights", False),
        (27.3 * GIB, "auto", False),
    ],
)
def test_weights_are_wired_where_they_are_large_and_leave_memory_unwired(weights: float, wish: Wired, expected: bool):
    facts = DeviceFacts("test", 32 * GIB, True, 22 * GIB, 16 * GIB)
    assert wires_weights(facts, int(weights), wish) is expected
    assert not wires_weights(DeviceFacts("no Metal", 32 * GIB), int(weights), wish)


@pytest.mark.parametrize(
    ("step", "tokens", "cell", "most", "table"),
    [
        (2048, 24_000, 0, 1, ((0, 2048),)),
        (2048, 14_336, 32, GIB, ((0, 2048),)),
        (2048, 131_072, 32, GIB, ((0, 2048), (14_336, 1024), (31_744, 512), (64_512, 256), (130_048, 128))),
        (2048, 131_072, 128, 8 * GIB, ((0, 2048), (30_720, 1024), (64_512, 512), (130_048, 256))),
        (512, 20_000, 32, GIB, ((0, 512),)),
        (2048, 131_072, 1024, 64 * MIB, ((0, 128),)),
        (100, 131_072, 1024, MIB, ((0, 100),)),
        (300, 10_000, 32, 32 * MIB, ((0, 300), (3072, 150))),
    ],
)
def test_the_step_shrinks_with_the_position(step: int, tokens: int, cell: int, most: int, table: Steps):
    assert step_table(step, tokens, cell, most) == table


@given(
    step=st.sampled_from([64, 128, 200, 512, 2048]),
    tokens=st.integers(1, 300_000),
    cell=st.integers(1, 512),
    most=st.integers(1, 4 * GIB),
)
def test_no_piece_of_a_table_holds_more_scores_than_it_may(step: int, tokens: int, cell: int, most: int):
    table = step_table(step, tokens, cell, most)
    rule = CutRule(table[0][1], max(table[0][1], 64), 64, table[1:])
    largest = scores_of(table, tokens, cell)
    ends = [*(start for start, _ in table[1:]), tokens]
    starts = [start for (first, _), end in zip(table, ends, strict=True) for start in {first, (first + end) // 2, end - 1}]
    for start in starts:
        piece = min(rule.step_at(start), tokens - start)
        held = piece * (start + piece) * cell
        assert held <= largest
        assert held <= most or rule.step_at(start) // 2 < 128 or rule.step_at(start) % 2
    assert largest <= cell * step * tokens


@pytest.mark.parametrize(("memory", "step"), [(36, 256), (48, 512), (64, 512)])
def test_the_plan_has_room_for_the_scores_of_the_longest_context(memory: int, step: int):
    """Qwen3.6-35B-A3B has 16 heads of 256 values, for which Metal has no kernel: 2.0 GiB at 512 tokens behind 131,072."""
    assert score_cell_bytes(16, 256, has_metal=True) * 512 * 131_072 == 2 * GIB
    facts = next(facts for facts in MACS if facts.memory_bytes == memory * GIB)
    card = CARDS["qwen3.6-35b-moe"]
    made = plan(card, facts, cell_bytes=32)
    assert made.context_tokens == 131_072
    table = step_table(2048, made.context_tokens, 32, made.most_scores_bytes)
    assert table[0] == (0, 2048)
    assert table[-1][1] == step
    assert made.scores_bytes >= 32 * step * 131_072
    assert made.working_bytes >= made.scores_bytes + 0.04 * card.weights_bytes - 1
    assert made.scores_bytes <= made.limit_bytes / 16
    assert "attention scores" in made.table()


@pytest.mark.parametrize(
    ("heads", "dim", "metal", "cell"), [(32, 128, True, 0), (64, 64, True, 0), (8, 256, True, 16), (4, 64, False, 16)]
)
def test_which_heads_keep_scores(heads: int, dim: int, metal: bool, cell: int):
    assert score_cell_bytes(heads, dim, metal) == cell


def test_scores_cost_context_where_memory_is_short():
    facts = DeviceFacts("test", 32 * GIB, True, 22 * GIB, 16 * GIB)
    free = plan_memory(facts, 19 * GIB, QWEN36, context_max=262_144)
    held = plan_memory(facts, 19 * GIB, QWEN36, context_max=262_144, cell_bytes=32)
    assert held.context_tokens < free.context_tokens
    assert held.fits(held.context_tokens, 0).ok
    with pytest.raises(DoesNotFitError, match=f"At most {held.context_tokens} tokens fit"):
        plan_memory(facts, 19 * GIB, QWEN36, context_max=262_144, context=free.context_tokens, cell_bytes=32)


@given(
    recommended=st.integers(2 * GIB, 200 * GIB),
    weights=st.integers(0, 150 * GIB),
    kv=st.integers(1, 500_000),
    state=st.integers(0, 300 * 1024**2),
    longest=st.integers(1, 1_000_000),
    cell=st.sampled_from([0, 32, 256]),
)
def test_any_plan_is_inside_the_limit_and_its_context_fits(
    recommended: int, weights: int, kv: int, state: int, longest: int, cell: int
):
    facts = DeviceFacts("any", 2 * recommended, True, recommended, recommended)
    try:
        made = plan_memory(facts, weights, CacheShape(kv, state), context_max=longest, cell_bytes=cell)
    except DoesNotFitError:
        assert weights * 1.04 + 2 * kv * 1024 + 8 * state + 512 * MIB + recommended * (cell > 0) / 16 > 0.9 * recommended
        return
    assert made.weights_bytes + made.pool_bytes + made.working_bytes + made.headroom_bytes == made.limit_bytes
    assert 0 < made.context_tokens <= min(longest, 131_072)
    assert min(made.pool_bytes, made.working_bytes, made.headroom_bytes) >= 0
    assert made.fits(made.context_tokens, 0).ok


def test_this_machine_can_be_read():
    from pooled_mlx.runner.devices import read_device

    facts = read_device()
    assert facts.memory_bytes > 2**28
    assert 0 < facts.limit_bytes <= facts.memory_bytes
