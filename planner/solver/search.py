"""Search over the layouts, which ends when it can prove that nothing better is left, or after so many visits.

Every layout has a lower bound and an estimate of its step time. Layouts are visited in the order of their estimates: a
visit cuts the layout into stages and prices the cuts by simulating the schedule (``solver.cutting``). What visits find
corrects the estimates of layouts of the same kind. A layout whose bound is no better than the best price is closed
without a visit. What is left then, visited or not, and still could be better, is visited in the order of the bounds.
The least bound of all layouts that stay open is what was proved: where none does, or none by more than the tolerance,
the best is optimal within the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from costmodels.vocabulary.choices import Recompute
from planner.evaluation.evaluator import Evaluated
from planner.layout.columns import Array, Columns, Positions
from planner.layout.complexity import complexity
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import Layout
from planner.solver.base import StageSolver
from planner.solver.best import Best
from planner.solver.bounds import Bounds, bounds, in_slices
from planner.solver.closely import Closely
from planner.solver.cutting import TOLERANCE, Cut, Pricer, Pricers, best_cut, probe
from planner.solver.glance import RecomputeKey, rough_bound_s, times_filled
from planner.solver.kinds import Excess, kind_of, matter_of, unlike
from planner.solver.smallest import scarcity, smallest
from planner.table.cost_table import CostTable

# Layouts that are cut nearly evenly and priced first, so that the search starts with a good step time to beat.
NUM_PROBES = 4
# And so many others at the end, so that there is something to show beside the best.
NUM_OTHERS = 5
# Of typical layouts so many are priced; where none of these fits, up to so many.
NUM_TYPICAL, MOST_TYPICAL = 8, 32
# Of layouts with equal estimates the simpler comes first, among so many at the head: more than are ever visited.
HEAD = 2_000
# The outcome names the layouts whose bound is above the best step time by no more than this share.
NEAR = 0.01
# Layouts that are visited at most: by their estimates, and then those whose bound alone says that they may be better.
# Numbers rather than times, so that the answer is the same on a busy machine. A layout that can be cut in so few ways
# counts by a share, as long as it has few stages; so does one of like devices that finds nothing, or cannot fit.
MOST_VISITS, MOST_OPEN_VISITS = 30, 8
HAS_FEW_CUTS, SHARE_OF_VISIT, STAGES_OF_VISIT, SHARE_OF_UNFIT = 64, 1 / 8, 64, 1 / 16
# And where no proof is wanted, of any.
MOST_LIKELY_VISITS = 6
# Layouts that are bounded more closely, some tenths of a millisecond each, to prove how near the best is.
MOST_CLOSE = 2000
# Alike ones among so many that are next, together: they share most of the work.
CLOSE_AHEAD = 512
# Of more than twice as many layouts, those that are likely to be fast are bounded first, and unlike ones are probed.
MANY, NUM_UNLIKE = 30_000, 8

Progress = Callable[[int, float, float | None], None]


@dataclass(frozen=True)
class Wanted:
    """Which layouts are of interest: those that take less than ``cutoff_s``; where any will do, the first is enough.

    ``known``: a layout that fits, the best so far. ``proof``: whether it matters how near the best is to a bound;
    otherwise the likeliest layouts alone are visited.
    """

    cutoff_s: float | None = None
    any_will_do: bool = False
    known: Evaluated | None = None
    proof: bool = True


ALL = Wanted()


@dataclass(frozen=True)
class Outcome:
    """What a search found. ``best`` is None where nothing fits or nothing was found in time."""

    best: Evaluated | None
    ranking: tuple[Evaluated, ...]  # the visited layouts that fit, fastest first
    bound_s: float  # no layout is faster
    # No layout, cut or recomputation is faster than ``best`` by more than the tolerance; or all were visited in vain.
    is_exhausted: bool
    interrupted: bool
    num_candidates: int
    num_visited: int
    near: tuple[tuple[Layout, float], ...]  # layouts whose bound is at most NEAR above the best price, and that bound
    closest: Layout | None  # where nothing fits: the layout that lacks least memory


def search(
    table: CostTable,
    layouts: Sequence[Layout],
    solver: StageSolver,
    *,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    wanted: Wanted = ALL,
) -> Outcome:
    """The fastest layout that fits; stops early at the deadline or Ctrl-C with what it has, if it has something.

    With a cutoff ``Outcome.is_exhausted`` says that no layout takes less besides what was found.
    OutOfTimeError where there was no time for the bounds and none is known that fits.
    """
    deadline, listed = deadline or Deadline.never(), Columns.of(Layout, layouts)
    best = Best(wanted.cutoff_s)
    best.keep(wanted.known)
    rough_s, pricers = rough_bound_s(table, listed), Pricers(table)
    try:
        _probe_likely(pricers, listed, rough_s, solver, best, deadline)
        if best.time_s is not None:  # others need no closer look
            listed = listed.take(rough_s < best.time_s * (1 + NEAR))
        lower = _bounds_in_time(table, listed, best.time_s, deadline)
    except OutOfTimeError:
        if best.best is not None:
            return Outcome(best.best, best.ranking(), float(rough_s.min()), False, False, len(layouts), 0, (), None)
        raise
    order, interrupted = _in_order(table, listed, lower), False
    walk = _Walk(pricers, listed, lower, solver, best)

    def is_over() -> bool:
        return deadline.is_over() or (wanted.any_will_do and best.best is not None)

    try:
        walk.probe(order, is_over)
        for index in _visits(order, lower, best, walk) if wanted.proof else _likely_visits(order, best, walk):
            if is_over():
                break
            walk.visit(index)
            if progress is not None:
                progress(walk.num_visited, float(lower.step_time_s[index]), best.time_s)
        if wanted.cutoff_s is None and wanted.proof and not wanted.any_will_do:
            walk.probe_others(order, lower, is_over)
    except (KeyboardInterrupt, OutOfTimeError) as error:
        interrupted = _was_interrupted(error, best, wanted)
    bound_s = walk.bound_s(order)
    is_proved = best.beats(bound_s) and not wanted.any_will_do
    reach_s = 0.0 if best.time_s is None else best.time_s * (1 + NEAR)
    near = order[lower.step_time_s[order] <= reach_s]
    return Outcome(
        best=best.best,
        near=tuple(zip(listed.at(near), lower.step_time_s[near].tolist(), strict=True)),
        ranking=best.ranking(),
        bound_s=bound_s if best.time_s is None else min(bound_s, best.time_s),
        is_exhausted=is_proved if best.time_s is not None else bound_s == float("inf"),
        interrupted=interrupted,
        num_candidates=len(layouts),
        num_visited=walk.num_visited,
        closest=None if best.best else smallest(table, listed, scarcity(table, lower)),
    )


def _was_interrupted(error: KeyboardInterrupt | OutOfTimeError, best: Best, wanted: Wanted) -> bool:
    """Whether Ctrl-C ended the search; raised again where it has no answer: that nothing fits is not known."""
    if isinstance(error, OutOfTimeError):
        return False
    if best.best is None or wanted.any_will_do:
        raise error
    return True


class _Walk:
    """What is known of the layouts so far."""

    def __init__(
        self, pricers: Pricers, listed: Columns[Layout], lower: Bounds, solver: StageSolver, best: Best
    ) -> None:
        self._pricers, self._listed, self._solver, self._best = pricers, listed, solver, best
        self._open_s = lower.step_time_s.copy()  # what each layout takes at least, as far as that is known now
        self._closely = Closely(pricers.table, listed)
        self.excess = Excess(listed)
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

    def visit(self, index: int) -> None:
        """Cuts one layout; its bound rises to what was proved of it."""
        self._visited.add(index)
        bound_s = float(self._open_s[index])
        layout, pricer = self._listed[index], self._pricer(index)
        cut = best_cut(pricer, self._solver, self._best.time_s, bound_s, self._best.like(layout))
        self.counted_visits += _share_of_visit(pricer, cut)
        self._pricers.drop(layout)
        self._open_s[index] = cut.bound_s
        self._best.keep(cut.best)
        taken_s = self._best.time_s if cut.best is None else cut.best.step_time_s
        if cut.nothing_fits:
            self.excess.learn_that_nothing_fits(index)
        elif taken_s is not None:
            self.excess.learn(index, taken_s / float(self._estimate_s[index]))

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


def _visits(order: Positions, lower: Bounds, best: Best, walk: _Walk) -> Iterator[int]:
    """Layouts worth a visit, one after the other: by their estimates, then what stays open by its bound.

    By the bounds it ends at the least of those visited before: nothing raises that, so no other layout matters for what
    is proved. Estimates are corrected in three ways: each finds what others have wait, and has as many of the visits.
    """
    factors = walk.excess.factor, walk.excess.factor_by_pipeline, walk.excess.factor_by_schedule
    orders = [_nearest(lower.estimate_s[order], order, best, walk, each) for each in factors]
    counted = [0.0] * len(orders)
    while orders and not walk.has_seen(MOST_VISITS):
        turn = counted.index(min(counted))
        index = next((each for each in orders[turn] if walk.is_open(each)), None)
        if index is None:
            del orders[turn], counted[turn]
            continue
        counted[turn] -= walk.counted_visits
        yield index
        counted[turn] += walk.counted_visits
    known_s, enough_s = walk.known_s_of(order), walk.least_visited_s
    worth = known_s < min(enough_s, np.inf if best.time_s is None else best.time_s * (1 - TOLERANCE))
    for index in _nearest(known_s[worth], order[worth], best, walk, until_enough=True):
        if walk.has_seen(MOST_VISITS + MOST_OPEN_VISITS) or walk.known_s(index) >= enough_s:
            break
        yield index


def _likely_visits(order: Positions, best: Best, walk: _Walk) -> Iterator[int]:
    """The first layouts by their estimates that may be better; more only as long as none is known that fits."""
    for index in order.tolist():
        if walk.has_seen(MOST_LIKELY_VISITS):
            return
        if not best.beats(walk.known_s(index)):
            yield index


def _nearest(
    guess_s: Array,
    order: Positions,
    best: Best,
    walk: _Walk,
    factor: Callable[[int], float] = lambda _: 1.0,
    *,
    until_enough: bool = False,
) -> Iterator[int]:
    """Layouts of ``order`` from the least guess on, as long as their own guesses say that they may be better.

    No guess is less than the bound. A layout waits for its turn if its bound rises when it is looked at closely, and if
    its guess times ``factor``, which may rise meanwhile, is above that of others.
    """
    by_guess = np.lexsort((order, guess_s))
    indices = order[by_guess]
    fresh = list(zip(guess_s[by_guess].tolist(), indices.tolist(), guess_s[by_guess].tolist(), strict=True))
    fresh.reverse()  # the next stands last
    waiting: list[tuple[float, int, float]] = []
    num_looked = 0
    while fresh or waiting:
        if fresh and best.beats(fresh[-1][0]):
            fresh.clear()
            continue
        if until_enough and walk.looked_enough:
            return
        is_fresh = not waiting or bool(fresh and fresh[-1] < waiting[0])
        turn_s, index, own_s = fresh.pop() if is_fresh else heappop(waiting)
        if is_fresh and len(indices) - len(fresh) > num_looked:
            walk.look_ahead(indices[num_looked : num_looked + CLOSE_AHEAD])
            num_looked += CLOSE_AHEAD
        if best.beats(max(own_s, walk.known_s(index))):
            continue
        now_s = own_s * factor(index)
        if now_s <= turn_s:
            walk.is_open(index)  # which may raise its bound
            now_s = max(now_s, walk.known_s(index))
        if now_s > turn_s:
            heappush(waiting, (now_s, index, own_s))
        else:
            yield index


def _probe_likely(
    pricers: Pricers, listed: Columns[Layout], rough_s: Array, solver: StageSolver, best: Best, deadline: Deadline
) -> None:
    """Of many layouts prices a few unlike ones, and others like the best, so that most need no closer look.

    All nearly evenly cut, and of those that may recompute, so that most that look fast do fit.
    """
    flexible = np.flatnonzero(listed.each(RecomputeKey, lambda key: key.recompute is not Recompute.NONE))
    if len(flexible) <= 2 * MANY:
        return
    flexible = flexible[np.argsort(rough_s[flexible] * times_filled(listed)[flexible], kind="stable")[:MANY]]
    part, table = listed.take(flexible), pricers.table
    order = _in_order(table, part, bounds(table, part, np.inf if best.time_s is None else best.time_s, deadline))
    for index in unlike(part, order, NUM_UNLIKE):
        deadline.check()
        best.keep(probe(pricers.of(part[index]), solver, best.time_s))
    kind = None if best.best is None else kind_of(best.best.layout)
    alike = (index for index in order.tolist() if kind_of(part[index]) == kind)
    for index in islice(alike, NUM_PROBES):
        deadline.check()
        best.keep(probe(pricers.of(part[index]), solver, best.time_s))


def _bounds_in_time(table: CostTable, listed: Columns[Layout], best_s: float | None, deadline: Deadline) -> Bounds:
    """Bounds of every layout; OutOfTimeError where the deadline is over before that."""
    enough_s = np.inf if best_s is None else best_s * (1 + NEAR)
    return in_slices(listed, lambda part: bounds(table, part, enough_s, deadline))


def _in_order(table: CostTable, listed: Columns[Layout], lower: Bounds) -> Positions:
    """Positions of the layouts that may fit, by their estimates; at equal ones the simpler first."""
    fits = np.flatnonzero(scarcity(table, lower) <= 1)
    by_time = fits[np.argsort(lower.estimate_s[fits], kind="stable")]
    head = by_time[:HEAD]
    keys = list(zip(lower.estimate_s[head].tolist(), map(complexity, listed.at(head)), strict=True))
    in_order = np.array(sorted(range(len(head)), key=keys.__getitem__), dtype=np.intp)
    return np.concatenate([head[in_order], by_time[HEAD:]])


def probes(table: CostTable, layouts: Sequence[Layout], solver: StageSolver, deadline: Deadline) -> Outcome:
    """The first layouts by their bounds that fit where they are cut evenly. Nothing is proved.

    OutOfTimeError where the deadline is over before one fits. From the first that does on the deadline has an answer.
    """
    listed = Columns.of(Layout, layouts)
    lower, best, visited = bounds(table, listed), Best(), 0
    for index in _in_order(table, listed, lower)[:MOST_TYPICAL]:
        if best.found and (visited >= NUM_TYPICAL or deadline.is_over()):
            break
        if visited >= NUM_TYPICAL:
            deadline.check()
        visited += 1
        best.keep(probe(Pricer(table, listed[index]), solver, best.time_s))
        if best.found:
            deadline.promise()
    return Outcome(best.best, best.ranking(), 0.0, False, False, len(listed), visited, (), None)
