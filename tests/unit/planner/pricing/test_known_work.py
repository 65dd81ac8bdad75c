"""Rows of work that are priced once: equal to those priced anew, and shared only where prices are the same."""

from dataclasses import replace

import numpy as np
import pytest

from planner.pricing.placements import Decision
from planner.pricing.rows import work_rows
from planner.pricing.target import PricingTarget
from planner.pricing.work import WorkPrices
from planner.table.keys import TensorSplit, WorkKey
from tests.planning import cluster_of, graph_of
from tests.unit.planner.pricing.unit_prices import decision_of

A100 = "dgx-a100-80gb"
SPLIT = TensorSplit(4, True)
KEYS = [WorkKey(SPLIT, 1, cp, size) for cp in (1, 2, 16) for size in (1, 2, 3)]


def target_of(hardware: str, num_devices: int) -> PricingTarget:
    return PricingTarget(graph_of("llama-tiny", 64), cluster_of(hardware, num_devices), "bf16")


def anew(target: PricingTarget, decisions: dict[TensorSplit, Decision]) -> WorkPrices:
    """Prices of ``KEYS`` on a target that knows none."""
    fresh = replace(target)
    return work_rows(fresh.graph, decisions, KEYS, fresh.machine, fresh.framework)


@pytest.mark.parametrize("hardware", [A100, "h800-sxm", "gb200-nvl72"])
@pytest.mark.parametrize(("there_are", "fewer"), [(288, 144), (2048, 1536), (96, 64), (64, 8), (16, 4), (24, 20)])
def test_rows_over_fewer_devices_are_those_priced_there(hardware: str, there_are: int, fewer: int) -> None:
    whole = target_of(hardware, there_are)
    decisions = {SPLIT: decision_of(whole, SPLIT)}
    whole.known_work.priced(decisions, KEYS[::2])
    part = whole.over(fewer)
    assert part == target_of(hardware, fewer)
    if part.prices_as(whole):
        assert decision_of(part, SPLIT) == decisions[SPLIT]
    rows = part.known_work.priced(decisions, KEYS)
    for known, fresh in zip(rows, anew(part, decisions), strict=True):
        np.testing.assert_allclose(known, fresh, rtol=1e-14)


def test_rows_are_shared_beyond_every_domain_and_not_within_one() -> None:
    many = target_of(A100, 64)
    assert many.over(32).known_work is many.known_work
    assert many.over(8).known_work is not many.known_work  # one node
    rack = target_of("gb200-nvl72", 144)
    assert rack.over(72).known_work is not rack.known_work


def test_rows_of_other_placements_are_priced_anew() -> None:
    target = target_of(A100, 64)
    sharded, whole = decision_of(target, SPLIT), decision_of(target, TensorSplit(4, False))
    for decision in (sharded, whole, sharded):
        rows = target.known_work.priced({SPLIT: decision}, KEYS)
        np.testing.assert_allclose(rows.time_s, anew(target, {SPLIT: decision}).time_s, rtol=1e-14)


def test_what_is_returned_may_be_changed() -> None:
    target = target_of(A100, 64)
    decisions = {SPLIT: decision_of(target, SPLIT)}
    first = target.known_work.priced(decisions, KEYS)
    before = first.time_s.copy()
    again = target.known_work.priced(decisions, KEYS)
    again.time_s[:] = -1.0
    np.testing.assert_array_equal(target.known_work.priced(decisions, KEYS).time_s, before)
