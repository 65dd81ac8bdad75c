"""Lower bounds of the memory of many layouts while a unit is at work: what it gathers, makes and reduces is counted.

``memory_bounds`` counts the least working set of all units, since any may be a rank's last: often that is nothing. Here
some units are left out instead; S are the others. Ranks that hold a unit of S hold all of S, and at the moment that is
counted each has the last unit of S in its stage at work: units behind it, which are not in S, have freed what they
kept, and of S nothing is freed. So for the weights l_r of ``AlikeMemory``, of these ranks,

    max M_r >= sum_r l_r M_r / sum_r l_r >= (what units of S add to the mean) + (the least that one of S has at work)

as the weights of all ranks sum to 1. That holds for every S. Tried are, for each kind of units, all that have no less
at work. Example: an embedding with nothing at work, and blocks that add 20 GiB to the mean and have 30 GiB at work: all
units say that 20 GiB are needed, the blocks alone that 50 GiB are.
"""

from __future__ import annotations

import numpy as np

from costmodels.vocabulary.terms import PLACE, Holding
from planner.evaluation.block_modes import held_bytes
from planner.evaluation.cuts import stage_sizes
from planner.layout.columns import Array, Positions
from planner.solver.passing_bytes import PassingBytes
from planner.solver.time_bounds import AlikeLayouts


def memory_at_work_bytes(of: AlikeLayouts) -> Array:
    """What the fullest rank of each layout needs at least, no less than ``of.memory_bytes()``."""
    least = of.memory_bytes()
    if of.schedule.rules.splits_backward:  # between its halves a backward pass has freed what is not looked into here
        return least
    with_kept, outside = _at_work_bytes(of), of.outside_bytes / of.most_room
    in_mean = of.least_held[..., PLACE[Holding.KEPT]] * of.reserve[:, None] / of.most_room
    at_work = with_kept - in_mean
    # Of the step's only micro-batch gradients stay, without the reserve: their moment counts where it needs more.
    leaves = _leaves_gradients(of)
    alone = with_kept.max(axis=1) / np.where(leaves, of.reserve, 1.0)
    some = _of_some_units(of, at_work) if of.schedule.rules.has_one_stage else _of_blocks(of, at_work)
    return np.maximum(least, np.maximum(alone, np.where(leaves, 0.0, some)) + outside)


def _of_some_units(of: AlikeLayouts, at_work: Array) -> Array:
    """The bound above without what lies outside tensors, where each rank has one stage."""
    order = np.argsort(-at_work, axis=1, kind="stable")
    adds = np.take_along_axis(of.least_of_units * of.counts, order, axis=1).cumsum(axis=1)
    found: Array = (adds + np.take_along_axis(at_work, order, axis=1)).max(axis=1)
    return found


def _of_blocks(of: AlikeLayouts, at_work: Array) -> Array:
    """The same where ranks have several: S are all blocks. All stages hold one but for the first and the last."""
    units = of.table.units
    sizes = stage_sizes(units, of.pp * of.virtual_stages, are_alike=of.has_alike_stages)
    blocks = sorted({kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block})
    if sizes.least == 0 or of.pp < 3:
        return np.zeros(len(at_work))
    found: Array = of.least_of_units[:, blocks] @ of.counts[blocks] + at_work[:, blocks].min(axis=1) * (1 - 2 / of.pp)
    return found


def _leaves_gradients(of: AlikeLayouts) -> Array:
    framework = of.table.framework
    is_known = framework.has_fsdp_moments and of.virtual_stages == 1 and not framework.keeps_gradients
    return is_known & (of.num_microbatches == 1)


def _at_work_bytes(of: AlikeLayouts) -> Array:
    """What comes and goes at least while a unit of each kind is at work, and what it kept; [layouts, kinds].

    On the largest devices, as bytes of the smallest.
    """
    first, like = _unlike(of)
    some = of.take(first)
    modes, work = some.modes, some.rows.work
    held = held_bytes(some.table, np.repeat(work, len(modes)), np.tile(modes, len(work)))
    passing = PassingBytes(some, held.reshape(len(work), len(modes), *held.shape[1:]))
    return (passing.of_each_kind() / some.most_room).take(like, axis=0)


def _unlike(of: AlikeLayouts) -> tuple[Positions, Positions]:
    """One layout of each that differ in what units have at work, and which of these every layout is like."""
    rows = of.rows
    _, parts = np.unique(rows.expert_parts, return_inverse=True)
    replicated = of.layouts.numbers("dp") * of.layouts.numbers("cp") > 1
    combined = np.zeros(len(rows.work), dtype=np.int64)
    for column in (
        rows.work, rows.split, rows.zero_stage, parts, rows.is_sharded, rows.mixes_lifetimes,
        of.num_microbatches > 1, replicated,
    ):  # fmt: skip
        combined = combined * (int(column.max(initial=0)) + 1) + column
    _, first, like = np.unique(combined, return_index=True, return_inverse=True)
    return first, like
