"""Stage boundaries by dynamic programming: exact, and milliseconds even for 64 ranks.

``pipeline_bound_s`` of a rank depends only on the rank and the two ends of its stage, because all work before and
behind it is known from those. So with cost(r, s, e) for units s..e-1 on rank r (infinite where memory is short)

    best(r, e) = min over s of max(best(r - 1, s), cost(r, s, e)),        best(-1, 0) = 0

and best(p - 1, U) is the optimum, in p U^2 steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.problems import StageProblem, StageSolution, pipeline_bound_s, windows_disjoint
from planner.solver.base import StageSolver

Array = NDArray[np.float64]


class DynamicProgramSolver(StageSolver):
    """Tables over cuts; ties go to the earliest cut."""

    def solve_stages(self, problem: StageProblem, cutoff_s: float | None = None) -> StageSolution | None:
        """The recurrence above."""
        sums = _Sums(problem)
        best = np.full(problem.num_units + 1, np.inf)
        best[0] = 0.0
        chosen: list[NDArray[np.intp]] = []
        for rank in range(problem.num_ranks):
            through = np.maximum(best[:, None], sums.cost_s(rank))
            chosen.append(through.argmin(axis=0))
            best = through.min(axis=0)
        if not np.isfinite(best[-1]) or (cutoff_s is not None and best[-1] >= cutoff_s):
            return None
        starts: list[int] = []
        end = problem.num_units
        for choice in reversed(chosen):
            end = int(choice[end])
            starts.append(end)
        cut = tuple(reversed(starts))
        return StageSolution(cut, pipeline_bound_s(problem, cut))


class _Sums:
    """Running sums over the units, and the cost of every stage that a rank could have; [start, end]."""

    def __init__(self, problem: StageProblem) -> None:
        self._problem = problem
        self._forward = _running(problem.forward_s)
        self._backward = _running(problem.backward_s)
        self._static = _running(problem.static_bytes)
        self._kept = _running(problem.kept_bytes)

    def cost_s(self, rank: int) -> Array:
        """``pipeline_bound_s`` of ``rank`` for every stage; infinite where it is empty or does not fit."""
        problem = self._problem
        m, send = problem.num_microbatches, problem.send_s
        behind = problem.num_ranks - 1 - rank
        work = self._forward + self._backward
        prefix = work[:, None] + 2 * send * rank
        suffix = work[-1] - work[None, :] + 2 * send * behind
        forward, backward = _between(self._forward), _between(self._backward)
        cost = prefix + m * (forward + backward) + self._idle_s(behind, suffix, forward, backward)
        memory = _between(self._static) + problem.in_flight[rank] * _between(self._kept) + problem.fixed_bytes[rank]
        start, end = np.indices(cost.shape)
        return np.where((start < end) & (memory <= problem.capacity_bytes), cost, np.inf)

    def _idle_s(self, behind: int, suffix: Array, forward: Array, backward: Array) -> Array:
        """``problems.idle_s`` for every stage."""
        problem = self._problem
        if not problem.windowed:
            return np.broadcast_to(suffix, forward.shape)
        warmup = min(behind, problem.num_microbatches - 1)
        first = np.maximum(0.0, suffix - warmup * forward)
        last = np.maximum(0.0, suffix - warmup * backward)
        return first + last if windows_disjoint(problem, behind) else np.maximum(first, last)


def _running(values: tuple[float, ...]) -> Array:
    return np.concatenate(([0.0], np.cumsum(values)))


def _between(running: Array) -> Array:
    return running[None, :] - running[:, None]
