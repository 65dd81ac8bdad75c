"""Calibration on synthetic clusters: their hidden factors are known, and every "measurement" is a price under them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from statistics import fmean

import pytest

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.schema import FactorName
from planner.calibration.cluster import MeasuredRun, calibration_of
from planner.calibration.priors import PRIOR
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.measured_memory import memory_as_measured
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout
from planner.pricing.decisions import decided
from planner.pricing.placements import Decision
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import placement_solver
from planner.table.keys import TensorSplit
from tests.planning import cluster_of, graph_of, training_of

TODAY = datetime.date(2026, 11, 22)
BATCH, SEQ_LEN = 64, 1024
Factors = Mapping[FactorName, float]
# (pp, dp_shard, tp, ZeRO, micro-batch, recomputation)
LAYOUTS = [
    (1, 16, 1, 3, 1, Recompute.NONE), (1, 4, 4, 1, 2, Recompute.NONE), (4, 4, 1, 1, 1, Recompute.FULL),
    (2, 1, 8, 1, 4, Recompute.NONE), (2, 8, 1, 1, 4, Recompute.FULL), (1, 8, 2, 3, 2, Recompute.FULL),
    (4, 2, 2, 1, 2, Recompute.NONE), (1, 16, 1, 1, 4, Recompute.FULL), (8, 1, 2, 1, 1, Recompute.NONE),
    (1, 2, 8, 1, 8, Recompute.FULL),
    # the last four calibrate nothing
    (2, 2, 4, 1, 1, Recompute.FULL), (1, 8, 2, 1, 4, Recompute.NONE), (1, 16, 1, 3, 2, Recompute.FULL),
    (4, 4, 1, 1, 4, Recompute.NONE),
]  # fmt: skip
CLUSTERS: list[Factors] = [
    {"product_rate": 0.9, "network_inside": 0.6, "network_between": 0.5, "memory_rate": 0.85},
    {"product_rate": 0.95, "network_inside": 1.2, "network_between": 0.4, "memory_rate": 1.1, "attention_rate": 0.7},
    {"product_rate": 1.08, "network_between": 0.35, "memory_rate": 0.7},
]


@pytest.fixture(scope="module")
def target() -> PricingTarget:
    return PricingTarget(graph_of("llama3-8b", SEQ_LEN), cluster_of("dgx-a100-80gb", 16), "bf16")


@pytest.fixture(scope="module")
def decisions(target: PricingTarget) -> dict[TensorSplit, Decision]:
    found: dict[TensorSplit, Decision] = {}
    for tp in (1, 2, 4, 8):
        split = TensorSplit(tp, tp > 1)
        decision = decided(target, split, NOTHING, placement_solver().solve_placement)
        assert decision is not None
        found[split] = decision
    return found


def evaluated(target: PricingTarget, decisions: Mapping[TensorSplit, Decision], place: int) -> Evaluated:
    pp, shard, tp, zero, micro, recompute = LAYOUTS[place]
    layout = Layout(
        mesh=Mesh(pp, 1, shard, 1, tp, 1),
        zero_stage=zero if shard > 1 else 0,
        micro_batch_size=micro,
        num_microbatches=BATCH // (shard * micro),
        schedule=ScheduleName.ONE_F_ONE_B,
        virtual_stages=1,
        recompute=recompute,
        sequence_parallel=tp > 1,
    )
    split = TensorSplit(tp, tp > 1)
    table = build_table(target, training_of(BATCH, SEQ_LEN), {split: decisions[split]}, (layout,))
    evaluator = Evaluator(table, layout)
    return evaluator.evaluate(evaluator.starts())


def price(target: PricingTarget, decisions: Mapping[TensorSplit, Decision], place: int, factors: Factors) -> float:
    return evaluated(target.scaled(factors), decisions, place).step_time_s


def runs_of(
    target: PricingTarget, decisions: Mapping[TensorSplit, Decision], hidden: Factors, places: list[int]
) -> list[MeasuredRun]:
    def run(place: int) -> MeasuredRun:
        return MeasuredRun(
            f"run {place}",
            "planner",
            lambda factors: (price(target, decisions, place, factors), 1e9),
            price(target, decisions, place, hidden),
        )

    return [run(place) for place in places]


def errors(target: PricingTarget, decisions: Mapping[TensorSplit, Decision], hidden: Factors, found: Factors) -> float:
    """Mean absolute error of the four layouts that calibrate nothing."""
    others = range(10, 14)
    pairs = [(price(target, decisions, p, found), price(target, decisions, p, hidden)) for p in others]
    return fmean(abs(predicted / true - 1) for predicted, true in pairs)


def test_ten_runs_are_near_a_full_fit(target: PricingTarget, decisions: dict[TensorSplit, Decision]) -> None:
    hidden = CLUSTERS[0]
    found = calibration_of(runs_of(target, decisions, hidden, list(range(10))), TODAY)
    before, after = (errors(target, decisions, hidden, factors) for factors in ({}, found.values))
    assert after < before / 3
    assert after < 0.03


def test_one_run_helps_other_layouts_on_average(target: PricingTarget, decisions: dict[TensorSplit, Decision]) -> None:
    hidden = CLUSTERS[0]
    found = [calibration_of(runs_of(target, decisions, hidden, [place]), TODAY) for place in range(0, 10, 2)]
    after = [errors(target, decisions, hidden, calibration.values) for calibration in found]
    assert fmean(after) < 0.9 * errors(target, decisions, hidden, {})


def test_runs_that_are_as_predicted_change_nothing(
    target: PricingTarget, decisions: dict[TensorSplit, Decision]
) -> None:
    found = calibration_of(runs_of(target, decisions, {}, [0, 1]), TODAY)
    assert found.values == pytest.approx(dict.fromkeys(found.values, 1.0), abs=1e-6)
    assert all(factor.spread < factor.prior_spread for factor in found.factors.values())
    assert found.num_timed == 2


def test_a_run_inside_one_node_says_nothing_of_the_network_between_nodes(target: PricingTarget) -> None:
    runs = [MeasuredRun("one", "planner", lambda factors: (1.0 / factors.get("product_rate", 1.0), 1e9), 1.1)]
    found = calibration_of(runs, TODAY)
    assert set(found.factors) == {"product_rate"}
    # ln t = -x + noise with a normal prior: closed form of one quantity, up to the weight of Student's t.
    assert 1 / 1.1 < found.factors["product_rate"].value < 1


def test_where_the_framework_was_never_compared_one_run_moves_everything() -> None:
    """A step that is a third products, a third host and a third network is 1.4 times as long as predicted."""

    def thirds(factors: Factors) -> tuple[float, float]:
        slowed = 1 / factors.get("product_rate", 1.0) + factors.get("host_time", 1.0)
        return (slowed + 1 / factors.get("network_between", 1.0)) / 3, 1e9

    seen, unseen = (
        calibration_of([MeasuredRun("one", "own", thirds, 1.4, is_seen=is_seen)], TODAY) for is_seen in (True, False)
    )
    # Each factor has a slope of 1/3. To first order the mean is ln 1.4 v / (v + noise^2); tails add a little.
    of_factors = sum(PRIOR.spreads[name] ** 2 for name in seen.values) / 9
    for found, variance in ((seen, of_factors), (unseen, of_factors + PRIOR.common**2)):
        moved = 1.4 ** (variance / (variance + PRIOR.time_noise**2))
        assert thirds(found.values)[0] == pytest.approx(moved, abs=0.02)
    assert "memory_rate" not in seen.values  # the run says nothing of it by itself
    assert unseen.values["memory_rate"] < 0.9
    assert unseen.values["host_time"] > 1.1


def memory_run(peak: float, measured: float, reserve: float = 0.0) -> MeasuredRun:
    """A run whose predicted peak is ``peak``, a part of it reserved."""
    return MeasuredRun(
        "a run",
        "planner",
        lambda factors: (1.0, peak + reserve * factors.get("allocator_reserve", 1.0)),
        peak_memory_bytes=measured,
    )


def test_a_constant_that_every_run_takes_besides_is_found() -> None:
    """Peaks of 2 to 40 GB, each 1.5 GB more than predicted: small ones tell the constant."""
    found = calibration_of([memory_run(peak * 1e9, (peak + 1.5) * 1e9) for peak in (2, 5, 10, 20, 40)], TODAY)
    assert found.constant_bytes == pytest.approx(1.5e9, rel=0.1)
    assert found.constant_spread_bytes is not None
    assert found.constant_spread_bytes < PRIOR.constant_bytes
    assert found.factors == {}


def test_runs_that_take_less_than_predicted_have_no_constant_below_nothing() -> None:
    found = calibration_of([memory_run(10e9, 8e9, 4e9), memory_run(20e9, 18e9, 4e9)], TODAY)
    assert found.constant_bytes == 0.0
    assert found.factors["allocator_reserve"].value < 1


def test_the_constant_and_the_reserve_reach_the_ledger(
    target: PricingTarget, decisions: dict[TensorSplit, Decision]
) -> None:
    plain = evaluated(target, decisions, 1)
    more = evaluated(target.scaled({"allocator_reserve": 2.0}, 1.5e9), decisions, 1)
    for kind, besides in (("allocated", 1.5e9), ("reserved", 1.5e9)):
        difference = memory_as_measured(more, kind, "worst") - memory_as_measured(plain, kind, "worst")
        assert difference == pytest.approx(besides) if kind == "allocated" else difference > besides


def test_no_run_or_none_with_a_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="no run has a measured"):
        calibration_of([MeasuredRun("a run", "planner", lambda _: (1.0, 1.0))], TODAY)
