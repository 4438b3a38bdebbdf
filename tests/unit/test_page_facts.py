"""The facts that the tests of page, menu and status are fed with have the keys of the real ones."""

from __future__ import annotations

from pooled_mlx.engine.pool import Pool
from pooled_mlx.engine.report import Facts, PoolReporter
from pooled_mlx.prompt.exact_ids import ExactIds
from tests.engine.harness import make_row
from tests.mac_fakes import health_body, pool_body
from tests.pool_fakes import RULE, Chat, Clock, FakeModel, words


def test_the_pool_s_report() -> None:
    clock = Clock()
    pool = Pool(10**6, b"model", divisible=False, rule=RULE, clock=clock)
    model = FakeModel(pool)
    for name in "ab":
        ids, boundaries = Chat(words("system", 100)).user(words(name, 50)).prompt()
        model.serve(ids, boundaries, words(f"{name}!", 20), label="agent")
    reporter = PoolReporter(pool, ExactIds(), clock)
    reporter.refresh(force=True)
    real, fake = reporter.latest(), pool_body()
    assert set(fake) == set(real)
    assert {node["kind"] for node in real["conversations"]} == {"system"}
    for fake_node, real_node in (
        (fake["conversations"][0], real["conversations"][0]),
        (fake["conversations"][0]["children"][0], real["conversations"][0]["children"][0]),
    ):
        assert set(fake_node) == set(real_node)
        assert set(fake_node["segments"][0]) == set(real_node["segments"][0])


def test_the_engine_s_facts() -> None:
    facts = Facts()
    assert facts.requests() == []
    assert facts.rates() == []
    facts.token(make_row([1]), 3)
    assert set(facts.rates()[0]) == set(health_body()["rates"][0])
