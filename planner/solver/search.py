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
from planner.solver.cutting import TOLERANCE, Pricer, Pricers, probe
from planner.solver.glance import RecomputeKey, rough_bound_s, times_filled
from planner.solver.kinds import kind_of, unlike
from planner.solver.smallest import scarcity, smallest
from planner.solver.walk import HEAD, NUM_PROBES, Walk
from planner.table.cost_table import CostTable

# Of typical layouts so many are priced; where none of these fits, up to so many.
NUM_TYPICAL, MOST_TYPICAL = 8, 32
# The outcome names the layouts whose bound is above the best step time by no more than this share.
NEAR = 0.01
# Layouts that are visited at most: by their estimates, and then those whose bound alone says that they may be better.
# Numbers rather than times, so that the answer is the same on a busy machine.
MOST_VISITS, MOST_OPEN_VISITS = 30, 8
# And where no proof is wanted, of any.
MOST_LIKELY_VISITS = 6
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
    walk = Walk(pricers, listed, lower, solver, best)

    def is_over() -> bool:
        return deadline.is_over() or (wanted.any_will_do and best.best is not None)

    try:
        walk.probe(order, is_over)
        for index in _visits(order, lower, best, walk) if wanted.proof else _likely_visits(order, best, walk):
            if is_over():
                break
            walk.visit(index, order)
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


def _visits(order: Positions, lower: Bounds, best: Best, walk: Walk) -> Iterator[int]:
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


def _likely_visits(order: Positions, best: Best, walk: Walk) -> Iterator[int]:
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
    walk: Walk,
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
