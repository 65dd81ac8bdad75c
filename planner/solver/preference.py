"""Which of nearly equal plans is taken: the simplest whose predicted time cannot be told from the fastest.

Errors of plans of one model on one machine go together, but not wholly: between two published runs that differ in
layout alone, the ratio of the predicted times is off by ``between_layouts`` (in the recipe's error band, measured by
benchmarks/calibrate.py). That is several per cent, and a plan so much slower is not given away for simplicity; but
within MOST_TIE the predicted order says nothing: of the pairs of published runs that are predicted so close, no more
than half come out in that order. ``space.complexity`` says what simple is.
"""

from __future__ import annotations

from planner.evaluation.evaluator import Evaluated
from planner.layout.complexity import complexity
from planner.solver.base import StageSolver, UnprovedError
from planner.solver.search import NEAR, Outcome, visit
from planner.table.cost_table import CostTable

MOST_TIE = NEAR
# Simpler points that are looked at; beyond that the fastest stays. A number rather than a time: the answer is the same
# on a busy machine.
MOST_VISITS = 200


def tie_share(table: CostTable) -> float:
    """How much slower than the fastest a simpler plan may be predicted; 0 where the error was never measured."""
    error = table.framework.error_between_layouts
    return 0.0 if error is None else min(MOST_TIE, error)


def simplest(table: CostTable, outcome: Outcome, limit_s: float, solver: StageSolver) -> Evaluated | None:
    """The simplest point that fits and takes at most ``limit_s``; among equally simple ones the fastest.

    None where nothing that is simpler than the fastest point is so fast.
    """
    assert outcome.best is not None
    most = complexity(outcome.best.layout)
    simpler = sorted((complexity(c), bound_s, c) for c, bound_s in outcome.near if complexity(c) < most)
    best: Evaluated | None = None
    for number, bound_s, layout in simpler[:MOST_VISITS]:
        if best is not None and number > complexity(best.layout):
            break
        if bound_s > (limit_s if best is None else best.step_time_s):
            continue
        try:
            priced = visit(table, layout, solver, None)
        except UnprovedError:
            continue
        if priced is not None and priced.step_time_s <= (limit_s if best is None else best.step_time_s):
            best = priced
    return best
