"""The oracle: tries every assignment of the same programs. For small instances and for tests."""

from __future__ import annotations

from itertools import combinations, product

from planner.problems import (
    DegreeProblem,
    DegreeSolution,
    PlacementProblem,
    PlacementSolution,
    StageProblem,
    StageSolution,
    fits,
    pipeline_bound_s,
)
from planner.solver.base import Solver


class ExhaustiveSolver(Solver):
    """Enumerates; exact by construction."""

    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """Tries the product of all strategies."""
        best: PlacementSolution | None = None
        for choices in product(*(range(len(costs)) for costs in problem.node_costs_ns)):
            cost = placement_cost_ns(problem, choices)
            if cost is not None and (best is None or cost < best.cost_ns):
                best = PlacementSolution(choices, cost, cost)
        return best

    def solve_stages(self, problem: StageProblem, cutoff_s: float | None = None) -> StageSolution | None:
        """Tries every combination of cuts."""
        best: StageSolution | None = None
        for inner in combinations(range(1, problem.num_units), problem.num_ranks - 1):
            starts = (0, *inner)
            if not fits(problem, starts):
                continue
            bound = pipeline_bound_s(problem, starts)
            if (cutoff_s is None or bound < cutoff_s) and (best is None or bound < best.bound_s):
                best = StageSolution(starts, bound)
        return best

    def solve_degrees(self, problem: DegreeProblem) -> DegreeSolution | None:
        """Tries every triple of degrees."""
        feasible = [
            (time, degrees)
            for degrees, time in problem.step_time_s.items()
            if problem.memory_bytes[degrees] <= problem.capacity_bytes
            and degrees[0] * degrees[1] * degrees[2] == problem.num_devices
        ]
        if not feasible:
            return None
        time, degrees = min(feasible)
        return DegreeSolution(degrees, time)


def placement_cost_ns(problem: PlacementProblem, choices: tuple[int, ...]) -> int | None:
    """Total cost of one assignment; None where an edge is impossible."""
    cost = sum(costs[choice] for costs, choice in zip(problem.node_costs_ns, choices, strict=True))
    for source, target, matrix in problem.edges:
        edge = matrix[choices[source]][choices[target]]
        if edge is None:
            return None
        cost += edge
    return cost
