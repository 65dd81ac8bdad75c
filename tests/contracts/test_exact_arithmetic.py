"""Rounding decides nothing: what is computed in floats and 64-bit integers, held against exact arithmetic.

The longest path through a schedule is found here by fractions alone, and the best placement by Python's integers.
"""

import random
from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from costmodels.pipeline import simulate
from costmodels.vocabulary.action import Action, ActionLists
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.problems import PlacementProblem
from planner.solver.cp_sat import CpSatSolver
from tests.random_problems import random_placement

MOST_NS = 10**14  # what one operator may take for one sequence: 100,000 s


def longest_path_s(schedule: ActionLists, seconds: dict[str, list[Fraction]], send_s: list[Fraction]) -> Fraction:
    """Of the end of the last action; each waits for the one before it on its rank and for what it reads.

    What a rank sends is carried one after the other.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    before = {action: actions[place - 1] for actions in schedule for place, action in enumerate(actions) if place}
    last_stage, there = len(send_s), {action for actions in schedule for action in actions}

    @cache
    def end_s(action: Action) -> Fraction:
        kind, stage, i = action
        waits = [end_s(before[action])] if action in before else []
        if kind == "F" and stage > 0:
            waits.append(arrival_s(Action("F", stage - 1, i)))
        if kind in "BI" and stage < last_stage:
            gradient = Action("B", stage + 1, i)
            waits.append(arrival_s(gradient if gradient in there else Action("I", stage + 1, i)))
        if kind in "BI" and stage == last_stage:
            waits.append(end_s(Action("F", stage, i)))
        if kind == "W":
            waits.append(end_s(Action("I", stage, i)))
        return max(waits, default=Fraction(0)) + seconds[kind][stage]

    @cache
    def sent_s(action: Action) -> Fraction:
        """When the rank's link has carried all that it sent up to ``action``."""
        earlier, way = sent_s(before[action]) if action in before else Fraction(0), way_s(action)
        return max(end_s(action), earlier) + way if way else earlier

    def arrival_s(action: Action) -> Fraction:
        return sent_s(action) if way_s(action) else end_s(action)

    def way_s(action: Action) -> Fraction:
        """Of what an action sends: a result to the stage behind, or a gradient to the one before."""
        border = {"F": action.stage, "W": last_stage}.get(action.kind, action.stage - 1)
        is_sent = 0 <= border < last_stage and rank_of[border] != rank_of[border + 1]
        return send_s[border] if is_sent else Fraction(0)

    return max(end_s(actions[-1]) for actions in schedule)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_simulated_step_is_the_longest_path_in_fractions(name: ScheduleName) -> None:
    """Seconds between a nanosecond and an hour in one schedule."""
    rng = random.Random(11)
    num_tried = 0
    for p, v, m in product((1, 2, 3, 4), (1, 2, 3), (1, 4, 12)):
        if name.rules.violations(p, v, m):
            continue
        num_tried += 1
        num_stages, schedule = p * v, name.rules.actions(p, v, m)
        exact = {kind: [Fraction(10 ** rng.uniform(-9, 3.5)) for _ in range(num_stages)] for kind in "FIW"}
        exact["B"] = [Fraction(float(i + w)) for i, w in zip(exact["I"], exact["W"], strict=True)]
        send_s = [Fraction(10 ** rng.uniform(-9, 3.5)) for _ in range(num_stages - 1)]
        seconds = {kind: [float(each) for each in of_kind] for kind, of_kind in exact.items()}
        split = seconds["I"], seconds["W"]
        found = simulate(schedule, seconds["F"], seconds["B"], [float(each) for each in send_s], split)
        expected = longest_path_s(schedule, exact, send_s)
        assert abs(Fraction(found.makespan_s) - expected) <= expected * Fraction(1, 10**13), (p, v, m)
    assert num_tried >= 4


def test_placements_of_the_largest_costs_are_the_best_to_the_last_nanosecond() -> None:
    """Costs of 10^14 ns beside costs of a few: a solver that rounds takes the wrong one, or bounds it wrongly."""
    rng = random.Random(12)
    num_solved = 0
    for seed in range(60):
        small = random_placement(seed)
        scale = rng.choice((10**9, 10**12, MOST_NS // 9))

        def scaled(cost: int | None, scale: int = scale) -> int | None:
            return None if cost is None else cost * scale + rng.randint(0, 3)

        nodes = tuple(tuple(cost * scale + rng.randint(0, 3) for cost in costs) for costs in small.node_costs_ns)
        edges = tuple((i, j, tuple(tuple(map(scaled, row)) for row in costs)) for i, j, costs in small.edges)
        problem = PlacementProblem(nodes, edges)
        found, best = CpSatSolver().solve_placement(problem), least_ns(problem)
        assert (found is None) == (best is None)
        if found is not None:
            num_solved += 1
            assert (found.cost_ns, found.bound_ns) == (best, best), seed
    assert num_solved > 30


def least_ns(problem: PlacementProblem) -> int | None:
    """Every choice of every operator; None where each takes what is impossible."""
    costs: list[int] = []
    for choice in product(*(range(len(each)) for each in problem.node_costs_ns)):
        paid = [matrix[choice[i]][choice[j]] for i, j, matrix in problem.edges]
        if None not in paid:
            own = sum(each[s] for each, s in zip(problem.node_costs_ns, choice, strict=True))
            costs.append(own + sum(each for each in paid if each is not None))
    return min(costs, default=None)
