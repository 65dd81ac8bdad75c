"""What slow links between stages cost at least, against the simulation of every schedule of several stages a rank."""

import random
from collections.abc import Iterator

import pytest

from costmodels.pipeline import simulate
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.layout.layout import Pins
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.solver.cutting import Pricers, probe
from planner.solver.glance import num_beside
from planner.solver.round_trips import round_trips
from tests.planning import A100, cluster_of, graph_of, training_of

SEVERAL = [name for name in ScheduleName if not SCHEDULES[name].has_one_stage and not SCHEDULES[name].overlaps_steps]
ROUNDING = 1 + 1e-9


def shapes(name: ScheduleName) -> Iterator[tuple[int, int, int]]:
    for p in (2, 3, 4, 8):
        for v in (1, 2, 3):
            numbers = (1, 2, 3, p, p + 1, 2 * p, 3 * p, 5 * p + 1, 6 * p, 12 * p)
            yield from ((p, v, m) for m in sorted(set(numbers)) if not name.rules.violations(p, v, m))


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("name", SEVERAL)
def test_no_schedule_takes_less_than_its_round_trips_or_its_links(name: ScheduleName, transfer: Transfer) -> None:
    rng, nearest = random.Random(name), 0.0
    for p, v, m in shapes(name):
        for hop_s in (0.0, 0.1, 1.0, 20.0):
            forward, inputs, weights = ([rng.uniform(0.2, 1.0) for _ in range(p * v)] for _ in range(3))
            whole = [a + b for a, b in zip(inputs, weights, strict=True)]
            schedule = name.rules.actions(p, v, m)
            took_s = simulate(schedule, forward, whole, hop_s, (inputs, weights), transfer=transfer).makespan_s
            of = round_trips(name, p, v, m)
            away_s = sum(forward) + (sum(inputs) if name.rules.splits_backward else sum(whole))
            least_s = m * max(of.whole_of_first * away_s + 2 * hop_s * of.hops_of_first, 2 * hop_s * of.most_hops)
            link_s = m * hop_s * num_beside(name, p, v, transfer).max() / 2 if transfer.receives_beside else 0.0
            assert max(least_s, link_s) <= took_s * ROUNDING, (p, v, m, hop_s)
            nearest = max(nearest, max(least_s, link_s) / took_s)
    # Where receivers stand and wait, or makers do, more time is lost than these bounds know of.
    assert nearest > (0.75 if transfer is Transfer.AHEAD else 0.35)


def test_the_example_of_the_docstring() -> None:
    of = round_trips(ScheduleName.ONE_F_ONE_B, 2, 1, 10)
    assert of.whole_of_first * 2.0 + 2 * 3.0 * of.hops_of_first == 4.0
    took_s = simulate(ScheduleName.ONE_F_ONE_B.rules.actions(2, 1, 10), [0.5, 0.5], [0.5, 0.5], 3.0).makespan_s
    assert took_s >= 40.0


def test_on_slow_links_no_nearly_even_cut_of_any_layout_is_faster_than_the_plan() -> None:
    """Estimates that knew nothing of messages sent the visits to pipelines that were 15 % slower."""
    cluster = cluster_of(A100, 32)
    *inner, last = cluster.profile.tiers
    rate = last.bandwidth_bytes_per_s
    slow = last.model_copy(update={"bandwidth_bytes_per_s": rate.model_copy(update={"value": rate.value / 1000})})
    profile = cluster.profile.model_copy(update={"tiers": (*inner, slow)})
    target = PricingTarget(graph_of("gpt3-125m", 1024), cluster.model_copy(update={"profile": profile}), "bf16")
    problem = Problem.build(target, training_of(64, 1024), Pins(pp=4, tp=1, cp=1))
    best, pricers = problem.solved().best, Pricers(problem.table)
    probed = [probe(pricers.of(layout), problem.solver) for layout in problem.space.layouts]
    assert best is not None
    assert best.step_time_s <= min(each.step_time_s for each in probed if each is not None) * (1 + 1e-3)
