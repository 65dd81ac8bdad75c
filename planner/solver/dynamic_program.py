"""Stage boundaries by dynamic programming: exact, and milliseconds even for 64 ranks.

Where all devices are alike, the first and last unit of a stage tell how much work lies before and behind it, and so
what ``pipeline_bound_s`` is for its rank. Let cost(r, s, e) be that for units s..e-1 on rank r (infinite where they do
not fit). Then

    best(r, e) = min over s of max(best(r - 1, s), cost(r, s, e)),        best(-1, 0) = 0

and best(p - 1, U) is the optimum, in p U^2 steps.

Where devices differ, ranks with equal devices stand next to each other: a run. Once the units at which the runs meet
are fixed, the work of every run is known, and each is cut by itself as above. The meeting units are tried in the order
of a lower bound: every rank of a run has the work of all runs before it in front of it, and the largest stage of a run
is at least as large as its average stage.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, groupby

import numpy as np
from numpy.typing import NDArray

from planner.problems import StageProblem, StageSolution, pipeline_bound_s, windows_disjoint
from planner.solver.base import StageSolver

Array = NDArray[np.float64]


class DynamicProgramSolver(StageSolver):
    """Tables over cuts; ties go to the earliest cut."""

    def solve_stages(self, problem: StageProblem, cutoff_s: float | None = None) -> StageSolution | None:
        """The recurrence above for every run, over the meeting points that can still be better."""
        runs = _runs(problem)
        best_s, best = np.inf if cutoff_s is None else cutoff_s, None
        bounds_s, meetings = _meetings(problem, runs)
        for index in np.argsort(bounds_s, kind="stable"):
            if bounds_s[index] >= best_s:
                break
            ends = (0, *meetings[index].tolist(), problem.num_units)
            work = [run.work_s(a, b) for run, a, b in zip(runs, ends, ends[1:], strict=False)]
            worst_s, starts = 0.0, []
            for place, run in enumerate(runs):
                around = (sum(work[:place]), sum(work[place + 1 :]))
                run_s, cut = run.cut(ends[place], ends[place + 1], around, best_s)
                worst_s = max(worst_s, run_s)
                if worst_s >= best_s:
                    break
                starts += cut
            else:
                best_s, best = worst_s, tuple(starts)
        return None if best is None else StageSolution(best, pipeline_bound_s(problem, best))


class _Run:
    """Consecutive ranks of equal devices: running sums over the units, and the cost of every stage of theirs."""

    def __init__(self, problem: StageProblem, ranks: range) -> None:
        self.ranks = ranks
        self._problem = problem
        self._forward = _running(problem.forward_s[ranks[0]])
        self._backward = _running(problem.backward_s[ranks[0]])
        self.total = self._forward + self._backward  # of all units before each
        self._static = _running(problem.static_bytes)
        self._kept = _running(problem.kept_bytes)

    def work_s(self, begin: int, end: int) -> float:
        """One micro-batch through units begin..end-1."""
        return float(self.total[end] - self.total[begin])

    def cut(self, begin: int, end: int, around_s: tuple[float, float], limit_s: float) -> tuple[float, list[int]]:
        """Least cost of units begin..end-1 on these ranks, and their starts; infinite where none is below the limit.

        ``around_s``: the work of the runs before and behind this one.
        """
        best = np.full(end - begin + 1, np.inf)
        best[0] = 0.0
        chosen: list[NDArray[np.intp]] = []
        for rank in self.ranks:
            through = np.maximum(best[:, None], self._cost_s(rank, slice(begin, end + 1), around_s))
            chosen.append(through.argmin(axis=0))
            best = through.min(axis=0)
            if not best.min() < limit_s:
                return np.inf, []
        if not best[-1] < limit_s:
            return np.inf, []
        starts: list[int] = []
        at = end - begin
        for layout in reversed(chosen):
            at = int(layout[at])
            starts.append(begin + at)
        return float(best[-1]), starts[::-1]

    def _cost_s(self, rank: int, part: slice, around_s: tuple[float, float]) -> Array:
        """``pipeline_bound_s`` of ``rank`` for every stage; infinite where it is empty or does not fit."""
        problem, send = self._problem, self._problem.send_s
        m = problem.num_microbatches
        behind = problem.num_ranks - 1 - rank
        work = self.total[part]
        prefix = around_s[0] + (work - work[0])[:, None] + 2 * sum(send[:rank])
        suffix = around_s[1] + (work[-1] - work)[None, :] + 2 * sum(send[rank:])
        forward, backward = _between(self._forward[part]), _between(self._backward[part])
        cost = prefix + m * (forward + backward) + self._idle_s(behind, suffix, forward, backward)
        memory = _between(self._static[part]) + problem.in_flight[rank] * _between(self._kept[part])
        start, end = np.indices(cost.shape)
        return np.where((start < end) & (memory <= problem.room_bytes[rank]), cost, np.inf)

    def _idle_s(self, behind: int, suffix: Array, forward: Array, backward: Array) -> Array:
        """``problems.idle_s`` for every stage."""
        problem = self._problem
        if not problem.windowed:
            return np.broadcast_to(suffix, forward.shape)
        warmup = min(behind, problem.num_microbatches - 1)
        first = np.maximum(0.0, suffix - warmup * forward)
        last = np.maximum(0.0, suffix - warmup * backward)
        return first + last if windows_disjoint(problem, behind) else np.maximum(first, last)


def _runs(problem: StageProblem) -> list[_Run]:
    kinds = list(zip(problem.forward_s, problem.backward_s, strict=True))
    grouped = (list(ranks) for _, ranks in groupby(range(problem.num_ranks), key=kinds.__getitem__))
    return [_Run(problem, range(ranks[0], ranks[-1] + 1)) for ranks in grouped]


def _meetings(problem: StageProblem, runs: list[_Run]) -> tuple[Array, NDArray[np.intp]]:
    """For every set of units at which the runs can meet a lower bound, and the set; [meetings, runs - 1]."""
    meetings = _rising(problem.num_units, len(runs) - 1)
    edge = np.zeros((len(meetings), 1), dtype=np.intp)
    ends = np.hstack([edge, meetings, edge + problem.num_units])
    work = np.array([run.total[ends[:, k + 1]] - run.total[ends[:, k]] for k, run in enumerate(runs)]).T
    ranks = np.array([len(run.ranks) for run in runs])
    before = np.cumsum(work, axis=1) - work
    behind = 0.0 if problem.windowed else work.sum(axis=1, keepdims=True) - before - work
    bound = (before + problem.num_microbatches * work / ranks + behind).max(axis=1)
    # The same sum in another order differs in its last digits, and a bound must not exceed what it bounds.
    return np.where((np.diff(ends, axis=1) >= ranks).all(axis=1), bound * (1 - 1e-12), np.inf), meetings


@lru_cache(maxsize=64)
def _rising(num_units: int, length: int) -> NDArray[np.intp]:
    sets = list(combinations(range(1, num_units), length))
    return np.array(sets, dtype=np.intp).reshape(len(sets), length)


def _running(values: tuple[float, ...]) -> Array:
    return np.concatenate(([0.0], np.cumsum(values)))


def _between(running: Array) -> Array:
    return running[None, :] - running[:, None]
