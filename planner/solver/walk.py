"""What a search knows of its layouts, and the visits that tell it more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.layout.columns import Array, Columns, Positions
from planner.layout.layout import Layout
from planner.solver.base import StageSolver
from planner.solver.best import Best
from planner.solver.bounds import Bounds
from planner.solver.closely import Closely
from planner.solver.cutting import Cut, Pricer, Pricers, best_cut, probe
from planner.solver.kinds import Excess, matter_of, unlike
from planner.solver.unfit import Unfit

# Layouts that are cut nearly evenly and priced first, so that the search starts with a good step time to beat.
NUM_PROBES = 4
# And so many others at the end, so that there is something to show beside the best.
NUM_OTHERS = 5
# Of layouts with equal estimates the simpler comes first, among so many at the head: more than are ever visited.
HEAD = 2_000
# A visit to a layout that can be cut in so few ways counts by a share, as long as it has few stages; so does one of
# like devices that finds nothing, or cannot fit.
HAS_FEW_CUTS, SHARE_OF_VISIT, STAGES_OF_VISIT, SHARE_OF_UNFIT = 64, 1 / 8, 64, 1 / 16
# Layouts that are bounded more closely, some tenths of a millisecond each, to prove how near the best is.
MOST_CLOSE = 2000


class Walk:
    """What is known of the layouts so far."""

    def __init__(
        self, pricers: Pricers, listed: Columns[Layout], lower: Bounds, solver: StageSolver, best: Best
    ) -> None:
        self._pricers, self._listed, self._solver, self._best = pricers, listed, solver, best
        self._open_s = lower.step_time_s.copy()  # what each layout takes at least, as far as that is known now
        self._closely = Closely(pricers.table, listed)
        self.excess, self._unfit = Excess(listed), Unfit(listed)
        self._estimate_s = lower.estimate_s
        self._visited: set[int] = set()
        self.counted_visits = 0.0
        self._refined: set[int] = set()

    @property
    def num_visited(self) -> int:
        """Layouts that were cut."""
        return len(self._visited)

    def probe(self, order: Positions, is_over: Callable[[], bool]) -> None:
        """Prices the first layouts in ``order`` that are unlike each other, nearly evenly cut."""
        for index in unlike(self._listed, order, NUM_PROBES):
            if is_over():
                return
            self._best.keep(probe(self._pricer(index), self._solver, self._best.time_s))

    def probe_others(self, order: Positions, lower: Bounds, is_over: Callable[[], bool]) -> None:
        """Prices the likeliest layouts that differ in what matters from those known: a plan is shown beside others."""
        if self._best.best is None:
            return
        known = set(map(matter_of, self._best.found))
        most = len(known) + NUM_OTHERS
        guess_s = np.maximum(lower.estimate_s[order], self._open_s[order])
        for index in order[np.argsort(guess_s, kind="stable")[:HEAD]].tolist():
            matter = matter_of(self._listed[index])
            if matter in known:
                continue
            if is_over() or len(known) >= most:
                return
            known.add(matter)
            self._best.keep(probe(self._pricer(index), self._solver))

    def has_seen(self, number: int) -> bool:
        """Whether so many layouts were visited, and one of them fits: where none does, all are."""
        return self.counted_visits >= number and self._best.time_s is not None

    def known_s(self, index: int) -> float:
        """What the layout takes at least, as far as that is known; infinite where nothing better is left of it."""
        return float(self._open_s[index])

    @property
    def least_visited_s(self) -> float:
        """The same of all layouts that were visited; infinite where none was."""
        return min((float(self._open_s[index]) for index in self._visited), default=np.inf)

    def known_s_of(self, indices: Positions) -> Array:
        """The same of many."""
        return self._open_s[indices]

    def is_open(self, index: int) -> bool:
        """Whether a visit may still find something better."""
        if index in self._visited or self._best.beats(float(self._open_s[index])):
            return False
        if index not in self._refined:
            self._open_s[index] = max(self._open_s[index], self._closely_s(index))
            self._refined.add(index)
        return not self._best.beats(float(self._open_s[index]))

    def _closely_s(self, index: int) -> float:
        best_s = self._best.time_s

        def is_wanted(other: int) -> bool:
            return other not in self._refined and not self._best.beats(float(self._open_s[other]))

        most = len(self._listed) if best_s is None else MOST_CLOSE - self._closely.num_asked
        return self._closely.bound_s(index, np.inf if best_s is None else best_s, is_wanted, most)

    def look_ahead(self, indices: Positions) -> None:
        """``is_open`` is likely to be asked of these layouts next."""
        self._closely.look_ahead(indices)

    @property
    def looked_enough(self) -> bool:
        """Whether so many layouts were bounded closely that others wait; not as long as none is known that fits."""
        return self._closely.num_asked >= MOST_CLOSE and self._best.time_s is not None

    def visit(self, index: int, order: Positions) -> None:
        """Cuts one layout; its bound rises to what was proved of it.

        As long as none is known that fits, first the one that needs least of those in ``order`` that are cut alike.
        """
        if self._best.time_s is None:
            smallest = self._unfit.smallest_like(index, order)
            if smallest != index and smallest not in self._visited:
                self._visit(smallest)
        self._visit(index)

    def _visit(self, index: int) -> None:
        self._visited.add(index)
        bound_s = float(self._open_s[index])
        cut = self._unfit.known(index, bound_s) or self._cut(index, bound_s)
        self._open_s[index] = cut.bound_s
        self._best.keep(cut.best)
        taken_s = self._best.time_s if cut.best is None else cut.best.step_time_s
        if cut.nothing_fits:
            self.excess.learn_that_nothing_fits(index)
        elif taken_s is not None:
            self.excess.learn(index, taken_s / float(self._estimate_s[index]))

    def _cut(self, index: int, bound_s: float) -> Cut:
        layout, pricer = self._listed[index], self._pricer(index)
        cut = best_cut(pricer, self._solver, self._best.time_s, bound_s, self._best.like(layout))
        self.counted_visits += _share_of_visit(pricer, cut)
        self._unfit.learn(index, cut, bound_s)
        self._pricers.drop(layout)
        return cut

    def _pricer(self, index: int) -> Pricer:
        return self._pricers.of(self._listed[index])

    def bound_s(self, order: Positions) -> float:
        """What no layout of ``order`` undercuts by more than the tolerance."""
        return float(self._open_s[order].min()) if len(order) else float("inf")


def _share_of_visit(pricer: Pricer, cut: Cut) -> float:
    """What a visit counts by that was made; over unlike devices one that finds nothing takes as long as others."""
    share = min(1.0, max(SHARE_OF_VISIT, pricer.evaluator.num_stages / STAGES_OF_VISIT))
    finds_nothing = cut.best is None and not pricer.evaluator.layout.groups
    if finds_nothing and cut.nothing_fits:
        return SHARE_OF_UNFIT
    return share if pricer.num_cuts <= HAS_FEW_CUTS or finds_nothing else pricer.num_turns
