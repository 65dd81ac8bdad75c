"""The OR-Tools CP-SAT backend: an integer program for placements.

Each program is built in the order variables, constraints, objective, solve. Runs are deterministic:
one worker, a fixed seed.
"""

from __future__ import annotations

from planner.layout.deadline import Deadline, OutOfTimeError
from planner.problems import PlacementProblem, PlacementSolution
from planner.solver.base import PlacementSolver, UnprovedError
from planner.solver.cp_program import CpModel, Expression, Solution, Status, solved, sum_of


class CpSatSolver(PlacementSolver):
    """Proves optimality within a time limit for each program."""

    def __init__(self, time_limit_s: float = 30.0, deadline: Deadline | None = None) -> None:
        self._time_limit_s, self._deadline = time_limit_s, deadline or Deadline.never()

    def _solve(self, model: CpModel, *, proof: bool = True) -> Solution | None:
        """The solved program, None where it is infeasible; without ``proof`` the best that was found will do."""
        left_s = self._deadline.left_s
        status, solution = solved(model, min(self._time_limit_s, left_s))
        if status == Status.INFEASIBLE:
            return None
        if status == Status.OPTIMAL or (status == Status.FEASIBLE and not proof):
            return solution
        if left_s <= self._time_limit_s or self._deadline.is_over():  # OR-Tools stops a moment before it is over
            raise OutOfTimeError
        raise UnprovedError(f"{status.name} after {self._time_limit_s} s")

    def solve_placement(self, problem: PlacementProblem) -> PlacementSolution | None:
        """min sum_i c_i[x_i] + sum_(i,j) e_ij[x_i, x_j] over one strategy x_i per operator i."""
        model = CpModel()
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
                left = sum_of([x[source][s] for s in rows])
                right = sum_of([x[target][t] for t in columns])
                if cost is None:
                    model.add(left + right <= 1)
                else:
                    paid = model.new_bool_var("")
                    model.add(paid >= left + right - 1)
                    terms.append(cost * paid)
        model.minimize(sum_of(terms))
        solver = self._solve(model, proof=False)
        if solver is None:
            return None
        choices = tuple(next(s for s, var in enumerate(row) if solver.value(var)) for row in x)
        return PlacementSolution(choices, round(solver.objective_value), round(solver.best_objective_bound))


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
