"""Layouts at their smallest, and which lacks least memory where none fits."""

from __future__ import annotations

import numpy as np

from costmodels.vocabulary.choices import Recompute
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.layout.columns import Array, Columns
from planner.layout.layout import Layout
from planner.solver.bounds import Bounds
from planner.solver.kinds import unlike
from planner.table.cost_table import CostTable

# Of so many unlike layouts, those that are bounded to need least, it is worked out what they need.
NUM_SMALLEST = 8


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
    found = [listed[index] for index in unlike(listed, np.argsort(shares, kind="stable"), NUM_SMALLEST)]
    return min(found, key=lambda layout: at_its_smallest(table, layout).memory_share)
