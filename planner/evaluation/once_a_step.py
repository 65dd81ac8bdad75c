"""The exposed time of data-parallel communication that happens once a step, rather than in every micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels.overlap import Overlap, exposed_s
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.terms import PLACE, Data
from planner.layout.columns import Array
from planner.layout.layout import Layout
from planner.table.facts import FrameworkFacts


class Collected(NamedTuple):
    """Seconds of the reductions and gathers of a rank's units, nothing hidden: of all, and of the first unit.

    ``replicas_s``: of sums over replicas that happen once a step where the reductions are of every micro-batch.
    """

    reduce_s: float | Array
    first_reduce_s: float | Array
    gather_s: float | Array
    first_gather_s: float | Array
    replicas_s: float | Array
    first_replicas_s: float | Array

    @staticmethod
    def of(whole: Array, first: Array) -> Collected:
        """Of [..., ``Data``], of all units and of the first."""
        places = [PLACE[data] for data in (Data.REDUCE, Data.GATHER, Data.REPLICAS)]
        return Collected(*(each[..., place] for place in places for each in (whole, first)))


class Passes(NamedTuple):
    """What a rank computes on one micro-batch: what its communication can hide behind."""

    forward_s: float | Array
    backward_s: float | Array
    overlap: Overlap


def once_a_step_s(layout: Layout, data: Collected, passes: Passes, framework: FrameworkFacts) -> float | Array:
    """Exposed seconds of the reductions and gathers that happen once a step on a rank, or on many.

    Reduction hides behind the backward of the last micro-batch, except for the last bucket, and not at all where a
    schedule splits it: it waits for the last weight gradient. Gathering hides behind the forward of the first, except
    for the first unit. What every micro-batch gathers or reduces stands in its passes already; the sum over replicas
    that waits for the last one hides behind what these leave of its backward pass.
    """
    return _reduced_s(layout, data, passes, framework) + _gathered_s(layout, data, passes, framework)


def _reduced_s(layout: Layout, data: Collected, passes: Passes, framework: FrameworkFacts) -> float | Array:
    if layout.schedule.rules.splits_backward:
        return data.reduce_s
    if ZERO_STAGES[layout.zero_stage].shards_gradients:
        return _never_hidden_s(data.first_reduce_s, framework) + _over_replicas_s(layout, data, passes, framework)
    if not framework.hides_reduction(layout.zero_stage, layout.offload):
        return data.reduce_s
    return np.maximum(
        exposed_s(np.asarray(data.reduce_s), np.asarray(passes.backward_s), passes.overlap), data.first_reduce_s
    )


def _over_replicas_s(layout: Layout, data: Collected, passes: Passes, framework: FrameworkFacts) -> float | Array:
    """Beside what the last backward pass moves anyway, except for the sum of the first unit."""
    if not framework.hides_reduction(layout.zero_stage, layout.offload):
        return data.replicas_s
    backward_s, replicas_s = np.asarray(passes.backward_s), np.asarray(data.replicas_s)
    moved_s = data.reduce_s + np.asarray(data.gather_s) * ZERO_STAGES[layout.zero_stage].shards_parameters
    without_s = exposed_s(moved_s, backward_s, passes.overlap)
    return np.maximum(exposed_s(moved_s + replicas_s, backward_s, passes.overlap) - without_s, data.first_replicas_s)


def _gathered_s(layout: Layout, data: Collected, passes: Passes, framework: FrameworkFacts) -> float | Array:
    zero = ZERO_STAGES[layout.zero_stage]
    if not zero.shards_optimizer:
        return np.zeros_like(data.gather_s)
    if zero.shards_parameters:
        return _never_hidden_s(data.first_gather_s, framework)
    if not framework.overlaps_gather:
        return data.gather_s
    return np.maximum(
        exposed_s(np.asarray(data.gather_s), np.asarray(passes.forward_s), passes.overlap), data.first_gather_s
    )


def _never_hidden_s(first_s: float | Array, framework: FrameworkFacts) -> float | Array:
    """Of what every micro-batch moves: the first unit's share, unless nothing hides and all of it counts there."""
    return first_s if framework.overlaps_micro_batches else np.zeros_like(first_s)
