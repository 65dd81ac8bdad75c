"""Replicas on unlike devices with unlike shares of the batch: each group priced by itself, and all of them together.

All replicas run as many micro-batches, so that every collective of one is met by all others. They wait for the slowest
of them: in a step the group whose micro-batches take longest decides, and behind it the longest of what happens once a
step. All blocks of one name recompute the same on every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from costmodels.ledger import RankMemory
from costmodels.vocabulary.choices import BlockMode
from costmodels.vocabulary.terms import Term
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable


class SharesEvaluator:
    """A layout of ``table`` whose groups of replicas have shares of the batch."""

    def __init__(self, table: CostTable, layout: Layout, modes: Sequence[BlockMode] | None = None) -> None:
        """``modes``: as of ``Evaluator``."""
        self.table, self.layout = table, layout
        self.parts = tuple(Evaluator(table, part, modes) for part in layout.parts)
        self.modes = self.parts[0].modes

    def with_modes(self, modes: Sequence[BlockMode]) -> SharesEvaluator:
        """The same layout with other modes of its units."""
        return SharesEvaluator(self.table, self.layout, modes)

    def slowest(self, starts: tuple[int, ...]) -> Evaluator:
        """The replicas that all others wait for."""
        return max(self.parts, key=lambda part: _micro_batches_s(part, part.evaluate(starts)))

    def evaluate(self, starts: tuple[int, ...], *, exact: bool = False) -> Evaluated:
        """The step, and the memory of a rank of each group."""
        found = [part.evaluate(starts, exact=exact) for part in self.parts]
        seconds = [_micro_batches_s(*each) for each in zip(self.parts, found, strict=True)]
        once = [part.once_a_step(starts)[0] for part in self.parts]
        data_s, optimizer_s = (max(each) for each in zip(*once, strict=True))
        slowest = seconds.index(max(seconds))
        breakdown = dict(found[slowest].breakdown)
        breakdown[Term.DATA] += data_s - once[slowest][0]
        breakdown[Term.OPTIMIZER] += optimizer_s - once[slowest][1]
        return Evaluated(
            layout=self.layout,
            starts=starts,
            modes=self.modes,
            step_time_s=seconds[slowest] + data_s + optimizer_s,
            breakdown=breakdown,
            find_memory=partial(self._memory, starts),
            capacity_bytes=tuple(room for part in self.parts for room in part.capacity_bytes),
        )

    def _memory(self, starts: tuple[int, ...]) -> tuple[RankMemory, ...]:
        return tuple(memory for part in self.parts for memory in part.memory(starts))


def _micro_batches_s(part: Evaluator, found: Evaluated) -> float:
    """What all micro-batches take, without what happens once a step."""
    return found.step_time_s - sum(part.once_a_step(found.starts)[0])


AnyEvaluator = Evaluator | SharesEvaluator


def evaluator_of(table: CostTable, layout: Layout, modes: Sequence[BlockMode] | None = None) -> AnyEvaluator:
    """What prices ``layout``, whether its replicas have shares of the batch or none."""
    return (SharesEvaluator if layout.shares else Evaluator)(table, layout, modes)
