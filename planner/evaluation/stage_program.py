"""The program of cutting one layout into one stage a rank: what every possible stage takes on every rank.

Memory is the ledger's own: a stage has a time on a rank only where the ledger of that rank says that it fits, and that
time includes what its blocks must recompute for it.
"""

from __future__ import annotations

import numpy as np

from planner.evaluation.evaluator import Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.layout.columns import Array
from planner.problems import StageProblem


def stage_problem(evaluator: Evaluator, least: LeastRecompute, limit_s: float | None = None) -> StageProblem:
    """The program of ``evaluator``'s layout; stages that alone make the pipeline take ``limit_s`` are left out."""
    layout = evaluator.layout
    pp = layout.mesh.pp
    times = [evaluator.unit_times_of(rank) for rank in range(pp)]
    return StageProblem(
        forward_s=tuple(each.forward_s for each in times),
        backward_s=tuple(each.backward_s for each in times),
        once_s=np.array([evaluator.least_once_a_step_s(rank) for rank in range(pp)]),
        extra_s=_extra_s(evaluator, least, np.inf if limit_s is None else limit_s / layout.num_microbatches),
        num_microbatches=layout.num_microbatches,
        send_s=evaluator.send_s,
        windowed=not layout.schedule.rules.forwards_first,
    )


def _extra_s(evaluator: Evaluator, least: LeastRecompute, longest_s: float) -> Array:
    """[ranks, units, units + 1]: recomputation of the stage of units a..b-1, infinite where it does not fit.

    A stage needs no less memory than a shorter one with the same first unit, so the longest are looked at first.
    """
    pp, num_units = evaluator.layout.mesh.pp, len(evaluator.table.units.kinds)
    found = np.full((pp, num_units, num_units + 1), np.inf)
    for rank in range(pp):
        times = evaluator.unit_times_of(rank)
        running = np.concatenate(([0.0], np.cumsum(np.array(times.forward_s) + np.array(times.backward_s))))
        for start in range(num_units):
            last = int(np.searchsorted(running, running[start] + longest_s, side="right")) - 1
            for end in range(min(last, num_units), start, -1):
                choice = least.of_rank(rank, {rank: range(start, end)})
                if choice is None:
                    continue
                if choice.least_s == 0.0:
                    found[rank, start, start + 1 : end + 1] = 0.0
                    break
                found[rank, start, end] = choice.least_s
    return found
