"""Exchanges of experts beside another micro-batch: what stays exposed where the schedule has no pass beside them.

Where a rank runs a forward pass and next the backward pass of another micro-batch, a framework may run both at once:
the exchanges of each hide behind the compute of the other. In the first and the last micro-batches of a step a pass
stands alone, and its exchanges are exposed.

    beside another  exposed(exchange, compute of the other pass)    (``costmodels.overlap``)
    alone           exchange

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1 (DualPipe); Megatron-Core's
``combined_1f1b.py`` (--overlap-moe-expert-parallel-comm).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from costmodels.overlap import Overlap, exposed_s
from costmodels.pipeline import ActionSeconds
from costmodels.vocabulary.action import BACKWARD, FORWARD, INPUT_GRADIENT, Action, ActionLists
from planner.evaluation.unit_times import UnitTimes
from planner.layout.columns import Array


class StageExchanges(NamedTuple):
    """Seconds of one stage on one micro-batch; ``weight_s`` is the part of its backward compute that can wait."""

    forward_s: float  # exchanges, nothing hidden
    backward_s: float
    compute_forward_s: float
    compute_backward_s: float
    weight_s: float
    overlap: Overlap

    def least_s(self, exchange_s: float) -> float:
        """What is left where all is hidden: compute beside it is slower."""
        return exchange_s - exchange_s * max(0.0, 1 - self.overlap.slowdown)


def stage_exchanges(times: UnitTimes, units: Sequence[tuple[int, int]], overlap: Overlap) -> StageExchanges:
    """Of a stage with these ``units``, each its mode of recomputation and its kind; ``times``: of one layout."""

    def summed(seconds: Array) -> float:
        return sum(float(seconds[unit]) for unit in units)

    forward_s, backward_s = times.exchanges_s[..., 0], times.exchanges_s[..., 1]
    computes_s = summed(times.compute_forward_s), summed(times.compute_backward_s)
    return StageExchanges(summed(forward_s), summed(backward_s), *computes_s, summed(times.weight_s), overlap)


def unhidden_s(schedule: ActionLists, stages: Sequence[StageExchanges]) -> ActionSeconds:
    """For every action the seconds of its exchanges besides those that are left where all is hidden."""
    return tuple(_of_rank(actions, stages) for actions in schedule)


def without_pipeline(num_microbatches: int) -> ActionLists:
    """One rank that runs each backward pass beside the next micro-batch's forward pass."""
    beside = [(Action(FORWARD, 0, i + 1), Action(BACKWARD, 0, i)) for i in range(num_microbatches - 1)]
    return ((Action(FORWARD, 0, 0), *chain.from_iterable(beside), Action(BACKWARD, 0, num_microbatches - 1)),)


def _of_rank(actions: Sequence[Action], stages: Sequence[StageExchanges]) -> tuple[float, ...]:
    beside = _beside(actions)
    found: list[float] = []
    for place, action in enumerate(actions):
        stage = stages[action.stage]
        exchange_s = _exchange_s(action, stage)
        other = beside.get(place)
        hidden_behind_s = 0.0 if other is None else _compute_s(actions[other], stages[actions[other].stage])
        found.append(exposed_s(exchange_s, hidden_behind_s, stage.overlap) - stage.least_s(exchange_s))
    return tuple(found)


def _beside(actions: Sequence[Action]) -> dict[int, int]:
    """Places of forward passes and of the backward passes of other micro-batches right behind them, both ways.

    A backward pass needs the forward pass of its own micro-batch: these two cannot run at once.
    """
    found: dict[int, int] = {}
    for place, (one, other) in enumerate(pairwise(actions)):
        is_pair = one.kind == FORWARD and other.kind in (BACKWARD, INPUT_GRADIENT)
        if is_pair and one.microbatch != other.microbatch:
            found[place], found[place + 1] = place + 1, place
    return found


def _exchange_s(action: Action, stage: StageExchanges) -> float:
    if action.kind == FORWARD:
        return stage.forward_s
    return stage.backward_s if action.kind in (BACKWARD, INPUT_GRADIENT) else 0.0


def _compute_s(action: Action, stage: StageExchanges) -> float:
    if action.kind == FORWARD:
        return stage.compute_forward_s
    return stage.compute_backward_s - (stage.weight_s if action.kind == INPUT_GRADIENT else 0.0)
