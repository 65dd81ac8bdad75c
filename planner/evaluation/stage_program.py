"""The program of cutting one layout into one stage a rank: what every possible stage takes on every rank.

What a stage must recompute to fit its device is worked out by the ledger only for the stages of cuts that are looked at
(``refine``). Until then a stage counts with what a shorter one of its units must recompute, which is no more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.vocabulary.action import Transfer
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.problems import StageProblem


def stage_problem(evaluator: Evaluator) -> StageProblem:
    """The program of ``evaluator``'s layout, as if every stage fitted without recomputation."""
    layout = evaluator.layout
    pp, num_units = layout.mesh.pp, len(evaluator.table.units.kinds)
    times = [evaluator.unit_times_of(rank) for rank in range(pp)]
    places = [evaluator.place_of(rank) for rank in range(pp)]
    sends = evaluator.send_s
    messages = zip(evaluator.receives_s(sends), evaluator.beside_s.T.tolist(), strict=True)
    once_s = {place: evaluator.least_once_a_step_s(places.index(place)) for place in set(places)}
    return StageProblem(
        forward_s=tuple(each.forward_s for each in times),
        backward_s=tuple(each.backward_s for each in times),
        extra_s=np.zeros((pp, num_units, num_units + 1)),
        once_s=np.array([once_s[place] for place in places]),
        num_microbatches=layout.num_microbatches,
        send_s=(0.0,) * len(sends) if evaluator.transfer is Transfer.ON_DEMAND else sends,
        windowed=not layout.schedule.rules.forwards_first,
        receive_s=tuple((first + forward, then + backward) for (first, then), (forward, backward) in messages),
    )


def refine(problem: StageProblem, starts: tuple[int, ...], least: LeastRecompute) -> StageProblem | None:
    """``problem`` with what the stages of this cut must recompute; None where that is all known already.

    A stage needs no less than a part of it: what is found counts for every stage that holds all its units, on this rank
    and, where all devices are alike, on the ranks before it, which hold no fewer micro-batches.
    """
    stages = list(zip(starts, (*starts[1:], problem.num_units), strict=True))
    choices = [least.of_rank(rank, {rank: range(*stage)}) for rank, stage in enumerate(stages)]
    found = [np.inf if choice is None else choice.least_s for choice in choices]
    if not any(found[rank] > problem.extra_s[rank][stage] for rank, stage in enumerate(stages)):
        return None
    extra_s = problem.extra_s.copy()
    alike = len(set(zip(problem.forward_s, problem.backward_s, strict=True))) == 1
    needed = np.zeros_like(extra_s[0])  # on this rank, and where all are alike on those behind it
    for rank in reversed(range(problem.num_ranks)):
        start, end = stages[rank]
        if not alike:
            needed[:] = 0.0
        if found[rank] > extra_s[rank, start, end]:
            np.maximum(needed[: start + 1, end:], found[rank], out=needed[: start + 1, end:])
        np.maximum(extra_s[rank], needed, out=extra_s[rank])
    return replace(problem, extra_s=extra_s)
