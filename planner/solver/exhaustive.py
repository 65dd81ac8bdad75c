"""The oracle: tries every assignment of the same programs. For small instances and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from planner.problems import PlacementProblem, PlacementSolution, StageProblem, StageSolution, pipeline_bound_s
from planner.solver.base import Limit, PlacementSolver, StageSolver


class ExhaustiveSolver(PlacementSolver, StageSolver):
    """Enumerates; exact by construction."""

    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """Tries the product of all strategies."""
        best: PlacementSolution | None = None
        for choices in product(*(range(len(costs)) for costs in problem.node_costs_ns)):
            cost = placement_cost_ns(problem, choices)
            if cost is not None and (best is None or cost < best.cost_ns):
                best = PlacementSolution(choices, cost, cost)
        return best

    def cuts(self, problem: StageProblem, limit_s: Limit) -> Iterator[StageSolution]:
        """Every combination of borders, by its bound."""
        inner = combinations(range(1, problem.num_units), problem.num_ranks - 1)
        found = [StageSolution((0, *each), pipeline_bound_s(problem, (0, *each))) for each in inner]
        yield from (each for each in sorted(found, key=lambda each: each.bound_s) if each.bound_s < limit_s())


def placement_cost_ns(problem: PlacementProblem, choices: tuple[int, ...]) -> int | None:
    """Total cost of one assignment; None where an edge is impossible."""
    cost = sum(costs[choice] for costs, choice in zip(problem.node_costs_ns, choices, strict=True))
    for source, target, matrix in problem.edges:
        edge = matrix[choices[source]][choices[target]]
        if edge is None:
            return None
        cost += edge
    return cost
