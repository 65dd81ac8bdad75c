"""The exposed time of data-parallel communication that happens once a step, rather than in every micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from costmodels.overlap import Overlap, exposed_s
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.terms import Data
from planner.layout.columns import Array
from planner.layout.layout import Layout
from planner.table.facts import FrameworkFacts

_GATHER, _REDUCE, _ = range(len(Data))


class Passes(NamedTuple):
    """What a rank computes on one micro-batch: what its communication can hide behind."""

    forward_s: float
    backward_s: float
    overlap: Overlap


def once_a_step_s(layout: Layout, data_s: Array, passes: Passes, framework: FrameworkFacts) -> float:
    """Exposed seconds of the reductions and gathers that happen once a step on a rank; ``data_s``: [its units, Data].

    Reduction hides behind the backward of the last micro-batch, except for the last bucket, and not at all where a
    schedule splits it: it waits for the last weight gradient. Gathering hides behind the forward of the first, except
    for the first unit.
    """
    if not len(data_s):
        return 0.0
    return _reduced_s(layout, data_s[:, _REDUCE], passes, framework) + _gathered_s(
        layout, data_s[:, _GATHER], passes, framework
    )


def _reduced_s(layout: Layout, reduce_s: Array, passes: Passes, framework: FrameworkFacts) -> float:
    whole_s, bucket_s = float(reduce_s.sum()), float(reduce_s[0])
    if not framework.overlaps_reduction or layout.schedule.rules.splits_backward:
        return whole_s
    if ZERO_STAGES[layout.zero_stage].shards_gradients:
        return bucket_s
    return max(exposed_s(whole_s, passes.backward_s, passes.overlap), bucket_s)


def _gathered_s(layout: Layout, gather_s: Array, passes: Passes, framework: FrameworkFacts) -> float:
    zero = ZERO_STAGES[layout.zero_stage]
    whole_s, first_s = float(gather_s.sum()), float(gather_s[0])
    if not zero.shards_optimizer:
        return 0.0
    if zero.shards_parameters:
        return first_s
    if not framework.overlaps_gather:
        return whole_s
    return max(exposed_s(whole_s, passes.forward_s, passes.overlap), first_s)
