"""The OR-Tools CP-SAT backend: integer programs for placements, pipeline stages and degrees.

Each program is built in the order variables, constraints, objective, solve. Runs are deterministic:
one worker, a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout.deadline import Deadline
from planner.problems import (
    DegreeProblem,
    DegreeSolution,
    PlacementProblem,
    PlacementSolution,
    StageProblem,
    StageSolution,
    pipeline_bound_s,
    windows_disjoint,
)
from planner.solver.base import Solver, UnprovedError
from planner.solver.cp_program import CpModel, Expression, Solution, Status, Variable, solved, sum_of

# Times become integers such that one micro-batch through the whole model is this many ticks: the
# rounding error of a stage is then below a millionth of it.
TICKS = 1_000_000
# Memory becomes integers of this many bytes; needs are rounded up, so that rounding never overfills.
MEMORY_GRAIN_BYTES = 1 << 20


class CpSatSolver(Solver):
    """Proves optimality within a time limit for each program."""

    def __init__(self, time_limit_s: float = 30.0, deadline: Deadline | None = None) -> None:
        self._time_limit_s, self._deadline = time_limit_s, deadline or Deadline.never()

    def _solve(self, model: CpModel, *, proof: bool = True) -> Solution | None:
        """The solved program, None where it is infeasible; without ``proof`` the best that was found will do."""
        status, solution = solved(model, min(self._time_limit_s, self._deadline.left_s))
        if status == Status.INFEASIBLE:
            return None
        if status == Status.OPTIMAL or (status == Status.FEASIBLE and not proof):
            return solution
        self._deadline.check()
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

    def solve_stages(self, problem: StageProblem, cutoff_s: float | None = None) -> StageSolution | None:
        """min max_r ``pipeline_bound_s`` of rank r over cuts 0 = s_0 < s_1 < ... < s_(p-1) < U within memory."""
        total_s = max(sum(f) + sum(b) for f, b in zip(problem.forward_s, problem.backward_s, strict=True))
        tick_s = total_s / TICKS
        program = _StageProgram(problem, tick_s)
        if cutoff_s is not None:
            # Only cuts that are faster than the best layout so far are of interest.
            program.model.add(program.makespan <= int(cutoff_s / tick_s))
        program.model.minimize(program.makespan)
        solver = self._solve(program.model)
        if solver is None:
            return None
        starts = tuple(solver.value(start) for start in program.starts)
        bound_s = pipeline_bound_s(problem, starts)
        if cutoff_s is not None and bound_s >= cutoff_s:
            return None
        return StageSolution(starts, bound_s)

    def solve_degrees(self, problem: DegreeProblem) -> DegreeSolution | None:
        """min t over natural n_d * n_m * n_p = N, memory(n_d, n_m, n_p) <= capacity, t = step time of the degrees."""
        model = CpModel()
        keys = sorted(problem.step_time_s, key=lambda key: problem.step_time_s[key])
        if not keys:
            return None
        n = problem.num_devices
        # Degrees are natural numbers up to the number of devices.
        degrees = [model.new_int_var(1, n, name) for name in ("n_d", "n_m", "n_p")]
        # The order of the step times stands for the times, so that no precision is lost.
        order = model.new_int_var(0, len(keys) - 1, "order")
        memory = model.new_int_var(0, _grains_up(max(problem.memory_bytes.values())), "memory")
        # The degrees multiply to the number of devices.
        pair = model.new_int_var(1, n, "n_d*n_m")
        model.add_multiplication_equality(pair, degrees[:2])
        model.add_multiplication_equality(n, [pair, degrees[2]])
        # Time and memory follow from the degrees.
        rows = [(*key, rank, _grains_up(problem.memory_bytes[key])) for rank, key in enumerate(keys)]
        model.add_allowed_assignments([*degrees, order, memory], rows)
        # Memory per device stays within what is available.
        model.add(memory <= int(problem.capacity_bytes // MEMORY_GRAIN_BYTES))
        model.minimize(order)
        solver = self._solve(model)
        if solver is None:
            return None
        key = keys[solver.value(order)]
        return DegreeSolution(key, problem.step_time_s[key])


class _StageProgram:
    """The variables and constraints of the stage program; ticks for time, grains for memory."""

    def __init__(self, problem: StageProblem, tick_s: float) -> None:
        self.model = CpModel()
        self.problem = problem
        num_units, num_ranks = problem.num_units, problem.num_ranks
        # starts[r] is the first unit of rank r, and each rank holds at least one unit.
        self.starts = [self.model.new_int_var(r, num_units - num_ranks + r, f"start{r}") for r in range(num_ranks)]
        self.model.add(self.starts[0] == 0)
        for before, after in zip(self.starts, self.starts[1:], strict=False):
            self.model.add(before < after)
        # The work of a stage is the difference of its rank's running sums at its two ends.
        self.forward = self._rank_sums(problem.forward_s, tick_s)
        self.backward = self._rank_sums(problem.backward_s, tick_s)
        self._limit_memory()
        self._send = [round(seconds / tick_s) for seconds in problem.send_s]
        horizon = (problem.num_microbatches + 3 * num_ranks) * (TICKS + max([0, *self._send]) + num_units) * 2
        self.makespan = self.model.new_int_var(0, horizon, "makespan")
        for rank in range(problem.num_ranks):
            self._bound_rank(rank, horizon)

    def _rank_sums(self, rows: tuple[tuple[float, ...], ...], tick_s: float) -> list[Expression]:
        by_row = {row: self._stage_sums([round(seconds / tick_s) for seconds in row]) for row in set(rows)}
        return [by_row[row][rank] for rank, row in enumerate(rows)]

    def _stage_sums(self, values: Sequence[int]) -> list[Expression]:
        running = [0]
        for value in values:
            running.append(running[-1] + value)
        ends: list[Expression] = []
        for start in self.starts[1:]:
            at = self.model.new_int_var(0, running[-1], "")
            self.model.add_element(start, running, at)
            ends.append(at)
        bounds: list[Expression] = [0, *ends, running[-1]]
        return [bounds[k + 1] - bounds[k] for k in range(len(self.starts))]

    def _limit_memory(self) -> None:
        problem = self.problem
        sums: dict[int, list[Expression]] = {}
        for flying in set(problem.in_flight):
            units = zip(problem.static_bytes, problem.kept_bytes, strict=True)
            sums[flying] = self._stage_sums([_grains_up(static + flying * kept) for static, kept in units])
        # States and activations in flight of a rank fit into its room.
        for rank, flying in enumerate(problem.in_flight):
            self.model.add(sums[flying][rank] <= int(problem.room_bytes[rank] // MEMORY_GRAIN_BYTES))

    def _bound_rank(self, rank: int, horizon: int) -> None:
        problem, model = self.problem, self.model
        m, send = problem.num_microbatches, self._send
        behind = problem.num_ranks - 1 - rank
        prefix = sum_of(self.forward[:rank]) + sum_of(self.backward[:rank]) + 2 * sum(send[:rank])
        suffix = sum_of(self.forward[rank + 1 :]) + sum_of(self.backward[rank + 1 :]) + 2 * sum(send[rank:])
        total = prefix + m * (self.forward[rank] + self.backward[rank])
        if not problem.windowed:
            # GPipe: between its last forward and first backward a rank waits for the stages behind it.
            model.add(self.makespan >= total + suffix)
            return
        warmup = min(behind, m - 1)
        waits = (suffix - warmup * self.forward[rank], suffix - warmup * self.backward[rank])
        if not windows_disjoint(problem, behind):
            # The waits of the first and last micro-batch overlap: the longer one counts.
            for wait in (0, *waits):
                model.add(self.makespan >= total + wait)
            return
        # 1F1B: a rank waits for its first backward and again before its last.
        idle: list[Variable] = []
        for wait in waits:
            var = model.new_int_var(0, horizon, "")
            model.add(var >= wait)
            idle.append(var)
        model.add(self.makespan >= total + sum_of(idle))


def _grains_up(num_bytes: float) -> int:
    return -int(-num_bytes // MEMORY_GRAIN_BYTES)


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
