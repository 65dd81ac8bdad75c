"""Which of nearly equal plans is taken: the simplest of those that are predicted about as fast as the fastest.

Predictions for one model on one machine are often wrong in the same direction, but not by the same amount. The ratio of
the predicted times of two layouts is off by ``between_layouts``, which benchmarks/calibrate.py measures on published
runs that differ in layout alone and keeps in the recipe's error band. That is several per cent. A plan that is
predicted to be several per cent slower is not taken for being simpler. But where two predictions differ by no more than
MOST_TIE, their order says nothing: of the pairs of published runs that are predicted so close, at most half come in
that order. ``layout.complexity`` says what simple is.
"""

from __future__ import annotations

from planner.evaluation.evaluator import Evaluated
from planner.layout.columns import Columns
from planner.layout.complexity import complexity
from planner.layout.layout import Layout
from planner.solver.base import StageSolver
from planner.solver.closer_bounds import CloserBounds
from planner.solver.cutting import TOLERANCE, Pricer, best_cut
from planner.solver.search import Outcome
from planner.table.cost_table import CostTable

MOST_TIE = TOLERANCE
# Simpler layouts that are looked at; beyond that the fastest stays. A number rather than a time: the answer is the same
# on a busy machine.
MOST_VISITS = 200
# So many are bounded closely together.
AT_ONCE = 32


def tie_share(table: CostTable) -> float:
    """How much slower than the fastest a simpler plan may be predicted; 0 where the error was never measured."""
    error = table.framework.error_between_layouts
    return 0.0 if error is None else min(MOST_TIE, error)


def simplest(table: CostTable, outcome: Outcome, limit_s: float, solver: StageSolver) -> Evaluated | None:
    """The simplest layout that fits and takes at most ``limit_s``; among equally simple ones the fastest.

    None where nothing that is simpler than the fastest layout is so fast.
    """
    assert outcome.best is not None
    most = complexity(outcome.best.layout)
    simpler = sorted((complexity(c), bound_s, c) for c, bound_s in outcome.near if complexity(c) < most)[:MOST_VISITS]
    best: Evaluated | None = None
    closer, closely_s = CloserBounds(table), list[float]()
    for place, (number, bound_s, layout) in enumerate(simpler):
        if best is not None and number > complexity(best.layout):
            break
        enough_s = limit_s if best is None else best.step_time_s
        if place == len(closely_s):
            next_ones = [each for _, _, each in simpler[place : place + AT_ONCE]]
            closely_s += closer.of(Columns.of(Layout, next_ones), limit_s).most_s.tolist()
        if max(bound_s, closely_s[place]) > enough_s:
            continue
        priced = best_cut(Pricer(table, layout), solver, enough_s / (1 - TOLERANCE), bound_s).best
        if priced is not None and priced.step_time_s <= enough_s:
            best = priced
    return best
