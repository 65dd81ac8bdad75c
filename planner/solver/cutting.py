"""The best stages of one layout: where the pipeline is cut and what each block recomputes; proved where that can be.

A cut is priced by simulating its schedule, with the recomputation of least time that the ledger allows. Where each rank
holds one stage, the dynamic program bounds what any cut takes; every cut whose bound is below the best price is then
priced in turn, until none is left or so many were tried. Under other schedules cuts are improved unit by unit from cuts
that are nearly even. Where there are few cuts all are then looked at, which is a proof; where there are many the
layout's own bound remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from planner.evaluation.cuts import are_allowed, balanced_starts, even_starts, is_allowed, shared_starts
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.evaluation.many_cuts import ManyCuts
from planner.evaluation.stage_program import refine, stage_problem
from planner.layout.columns import Array, Positions
from planner.layout.layout import Layout
from planner.solver.base import StageSolver
from planner.table.cost_table import CostTable
from planner.table.facts import UnitRow

# A plan is called proved where nothing is faster by more than this share.
TOLERANCE = 1e-3
# Cuts of one layout that are priced one after the other to close its bound.
MOST_CUTS = 24
# Ranks of several stages: cuts are improved where the best found is at most this share above the best price, by likely
# moves alone; by all where it is at most the second share above.
WORTH_IMPROVING = 0.05
WORTH_ALL = 0.005
MOST_ROUNDS = 24
# Neighbouring cuts are priced so many at a time, until one is faster.
AT_ONCE = 48
# Of no more cuts than these every one is looked at.
FEW_CUTS = 1000
# A visit whose cuts must be priced one after the other takes as long as so many, or longer.
ONE_BY_ONE = 10.0


@dataclass(frozen=True)
class Cut:
    """``best``: the fastest cut that was found to fit.

    No other cut is faster by more than the tolerance if it takes ``bound_s`` or more: infinite where none is left.
    """

    best: Evaluated | None
    bound_s: float
    nothing_fits: bool = False  # no cut that was tried, however long it takes


def best_cut(
    pricer: Pricer, solver: StageSolver, cutoff_s: float | None, bound_s: float = 0.0, like: Evaluated | None = None
) -> Cut:
    """The best stages of a layout, of which only those that take less than ``cutoff_s`` are of interest.

    ``bound_s``: a lower bound of the layout. ``like``: a layout with as many stages on the same devices, whose cut may
    be a good one here.
    """
    layout = pricer.evaluator.layout
    only = (0,) if layout.mesh.pp == 1 else solver.only_cut(pricer.evaluator.num_stages)
    if only is not None:
        priced = pricer.price(only)
        if priced is None:
            return Cut(None, np.inf, nothing_fits=True)
        return Cut(priced, max(bound_s, pricer.bound_s(priced)))
    if layout.schedule.rules.has_one_stage:
        return _proved(pricer, solver, cutoff_s, bound_s)
    found = improved(pricer, cutoff_s, like)
    return replace(_best_of_all(pricer, found, cutoff_s, bound_s), nothing_fits=found is None)


class Pricer:
    """Prices of cuts of one layout, each once."""

    def __init__(self, table: CostTable, layout: Layout) -> None:
        self.evaluator = Evaluator(table, layout)
        self.least = LeastRecompute(self.evaluator)
        self._many = ManyCuts(self.evaluator, self.least)
        self._priced: dict[tuple[int, ...], Evaluated | None] = {}

    def price(self, starts: tuple[int, ...]) -> Evaluated | None:
        """With the least recomputation that fits; None where nothing fits."""
        if starts not in self._priced:
            self._priced[starts] = self._price(starts)
        return self._priced[starts]

    def _price(self, starts: tuple[int, ...]) -> Evaluated | None:
        modes = self.least.modes(starts)
        if modes is None:
            return None
        evaluator = self.evaluator if modes == self.evaluator.modes else self.evaluator.with_modes(modes)
        host = evaluator.host(starts)
        if host is not None and host.share > 1:
            return None
        return evaluator.evaluate(starts, makespan_s=self._many.makespans_s.get(starts))

    def worth_a_look(self, base: tuple[int, ...], cuts: Positions, *, are_likely: bool) -> Positions:
        """Of ``cuts`` those that may be faster than ``base``, the likeliest first; ``are_likely``: these alone."""
        if not ManyCuts.can_price(self.evaluator):
            return cuts
        return self._many.worth_a_look(base, cuts, are_likely=are_likely)

    def may_take_less(self, cuts: Positions, limit_s: float) -> NDArray[np.bool]:
        """Which of ``cuts`` are worth a price where only those that take less than ``limit_s`` are of interest."""
        if not ManyCuts.can_price(self.evaluator):
            return np.ones(len(cuts), dtype=bool)
        return self._many.may_take_less(cuts, limit_s)

    @property
    def num_turns(self) -> float:
        """As how many visits one counts that prices many cuts."""
        return 1.0 if ManyCuts.can_price(self.evaluator) else ONE_BY_ONE

    @property
    def num_cuts(self) -> int:
        """In how many ways the units can be cut into as many stages."""
        return comb(len(self.evaluator.table.units.kinds) - 1, self.evaluator.num_stages - 1)

    def few_cuts(self) -> Positions | None:
        """Every cut, [cuts, stages]; None where there are many, or they cannot be looked at together."""
        evaluator = self.evaluator
        if self.num_cuts > FEW_CUTS or not ManyCuts.can_price(evaluator):
            return None
        units, num_borders = evaluator.table.units, evaluator.num_stages - 1
        borders = combinations(range(1, len(units.kinds)), num_borders)
        cuts = np.array([(0, *each) for each in borders], dtype=np.intp).reshape(-1, num_borders + 1)
        return cuts[are_allowed(cuts, units, are_alike=evaluator.layout.has_alike_stages)]

    def least_s(self, cuts: Positions) -> Array:
        """What the schedule takes at least under each of ``cuts``, whatever is recomputed."""
        return self._many.least_s(cuts)

    def is_open(self, starts: tuple[int, ...]) -> bool:
        """Whether this cut fits, and what is recomputed is a choice."""
        return len(self.evaluator.free_modes) > 1 and self.least.modes(starts) is not None

    def bound_s(self, priced: Evaluated) -> float:
        """What a step takes at least under this cut, whatever is recomputed.

        Where ranks wait for each other, more recomputation may cost nothing and hide what happens once a step. A rank
        alone works as much longer as it hides.
        """
        found_s = priced.step_time_s - self.least.slack_s(priced.starts)
        if priced.layout.mesh.pp == 1 or len(self.evaluator.free_modes) == 1:
            return found_s
        once_s = map(max, zip(*self.evaluator.with_modes(priced.modes).once_a_step(priced.starts), strict=True))
        return found_s - max(0.0, sum(once_s) - self.evaluator.least_once_of_cut_s(priced.starts))

    def fastest(self, cuts: Sequence[tuple[int, ...]], limit_s: float = np.inf) -> Evaluated | None:
        """The cut that takes least, of those that fit and take less than ``limit_s``; None where there is none."""
        if not cuts:
            return None
        if not ManyCuts.can_price(self.evaluator):
            found = _fastest(self.price(starts) for starts in cuts)
            return None if found is None or found.step_time_s >= limit_s else found
        times = self._many.step_s(cuts, limit_s)
        for place in np.argsort(times, kind="stable").tolist():
            if times[place] >= limit_s or not np.isfinite(times[place]):
                return None
            found = self.price(cuts[place])
            if found is not None:  # a node's own memory may be short
                return found
        return None

    def first_cuts(self, like: Evaluated | None = None) -> list[tuple[int, ...]]:
        """Cuts that are nearly even: in blocks, in time, and over unlike devices in the time of each rank's own.

        And that of ``like``, where there is one.
        """
        evaluator = self.evaluator
        units, layout = evaluator.table.units, evaluator.layout
        work = self._work_of(0)
        even = (
            even_starts(units.is_block, evaluator.num_stages) if evaluator.num_stages <= sum(units.is_block) else None
        )
        found = [even, balanced_starts(work, evaluator.num_stages)]
        if layout.groups:
            found.append(shared_starts(work, [1 / sum(self._work_of(rank)) for rank in evaluator.rank_of_stage]))
        found.append(None if like is None else like.starts)
        cuts = [starts for starts in dict.fromkeys(found) if starts is not None]
        if layout.schedule.rules.has_one_stage:
            return cuts
        return [starts for starts in cuts if is_allowed(starts, units, are_alike=layout.has_alike_stages)]

    def _work_of(self, rank: int) -> list[float]:
        """Seconds of one micro-batch in every unit on the devices of a rank."""
        times = self.evaluator.unit_times_of(rank)
        return [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]


class Pricers:
    """Of layouts of one table, so that what is known of a layout's cuts from a probe is not worked out again."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._of: dict[Layout, Pricer] = {}

    def of(self, layout: Layout) -> Pricer:
        """That of ``layout``, for others to ask for again."""
        if layout not in self._of:
            self._of[layout] = Pricer(self.table, layout)
        return self._of[layout]

    def drop(self, layout: Layout) -> None:
        """Nobody asks for that of ``layout`` again."""
        self._of.pop(layout, None)


def probe(pricer: Pricer, solver: StageSolver, best_s: float | None = None) -> Evaluated | None:
    """The best of the nearly even cuts, where one fits; the only cut, where there is but one.

    None also where it is slower than ``best_s`` by more than what moving units may mend.
    """
    only = solver.only_cut(pricer.evaluator.num_stages)
    limit_s = np.inf if best_s is None else best_s * (1 + WORTH_IMPROVING)
    return pricer.fastest(pricer.first_cuts() if only is None else [only], limit_s)


def _fastest(found: Iterable[Evaluated | None]) -> Evaluated | None:
    return min((each for each in found if each is not None), key=lambda each: each.step_time_s, default=None)


def _proved(pricer: Pricer, solver: StageSolver, cutoff_s: float | None, bound_s: float = 0.0) -> Cut:
    """One stage a rank: cuts in turn as long as one may be better than the best."""
    best: Evaluated | None = None

    def limit_s() -> float:
        return _limit_s(cutoff_s, best)

    problem = stage_problem(pricer.evaluator)
    for _ in range(MOST_CUTS):  # the cut of least bound, as long as its stages turn out to need more than was known
        first = next(solver.cuts(problem, limit_s), None)
        if first is None:
            return Cut(best, np.inf)
        best = _fastest((best, pricer.price(first.starts)))
        bound_s = max(bound_s, first.bound_s)
        refined = refine(problem, first.starts, pricer.least)
        if refined is None:
            break
        problem = refined
    for tried, solution in enumerate(solver.cuts(problem, limit_s)):
        if tried == MOST_CUTS:
            return Cut(best, bound_s)
        best = _fastest((best, pricer.price(solution.starts)))
    return Cut(best, np.inf)


def _limit_s(cutoff_s: float | None, best: Evaluated | None) -> float:
    """What takes so long or longer is no better by more than the tolerance."""
    known = np.inf if cutoff_s is None else cutoff_s
    return min(known, np.inf if best is None else best.step_time_s) * (1 - TOLERANCE)


def _best_of_all(pricer: Pricer, best: Evaluated | None, cutoff_s: float | None, bound_s: float) -> Cut:
    """``best``, or what is faster of all cuts, where these are few.

    What takes less where nothing is recomputed may take less in another way of recomputing: to fit, or because that
    hides more of what happens once a step. Where no cut does, what is left is better by no more than the tolerance.
    """
    cuts = pricer.few_cuts()
    if cuts is None:
        return Cut(best, bound_s)
    limit_s = _limit_s(cutoff_s, best)
    cuts = cuts[pricer.may_take_less(cuts, limit_s)]
    if not len(cuts):
        return Cut(best, max(bound_s, limit_s))
    least_s = pricer.least_s(cuts)
    left = [(tuple(cut), each) for cut, each in zip(cuts.tolist(), least_s.tolist(), strict=True) if each < limit_s]
    best = _fastest((best, pricer.fastest([starts for starts, _ in left], limit_s)))
    limit_s = _limit_s(cutoff_s, best)
    least = {starts: each + pricer.evaluator.least_once_of_cut_s(starts) for starts, each in left if each < limit_s}
    open_s = [each for starts, each in least.items() if each < limit_s and pricer.is_open(starts)]
    return Cut(best, max(bound_s, min(open_s, default=limit_s)))


def improved(pricer: Pricer, cutoff_s: float | None, like: Evaluated | None = None) -> Evaluated | None:
    """One unit at a time is moved to another stage as long as that is faster, from the best of the first cuts on.

    Where no move that is likely to help does, and the cut is near ``cutoff_s``, all moves are tried.
    """
    best = pricer.fastest(pricer.first_cuts(like))
    enough_s = np.inf if cutoff_s is None else cutoff_s
    if best is None or best.step_time_s > enough_s * (1 + WORTH_IMPROVING):
        return best
    layout, units = pricer.evaluator.layout, pricer.evaluator.table.units
    for _ in range(MOST_ROUNDS):
        cuts = _neighbours(best.starts, layout.mesh.pp, units)
        cuts = cuts[are_allowed(cuts, units, are_alike=layout.has_alike_stages)]
        better = _first_faster(pricer, pricer.worth_a_look(best.starts, cuts, are_likely=True), best.step_time_s)
        if better is None and best.step_time_s < enough_s * (1 + WORTH_ALL):
            cuts = pricer.worth_a_look(best.starts, cuts, are_likely=False)
            better = _first_faster(pricer, cuts, best.step_time_s)
        if better is None:
            break
        best = better
    return best


def _first_faster(pricer: Pricer, cuts: Positions, step_s: float) -> Evaluated | None:
    """The fastest of the first few that hold one which is faster than ``step_s``; None where there is none."""
    if not len(cuts):
        return None
    limit_s = step_s * (1 - 1e-6)
    places = np.flatnonzero(pricer.may_take_less(cuts, limit_s))
    for part in np.split(places, np.flatnonzero(np.diff(places // AT_ONCE)) + 1):
        found = pricer.fastest([tuple(cut) for cut in cuts[part].tolist()], limit_s)
        if found is not None:
            return found
    return None


def _neighbours(starts: Sequence[int], num_ranks: int, units: UnitRow) -> Positions:
    """Cuts with one unit less in one stage and one more in another, up to as many stages apart as there are ranks.

    The borders between the two move by a unit each, so that every stage between them keeps its size. [cuts, stages].
    """
    first, last = np.triu_indices(len(starts) + 1, 1)
    near = (first > 0) & (first < len(starts)) & (last - first <= num_ranks)
    first, last = np.repeat(first[near], 2), np.repeat(last[near], 2)
    way = np.tile((-1, 1), len(first) // 2)
    sizes = np.diff([*starts, len(units.kinds)])
    leaves_some = sizes[np.where(way < 0, first, last) - 1] > 1
    first, last, way = first[leaves_some], last[leaves_some], way[leaves_some]
    stage = np.arange(len(starts))
    moves = (stage >= first[:, None]) & (stage < last[:, None])
    return np.array(starts) + moves * way[:, None]
