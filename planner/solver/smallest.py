"""Layouts at their smallest, and which lacks least memory where none fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.choices import Recompute
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.layout.columns import Array, Columns, Positions
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout
from planner.solver.bounds import Bounds, bounds_of_memory, in_slices
from planner.solver.kinds import unlike
from planner.table.cost_table import CostTable

# Of so many unlike layouts, those that are bounded to need least, it is worked out what they need, beside others.
NUM_SMALLEST = 8


class _DivisionKey(NamedTuple):
    tp: int
    ep: int


def at_its_smallest(table: CostTable, layout: Layout, *, exact: bool = False) -> Evaluated:
    """A layout that does not fit, cut evenly, with all recomputed where that is free: about the least that it needs.

    ``exact``: its time too, as ``Evaluator.evaluate`` says.
    """
    evaluator = Evaluator(table, layout if layout.recompute else layout._replace(recompute=Recompute.FULL))
    return evaluator.evaluate(evaluator.even_starts(), exact=exact)


def scarcity(table: CostTable, lower: Bounds) -> Array:
    """The largest share that each layout must take of a device's memory or of a node's own; above 1 it cannot fit."""
    return np.maximum(lower.memory_bytes / table.cluster.devices[0].memory_bytes, lower.host_share)


def smallest(table: CostTable, listed: Columns[Layout], shares: Array) -> Layout | None:
    """The layout that lacks least memory, as far as it was looked for; None of none.

    ``shares``: of a device, that each takes at least.
    """
    if not len(listed):
        return None
    order = np.argsort(shares, kind="stable")
    tried = dict.fromkeys([*_of_each_division(listed, order), *unlike(listed, order, NUM_SMALLEST)])
    return min((listed[index] for index in tried), key=lambda layout: at_its_smallest(table, layout).memory_share)


def _of_each_division(listed: Columns[Layout], order: Positions) -> list[int]:
    """The first in ``order`` of each way to divide a block, of which bounds leave out what it takes while at work."""
    _, firsts = np.unique(listed.by(_DivisionKey)[1][order], return_index=True)
    return order[np.sort(firsts)].tolist()


def needing_least(table: CostTable, layouts: Sequence[Layout], deadline: Deadline) -> Evaluated | None:
    """Of the layouts that need least by their bounds, cut evenly, the one that does; None of none.

    OutOfTimeError where the deadline is over before there are bounds.
    """
    listed = Columns.of(Layout, layouts)
    lower = in_slices(listed, lambda part: bounds_of_memory(table, part, deadline))
    found = smallest(table, listed, scarcity(table, lower))
    return None if found is None else at_its_smallest(table, found)
