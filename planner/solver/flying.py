"""Micro-batches in flight at the moments at which the bounds of memory look at ranks of several stages."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.cuts import stage_sizes
from planner.layout.columns import Array
from planner.table.facts import UnitRow


class Counted(NamedTuple):
    """A pipeline, and the moment at which what its ranks hold is counted.

    At each rank's peak, or before the first backward pass through its lowest stage, where ``is_lowest``.
    """

    schedule: ScheduleName
    num_ranks: int
    virtual_stages: int
    num_microbatches: int
    is_lowest: bool


@lru_cache(maxsize=1024)
def flying_by_stage(of: Counted) -> Array:
    """Micro-batches in flight, and waiting for gradients of weights, in each stage; [2, stages]."""
    whole = of.num_ranks, of.virtual_stages, of.num_microbatches
    if of.is_lowest:
        counts = of.schedule.rules.in_flight_at_lowest(*whole)
        return np.array([counts, [0] * len(counts)], dtype=np.float64)
    return np.array(of.schedule.rules.in_flight_by_stage(*whole), dtype=np.float64)


@lru_cache(maxsize=4096)
def means_by_kind(units: UnitRow, of: Counted, *, are_alike: bool = True) -> Array:
    """Of each kind, over the stages in which its units can lie: micro-batches in flight at least, waiting for gradients
    of weights at least, and waiting at most; and the least share that lies in the highest stages of ranks.

    ``are_alike``: as ``Layout.has_alike_stages``.
    """
    flying, waits = flying_by_stage(of)
    is_highest = np.arange(len(flying)) >= len(flying) - of.num_ranks
    each = flying, waits, is_highest.astype(np.float64)
    flies, least, share = (_least_means(units, of_stage, are_alike) for of_stage in each)
    return np.array([flies, least, -_least_means(units, -waits, are_alike), share])


def _least_means(units: UnitRow, each: Array, are_alike: bool) -> Array:
    """For each kind the least mean of ``each``, a number for every stage, over the stages in which its units can lie.

    Stages hold as many blocks as ``stage_sizes`` allows; other units may lie anywhere, but for the first and the last.
    """
    num_blocks, num_stages = sum(units.is_block), len(each)
    sizes = stage_sizes(units, num_stages, are_alike=are_alike)
    found = np.full(len(units.counts), each.min())
    for end in (0, -1):
        if units.counts[units.kinds[end]] == 1:
            found[units.kinds[end]] = each[end]
    for kind, number in enumerate(units.counts):
        if not units.is_block[units.kinds.index(kind)]:
            continue
        held = np.full(num_stages, float(sizes.least) if number == num_blocks else 0.0)
        held[[0, -1]] = 0.0
        order = np.argsort(each, kind="stable")
        room, left = sizes.most - held[order], number - held.sum()
        taken = np.clip(left - (np.cumsum(room) - room), 0.0, room)
        taken[0] += min(0.0, left)
        held[order] += taken
        found[kind] = each @ held / number
    return found
