"""A plan fits with a probability: what a search may take of a device, what the plan says of it, and the way out."""

from dataclasses import replace
from math import log
from pathlib import Path
from statistics import NormalDist

import pytest

from costmodels.memory_band import MemoryBand
from costmodels.recipe import load_recipe
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterSpec
from planner.api import find_plan, price_plan, with_room
from planner.errors import InfeasibleError, InputError
from planner.evaluation.evaluator import Evaluated
from planner.layout.deadline import Deadline
from planner.layout.layout import NO_PINS, Pins
from planner.plan.schema import Plan
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.render import probability
from planner.request import Request
from tests.planning import A100, cluster_of, graph_of, problem_of, training_of

MODEL, SEQ_LEN, BATCH = "gpt2-1.5b", 1024, 16


def our_band() -> MemoryBand:
    band = load_recipe().memory_band
    assert band is not None
    return band


BAND = our_band()
FACTOR = BAND.factor(0.05)


def with_memory(num_bytes: float, num_devices: int) -> ClusterSpec:
    """A100s with so much memory."""
    profile = load_profile(A100)
    memory = profile.device.memory_bytes.model_copy(update={"value": num_bytes})
    device = profile.device.model_copy(update={"memory_bytes": memory})
    return ClusterSpec(profile=profile.model_copy(update={"device": device}), num_devices=num_devices)


def problem_on(cluster: ClusterSpec, pins: Pins = NO_PINS) -> Problem:
    return Problem.build(PricingTarget(graph_of(MODEL, SEQ_LEN), cluster, "bf16"), training_of(BATCH, SEQ_LEN), pins)


def test_at_one_half_predictions_are_taken_at_their_word() -> None:
    problem = problem_of(MODEL, 4, batch=BATCH)
    whole = cluster_of(A100, 4).profile.device.memory_bytes.value
    assert [device.memory_bytes for device in problem.table.cluster.devices] == [whole]
    assert problem.at_risk(0.5).table.cluster == problem.table.cluster


def test_a_risk_is_a_smaller_device() -> None:
    """The same layouts, bounds and plan as on devices with the factor-th part of the memory."""
    whole = 24e9
    at_risk = problem_on(with_memory(whole, 4)).at_risk(0.05)
    assert at_risk.table.cluster.devices[0].memory_bytes == pytest.approx(whole / FACTOR)
    smaller = problem_on(with_memory(whole / FACTOR, 4))
    found, expected = (each.solved() for each in (at_risk, smaller))
    assert found.best is not None
    assert expected.best is not None
    assert (found.best.layout, found.best.step_time_s) == (expected.best.layout, expected.best.step_time_s)
    assert found.best.peak_memory_bytes <= whole / FACTOR
    # What was forgotten of one risk does not weigh on the next.
    assert at_risk.at_risk(0.2).at_risk(0.5).table.cluster.devices[0].memory_bytes == pytest.approx(whole)


def plan_for(risk: float, hardware: Path | str = A100) -> Plan:
    return find_plan(Request(MODEL, 4, str(hardware), SEQ_LEN, BATCH, memory_risk=risk)).plan


def test_the_plan_says_its_probability() -> None:
    plan = plan_for(0.05)
    assert plan.search is not None
    assert plan.prediction is not None
    assert plan.search.memory_risk == 0.05
    room = log(plan.prediction.memory_capacity_bytes / max(plan.prediction.peak_memory_bytes))
    by_hand = NormalDist().cdf(room / BAND.spread_above)
    assert plan.prediction.fit_probability == pytest.approx(by_hand)
    assert by_hand >= 0.95
    priced = price_plan(plan).plan.prediction
    assert priced is not None
    assert priced.fit_probability == pytest.approx(by_hand)
    assert [probability(p) for p in (0.95, 0.9951, 0.001)] == ["95 %", "above 99 %", "below 1 %"]


@pytest.fixture(scope="module")
def least_bytes() -> float:
    """What the layout that needs least of all takes on one device of four, by pricing every one."""
    problem = problem_on(with_memory(1e9, 4))
    outcome = problem.solved()
    assert outcome.best is None
    low, high = 1e9, 80e9
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        cluster = problem.table.cluster.with_memory_factor(1e9 / middle)
        fits = replace(problem, table=replace(problem.table, cluster=cluster)).can_fit(Deadline.never())
        low, high = (low, middle) if fits else (middle, high)
    return high


def file_of(cluster: ClusterSpec, folder: Path) -> Path:
    path = folder / "small.json"
    path.write_text(cluster.profile.model_copy(update={"name": "small", "aliases": ()}).model_dump_json())
    return path


def test_where_only_a_higher_risk_helps_the_hint_names_it(least_bytes: float, tmp_path: Path) -> None:
    hardware = file_of(with_memory(least_bytes * 1.06, 4), tmp_path)
    with pytest.raises(InfeasibleError) as caught:
        plan_for(0.05, hardware)
    assert caught.value.exit_code == 3
    assert "to fit with 95% (--memory-risk 0.05)" in caught.value.message
    # 6 % of room is ln 1.06 / 0.101 = 0.58 standard deviations, a probability of 72 %: 0.28 is not listed, 0.3 is.
    assert round(1 - NormalDist().cdf(log(1.06) / BAND.spread_above), 2) == 0.28
    assert caught.value.hint.startswith("give --memory-risk 0.3: ")
    plan = plan_for(0.3, hardware)
    assert plan.prediction is not None
    assert plan.prediction.fit_probability is not None
    assert 0.7 <= plan.prediction.fit_probability < 0.8


def test_where_no_risk_helps_another_change_is_named(least_bytes: float, tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_for(0.05, file_of(with_memory(least_bytes * 0.9, 4), tmp_path))
    assert "--memory-risk" not in caught.value.hint


def test_a_plan_that_is_nearly_full_names_one_with_room() -> None:
    for risk in (0.5, 0.05):
        plan = find_plan(Request("llama2-13b", 16, "dgx-a100-40gb", 2048, 64, memory_risk=risk)).plan
        assert plan.search is not None
        assert plan.prediction is not None
        assert plan.prediction.fit_probability is not None
        may_take = plan.prediction.memory_capacity_bytes / BAND.factor(risk)
        roomier = plan.search.roomier
        if max(plan.prediction.peak_memory_bytes) <= 0.9 * may_take:
            assert roomier is None
            continue
        assert roomier is not None
        assert roomier.peak_memory_bytes <= 0.9 * may_take + 1
        assert roomier.step_time_s >= plan.prediction.step_time_s * (1 - 1e-6)
        assert roomier.fit_probability is not None
        assert roomier.fit_probability > plan.prediction.fit_probability


@pytest.mark.parametrize("risk", [0.0, -0.05, 0.6, 1.0])
def test_what_is_no_risk_is_refused(risk: float) -> None:
    with pytest.raises(InputError, match=r"above 0 and at most 0\.5") as caught:
        find_plan(Request("llama-tiny", 2, A100, memory_risk=risk))
    assert "--memory-risk 0.05" in caught.value.hint


def test_a_layout_with_room_that_is_faster_is_the_plan() -> None:
    """Where cuts were not tried to the end, the search with less memory may find a faster one."""
    problem = problem_of("llama2-13b", 16, batch=64, seq_len=2048, hardware="dgx-a100-40gb")
    outcome = problem.solved()
    assert outcome.best is not None
    assert not is_roomy(outcome.best)
    slow = replace(outcome.best, step_time_s=2 * outcome.best.step_time_s)
    stopped = replace(outcome, best=slow, ranking=(slow,), is_exhausted=False)
    found, roomier = with_room(problem, stopped, Deadline.never())
    assert found.best is not None
    assert found.best.step_time_s < slow.step_time_s
    assert is_roomy(found.best)
    assert found.ranking[0] is found.best
    assert roomier is None
    found, roomier = with_room(problem, replace(stopped, is_exhausted=True), Deadline.never())
    assert found.best is slow  # a proved plan is slower only where a simpler one was preferred
    assert roomier is not None


def is_roomy(found: Evaluated) -> bool:
    """Whether every rank leaves a tenth of its room."""
    return all(
        ledger.total_bytes <= 0.9 * room for ledger, room in zip(found.ledgers, found.capacity_bytes, strict=True)
    )
