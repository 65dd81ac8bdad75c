"""About what layouts take, before they are visited: which are worth a look first. No bound, and it proves nothing."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.cuts import even_starts, shared_starts
from planner.layout.columns import Array
from planner.solver.time_bounds import AlikeLayouts
from planner.table.facts import UnitRow


def estimate_s(of: AlikeLayouts) -> Array:
    """What a likely cut takes at least, where ranks hold several stages; 0 or the bound elsewhere.

    The even cut, and over unlike devices also one in which each stage has its rank's share. With w_r the work of all
    stages of rank r and f_i, w_i that of the first stage of an earlier rank i:

        T >= sum_(i<r) w_i + 2 c r + m w_r

    as in line (1). Where a schedule splits backward passes, only gradients of inputs must pass the ranks before r.
    With u = w less the weight gradients,

        T >= sum_(i<r) f_i + c r + m w_r       and       T >= sum_(i<r) u_i + 2 c r + m u_r
    Example: four stages of one unit (1 s), two on each rank: rank 1 says T >= 1 + 4 * 2 = 9 s.
    """
    rules, num_stages = of.schedule.rules, of.pp * of.virtual_stages
    if rules.has_one_stage and of.is_over_groups:
        return of.unlike_s(recomputes=False) * _slower(of) + of.once_s
    if of.offloads_activations and rules.has_one_stage and of.pp > 1:
        # Rank for rank as the mean: with the buffers that the bound, in which some ranks need none, leaves out.
        rounds = (of.num_microbatches + of.pp - 1) / of.pp
        return of.step_time_s() + rounds * np.maximum(0.0, of.likely_s - of.recomputed_s)
    if of.pp == 1 or rules.has_one_stage:
        return np.zeros(len(of.num_microbatches))
    units = of.table.units
    starts = [even_starts(units.is_block, num_stages)] if num_stages <= sum(units.is_block) else []
    if of.is_over_groups and num_stages <= len(units.kinds):
        starts.append(_shared_starts(of))
    if not starts:
        return np.zeros(len(of.num_microbatches))
    return np.min([_cut_s(of, each, _slower(of)) for each in dict.fromkeys(starts)], axis=0) + of.once_s


def _slower(of: AlikeLayouts) -> Array:
    """How many times as long passes take with what must be recomputed."""
    return 1 + of.recomputed_s / (of.work_s @ of.counts)


def _shared_starts(of: AlikeLayouts) -> tuple[int, ...]:
    """First units of stages that each take as long on their own ranks' devices, for the middle one of the layouts."""
    middle = len(of.num_microbatches) // 2
    ranks = [of.schedule.rules.rank_of(stage, of.pp) for stage in range(of.pp * of.virtual_stages)]
    slowness, kinds = of.slowness[:, middle], list(of.table.units.kinds)
    starts = shared_starts(of.work_s[middle, kinds].tolist(), [1 / float(slowness[rank]) for rank in ranks])
    assert starts is not None  # there are as many units as stages
    return starts


def _cut_s(of: AlikeLayouts, starts: tuple[int, ...], slower: Array) -> Array:
    """What the pipeline takes at least with this cut, in passes that take ``slower`` times as long."""
    rules, m = of.schedule.rules, of.num_microbatches
    ranks, firsts = _counts(of.table.units, of.schedule, starts, of.pp)
    work = [times.forward_s + times.backward_s for times in of.times_of_ranks]
    whole_s = m * _of_ranks(work, ranks)
    if rules.overlaps_steps:
        return whole_s.max(axis=0) * slower
    if not rules.splits_backward:
        return ((_before(_of_ranks(work, firsts)) + whole_s) * slower + 2 * of.hops_s).max(axis=0)
    forward = [times.forward_s for times in of.times_of_ranks]
    sent = [each - times.weight_s for each, times in zip(work, of.times_of_ranks, strict=True)]
    whole_s = (_before(_of_ranks(forward, firsts)) + whole_s) * slower + of.hops_s
    sent_s = (_before(_of_ranks(sent, firsts)) + m * _of_ranks(sent, ranks)) * slower + 2 * of.hops_s
    return np.maximum(whole_s, sent_s).max(axis=0)


def _of_ranks(seconds: list[Array], counts: Array) -> Array:
    """What the units of each rank take, [ranks, layouts]; ``seconds`` of each unit on each rank, or one for all."""
    if len(seconds) == 1:
        return counts @ seconds[0].T
    return np.array([each @ own for each, own in zip(seconds, counts, strict=True)])


def _before(of_ranks: Array) -> Array:
    """Sums over the ranks before each."""
    return np.cumsum(of_ranks, axis=0) - of_ranks


@lru_cache(maxsize=1024)
def _counts(units: UnitRow, schedule: ScheduleName, starts: tuple[int, ...], num_ranks: int) -> tuple[Array, Array]:
    """Units of each kind on each rank, and in the first stage of each; [ranks, kinds] each."""
    ends, width = (*starts[1:], len(units.kinds)), max(units.kinds) + 1
    stages = [np.bincount(units.kinds[a:b], minlength=width) for a, b in zip(starts, ends, strict=True)]
    ranks = np.zeros((num_ranks, width))
    np.add.at(ranks, [schedule.rules.rank_of(stage, num_ranks) for stage in range(len(stages))], stages)
    return ranks, np.array(stages[:num_ranks], dtype=np.float64)
