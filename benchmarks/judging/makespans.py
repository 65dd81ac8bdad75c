"""What every cut and recomputation of one layout takes at least: its schedule simulated, thousands of plans at once.

A step is its schedule's makespan and what comes once a step, so no plan takes less than its makespan. Seconds of units
come from the evaluation, and are added up to stages here; the schedule is simulated by the formula that prices a plan
(``costmodels.pipeline_many``). Tests hold the result against the evaluation, plan by plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.judging.choice import Choice
from costmodels.pipeline_many import simulate_many
from costmodels.vocabulary.choices import Recompute
from planner.evaluation.evaluator import Evaluator

Array = NDArray[np.float64]
MODES = tuple(Recompute)


def places_of(recomputed: Sequence[Sequence[Recompute]]) -> NDArray[np.intp]:
    """Rows of modes as places in ``MODES``, [rows, units]."""
    return np.array([[MODES.index(mode) for mode in modes] for modes in recomputed], dtype=np.intp)


class Makespans:
    """Of one layout, whose blocks may each recompute what they like."""

    def __init__(self, choice: Choice, evaluator: Evaluator) -> None:
        """``evaluator``: of the layout, with free modes."""
        self._choice, self._evaluator = choice, evaluator
        assert evaluator.free_modes == list(MODES)
        kinds = list(evaluator.table.units.kinds)
        each = [evaluator.times_of_kinds(rank) for rank in range(choice.pp)]
        # Forward, backward and gradients of weights, [parts, modes, units] on each rank.
        self._seconds = [np.stack([t.forward_s, t.backward_s, t.weight_s])[..., kinds] for t in each]

    def least_work_s(self, places: NDArray[np.intp], num_microbatches: int) -> Array:
        """The average rank's work in each row of modes, [rows]: the busiest works as long. 0 where devices differ."""
        if self._choice.groups:
            return np.zeros(len(places))
        of_units = self._seconds[0][:2].sum(axis=0)
        whole = of_units[places, np.arange(places.shape[1])].sum(axis=1)
        return num_microbatches * whole / self._choice.pp

    def of(self, places: NDArray[np.intp], cuts: Sequence[tuple[int, ...]], num_microbatches: int) -> Array:
        """Seconds of every row of modes under every cut, [rows, cuts].

        0 where exchanges of experts run beside other micro-batches: how long they are depends on the order of actions.
        """
        if self._evaluator.hides_exchanges:
            return np.zeros((len(places), len(cuts)))
        stages = self._of_stages(places, cuts)
        choice, rules = self._choice, self._choice.schedule.rules
        if choice.pp == 1:
            return num_microbatches * (stages[0, 0] + stages[1, 0])
        forward, backward, weight = stages.reshape(3, choice.num_stages, -1)
        forward, backward = np.array([forward, backward]) + self._evaluator.beside_s[:, :, None]
        seconds = np.concatenate([forward, backward, backward - weight, weight])
        schedule = rules.columns(choice.pp, choice.virtual_stages, num_microbatches)
        span = simulate_many(schedule, seconds, self._evaluator.send_s, transfer=self._evaluator.transfer)
        found = span.longest_rank_s if rules.overlaps_steps else span.makespan_s
        return found.reshape(len(places), len(cuts))

    def _of_stages(self, places: NDArray[np.intp], cuts: Sequence[tuple[int, ...]]) -> Array:
        """Seconds of each stage on one micro-batch, [parts, stages, rows, cuts]."""
        starts = np.array(cuts)
        ends = np.column_stack([starts[:, 1:], np.full(len(starts), places.shape[1])])
        units, rank_of = np.arange(places.shape[1]), self._choice.schedule.rules.rank_of
        before: dict[int, Array] = {}  # what all units before each take on a rank, [parts, rows, units + 1]
        for rank in range(self._choice.pp):
            running = np.cumsum(self._seconds[rank][:, places, units], axis=2)
            before[rank] = np.concatenate([np.zeros((*running.shape[:2], 1)), running], axis=2)
        of_stages = [before[rank_of(stage, self._choice.pp)] for stage in range(starts.shape[1])]
        return np.stack([each[..., ends[:, k]] - each[..., starts[:, k]] for k, each in enumerate(of_stages)], axis=1)
