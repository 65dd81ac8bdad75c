"""Stage boundaries by dynamic programming: exact, and milliseconds even for 64 ranks.

Where all devices are alike, the first and last unit of a stage tell how much work lies before and behind it, and so
what ``pipeline_bound_s`` is for its rank. Let cost(r, s, e) be that for units s..e-1 on rank r (infinite where they do
not fit). Then

    best(r, e) = min over s of max(best(r - 1, s), cost(r, s, e)),        best(-1, 0) = 0

and best(p - 1, U) is the optimum. Below a limit only stages are looked at that alone take less: p U K steps where those
hold K units at most. Where stages have to recompute, what the others recompute is not
known from a stage's borders: it is left out, and best(p - 1, U) is a lower bound.

Where devices differ, ranks with equal devices stand next to each other: a run. Once the units at which the runs meet
are fixed, the work of every run is known, and each is cut by itself as above. The meeting units are tried in the order
of a lower bound: every rank of a run has the work of all runs before it in front of it, and the largest stage of a run
is at least as large as its average stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.problems import StageProblem, StageSolution, num_rounds, windows_disjoint
from planner.solver.base import Limit, StageSolver

Array = NDArray[np.float64]
Positions = NDArray[np.intp]


class DynamicProgramSolver(StageSolver):
    """Tables over cuts; ties go to the earliest cut.

    ``own``: the cut into so many stages of a framework that cuts by itself; None: the cuts are chosen.
    """

    def __init__(self, own: Callable[[int], tuple[int, ...] | None] | None = None) -> None:
        self._own = own

    def only_cut(self, num_stages: int) -> tuple[int, ...] | None:
        """The framework's own."""
        return None if self._own is None else self._own(num_stages)

    def cuts(self, problem: StageProblem, limit_s: Limit) -> Iterator[StageSolution]:
        """The recurrence above for every run, over the meeting points that can still be better.

        After the cut of least bound all others below the limit follow, run by run from the last rank to the first.
        """
        runs = _runs(problem)
        bounds_s, meetings = _meetings(problem, runs)
        order = [(float(bounds_s[place]), meetings[place].tolist()) for place in np.argsort(bounds_s, kind="stable")]
        first = self._least(problem, runs, order, limit_s())
        if first is None:
            return
        yield first
        for least_s, meeting in order:
            if least_s >= limit_s():
                break
            for cost_s, starts in _listed(runs, (0, *meeting, problem.num_units), limit_s):
                if starts != first.starts:
                    yield StageSolution(starts, cost_s)

    def _least(
        self, problem: StageProblem, runs: list[_Run], order: list[tuple[float, list[int]]], limit_s: float
    ) -> StageSolution | None:
        best_s, best = limit_s, None
        for least_s, meeting in order:
            if least_s >= best_s:
                break
            ends = (0, *meeting, problem.num_units)
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
        return None if best is None else StageSolution(best, best_s)


def _listed(runs: list[_Run], ends: tuple[int, ...], limit_s: Limit) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every cut of runs that meet at ``ends`` whose bound is below the limit."""
    work = [run.work_s(a, b) for run, a, b in zip(runs, ends, ends[1:], strict=False)]

    def of(place: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        if place == len(runs):
            yield 0.0, ()
            return
        around = (sum(work[:place]), sum(work[place + 1 :]))
        for own_s, own in runs[place].listed(ends[place], ends[place + 1], around, limit_s):
            for other_s, others in of(place + 1):
                yield max(own_s, other_s), own + others

    return of(0)


class _Stages(NamedTuple):
    """What the costs of all stages of a run's ranks have in common.

    A row for each unit before which a stage may end, in it a column for each number of units, the most first;
    [ends, numbers] or what broadcasts to that.
    """

    start: Positions  # place of the first unit, of those of the run; 0 where so many units would begin before that
    of_problem: tuple[Positions, Positions]  # the first unit and the end among all units
    before_s: Array
    behind_s: Array
    forward_s: Array
    backward_s: Array
    has_units: NDArray[np.bool]


class _Run:
    """Consecutive ranks of equal devices: running sums over the units, and the cost of every stage of theirs."""

    def __init__(self, problem: StageProblem, ranks: range) -> None:
        self.ranks = ranks
        self._problem = problem
        self._forward = _running(problem.forward_s[ranks[0]])
        self._backward = _running(problem.backward_s[ranks[0]])
        self.total = self._forward + self._backward  # of all units before each

    def work_s(self, begin: int, end: int) -> float:
        """One micro-batch through units begin..end-1."""
        return float(self.total[end] - self.total[begin])

    def cut(self, begin: int, end: int, around_s: tuple[float, float], limit_s: float) -> tuple[float, list[int]]:
        """Least cost of units begin..end-1 on these ranks, and their starts; infinite where none is below the limit.

        ``around_s``: the work of the runs before and behind this one.
        """
        tables = self._tables(begin, end, around_s, limit_s)
        if tables is None:
            return np.inf, []
        start, costs, least = tables
        starts: list[int] = []
        at = end - begin
        for before, cost in zip(reversed(least[:-1]), reversed(costs), strict=True):
            at = int(start[at, np.maximum(before[start[at]], cost[at]).argmin()])
            starts.append(begin + at)
        return float(least[-1][-1]), starts[::-1]

    def listed(
        self, begin: int, end: int, around_s: tuple[float, float], limit_s: Limit
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Every cut of units begin..end-1 below the limit, with its cost."""
        tables = self._tables(begin, end, around_s, limit_s())
        if tables is None:
            return
        starts, costs, least = tables

        def before(rank: int, at: int, worst_s: float) -> Iterator[tuple[float, tuple[int, ...]]]:
            """Cuts of the units before ``at`` on ranks 0..rank."""
            if rank < 0:
                yield worst_s, ()
                return
            through = np.maximum(least[rank][starts[at]], costs[rank][at])
            for place in np.argsort(through, kind="stable").tolist():
                if max(float(through[place]), worst_s) >= limit_s():
                    break
                start, own_s = int(starts[at, place]), max(worst_s, float(costs[rank][at, place]))
                for cost_s, others in before(rank - 1, start, own_s):
                    yield cost_s, (*others, begin + start)

        yield from before(len(costs) - 1, end - begin, 0.0)

    def _tables(
        self, begin: int, end: int, around_s: tuple[float, float], limit_s: float
    ) -> tuple[Positions, list[Array], list[Array]] | None:
        """First units of stages; their costs on each rank; ``best`` before the first and after each.

        None where the best is above the limit.
        """
        best = np.full(end - begin + 1, np.inf)
        best[0] = 0.0
        costs, least = [], [best]
        stages = self._stages(begin, end, around_s, limit_s)
        for rank in self.ranks:
            costs.append(self._cost_s(rank, stages))
            best = np.maximum(best[stages.start], costs[-1]).min(axis=1)
            least.append(best)
            if not best.min() < limit_s:
                return None
        return (stages.start, costs, least) if best[-1] < limit_s else None

    def _stages(self, begin: int, end: int, around_s: tuple[float, float], limit_s: float) -> _Stages:
        """Those that alone take less than the limit: none that holds more units does."""
        part = slice(begin, end + 1)
        work, forward, backward = self.total[part], self._forward[part], self._backward[part]
        longest = work + limit_s / self._problem.num_microbatches * (1 + 1e-9)
        most = max(1, int((np.searchsorted(work, longest, side="right") - 1 - np.arange(len(work))).max()))
        ends = np.arange(len(work))[:, None]
        start = ends - np.arange(most, 0, -1)
        has_units, start = start >= 0, np.maximum(start, 0)
        return _Stages(
            start,
            (begin + start, begin + ends),
            before_s=around_s[0] + (work[start] - work[0]),
            behind_s=around_s[1] + (work[-1] - work)[:, None],
            forward_s=forward[:, None] - forward[start],
            backward_s=backward[:, None] - backward[start],
            has_units=has_units,
        )

    def _cost_s(self, rank: int, stages: _Stages) -> Array:
        """``pipeline_bound_s`` of ``rank`` for every stage; infinite where it is empty or does not fit.

        What other stages recompute is not known, and left out.
        """
        problem, send = self._problem, self._problem.send_s
        received = problem.receive_s
        m, forward = problem.num_microbatches, stages.forward_s + received[rank][0]
        behind = problem.num_ranks - 1 - rank
        prefix = stages.before_s + 2 * sum(send[:rank]) + sum(map(sum, received[:rank]))
        suffix = stages.behind_s + 2 * sum(send[rank:]) + sum(map(sum, received[rank + 1 :]))
        extra, once = (each[rank][stages.of_problem] for each in (problem.extra_s, problem.once_s))
        fits = np.isfinite(extra)
        backward = stages.backward_s + np.where(fits, extra, 0.0) + received[rank][1]
        work = forward + backward
        cost = prefix + m * work + self._idle_s(behind, suffix, forward, backward)
        rounds = prefix + num_rounds(problem, rank) * (work + suffix)
        return np.where(stages.has_units & fits, np.maximum(cost, rounds) + once, np.inf)

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
