"""The OR-Tools CP-SAT backend: an integer program for placements.

Each program is built in the order variables, constraints, objective, solve. Runs are deterministic:
one worker, a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortools.sat.python import cp_model

from planner.problems import PlacementProblem, PlacementSolution
from planner.solver.base import PlacementSolver, UnprovedError

Expression = cp_model.LinearExpr | int

class CpSatSolver(PlacementSolver):
    """Proves optimality within a time limit for each program."""

    def __init__(self, time_limit_s: float = 30.0) -> None:
        self._time_limit_s = time_limit_s

    def _solve(self, model: cp_model.CpModel, *, proof: bool = True) -> cp_model.CpSolver | None:
        """The solved program, None where it is infeasible; without ``proof`` the best that was found will do."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = self._time_limit_s
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return None
        if status == cp_model.OPTIMAL or (status == cp_model.FEASIBLE and not proof):
            return solver
        raise UnprovedError(f"{solver.status_name(status)} after {self._time_limit_s} s")

    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """min sum_i c_i[x_i] + sum_(i,j) e_ij[x_i, x_j] over one strategy x_i per operator i."""
        model = cp_model.CpModel()
        # x[i][s] is true when operator i runs by strategy s.
        x = [[model.new_bool_var(f"x{i}_{s}") for s in range(len(c))] for i, c in enumerate(problem.node_costs_ns)]
        terms: list[Expression] = []
        # Every operator runs by exactly one strategy.
        for i, costs in enumerate(problem.node_costs_ns):
            model.add_exactly_one(x[i])
            terms += [cost * var for cost, var in zip(costs, x[i], strict=True) if cost]
        # A pair of strategies on an edge is forbidden, or is paid for when both are chosen.
        for source, target, matrix in problem.edges:
            for rows, columns, cost in _classes(matrix):
                left = _total([x[source][s] for s in rows])
                right = _total([x[target][t] for t in columns])
                if cost is None:
                    model.add(left + right <= 1)
                else:
                    paid = model.new_bool_var("")
                    model.add(paid >= left + right - 1)
                    terms.append(cost * paid)
        model.minimize(_total(terms))
        solver = self._solve(model, proof=False)
        if solver is None:
            return None
        choices = tuple(next(s for s, var in enumerate(row) if solver.value(var)) for row in x)
        return PlacementSolution(choices, round(solver.objective_value), round(solver.best_objective_bound))


def _total(terms: Sequence[Expression]) -> Expression:
    """Their sum as one linear expression."""
    return cp_model.LinearExpr.sum(list(terms))


Matrix = tuple[tuple[int | None, ...], ...]


def _classes(matrix: Matrix) -> list[tuple[list[int], list[int], int | None]]:
    """Non-zero entries of ``matrix`` grouped by equal rows and equal columns: (rows, columns, entry)."""
    rows: dict[tuple[int | None, ...], list[int]] = {}
    for index, row in enumerate(matrix):
        rows.setdefault(row, []).append(index)
    columns: dict[tuple[int | None, ...], list[int]] = {}
    for index, column in enumerate(zip(*matrix, strict=True)):
        columns.setdefault(column, []).append(index)
    groups: list[tuple[list[int], list[int], int | None]] = []
    for row, row_indices in rows.items():
        for column_indices in columns.values():
            entry = row[column_indices[0]]
            if entry != 0:
                groups.append((row_indices, column_indices, entry))
    return groups
