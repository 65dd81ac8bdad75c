"""What many layouts take at least at a glance: units by themselves, and how the pipeline fills.

The lines (1) to (3) and the symbols are those of ``solver.bounds``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import PLACE, Term, Time
from planner.evaluation.block_modes import MODES
from planner.layout.columns import Array, Columns
from planner.layout.layout import Layout
from planner.layout.short_rows import largest_of_each
from planner.solver.of_table import CHUNK, UnitPasses
from planner.table.cost_table import CostTable
from planner.table.keys import WorkKey


class RecomputeKey(NamedTuple):
    """The mode of all blocks; None where each has its own."""

    recompute: Recompute | None


class _RanksKey(NamedTuple):
    pp: int


class _ShapeKey(NamedTuple):
    schedule: ScheduleName
    pp: int
    virtual_stages: int
    num_microbatches: int
    groups: tuple[str, ...]


def rough_bound_s(table: CostTable, layouts: Columns[Layout]) -> Array:
    """What each layout takes at least, at a glance: what units take by themselves, and how the pipeline fills.

    Counted is one micro-batch on the fastest devices. Where each block may choose, it recomputes nothing.
    """
    framework = table.framework
    may_hide = framework.exchanges_hide_without_pipeline or framework.exchanges_hide_under
    counted = [time for time in Time if time.term and not (may_hide and time.term is Term.EXPERT)]
    keys, of = layouts.by(WorkKey)
    times = table.time_s[:, table.work_rows(keys)][..., [PLACE[time] for time in counted]].sum(axis=-1)
    # Rows that a kind of device does not run are not priced for it.
    in_mode = np.nan_to_num(np.fmin.reduce(times @ table.counts, axis=0))  # [rows, modes]
    whole_s = np.concatenate([in_mode, in_mode.min(axis=1, keepdims=True)], axis=1)
    mode = layouts.each(RecomputeKey, lambda key: -1 if key.recompute is None else MODES[key.recompute])
    return whole_s[of, mode.astype(np.intp)] * layouts.each(_ShapeKey, _times_whole) * (1 - 1e-12)


def times_filled(layouts: Columns[Layout]) -> Array:
    """No bound: how often ``rough_bound_s`` with the time that ranks of several stages wait for a first micro-batch."""
    return layouts.each(_ShapeKey, _times_filled)


def _times_whole(key: _ShapeKey) -> float:
    """The least that a pipeline takes, as a multiple of one micro-batch through the whole model."""
    if key.schedule.rules.has_one_stage and key.pp > 1 and not key.groups:
        return pipeline_coefficient(key.schedule, key.pp, key.num_microbatches)
    return key.num_microbatches / key.pp


def _times_filled(key: _ShapeKey) -> float:
    rules = key.schedule.rules
    if rules.has_one_stage or rules.splits_backward:
        return 1.0
    return 1 + (key.pp - 1) / (key.virtual_stages * key.num_microbatches)


def at_a_glance_s(table: CostTable, layouts: Columns[Layout], passes: Sequence[UnitPasses]) -> Array:
    """What each layout takes at least on the fastest devices if nothing is sent and no block recomputes by need.

    The whole model goes through the pipeline, and some rank holds its share of each kind of units, rounded up.
    ``passes``: on each kind of devices.
    """
    # Rows that a kind of device does not run are not priced for it.
    work_s, like = np.fmin.reduce([each.unlike_work_s for each in passes]), passes[0].like
    whole_s = (work_s @ table.counts)[like] * layouts.each(_ShapeKey, _times_whole)
    sizes, of = layouts.by(_RanksKey)
    held = np.array([np.ceil(table.counts / key.pp) for key in sizes])
    longest_s = np.empty(len(like))
    for start in range(0, len(like), CHUNK):
        part = slice(start, start + CHUNK)
        longest_s[part] = largest_of_each(work_s.take(like[part], axis=0) * held.take(of[part], axis=0))
    longest_s *= layouts.numbers("num_microbatches")
    return np.maximum(whole_s, longest_s) * (1 - 1e-12)


@lru_cache(maxsize=4096)
def num_beside(schedule: ScheduleName, num_ranks: int, virtual_stages: int, transfer: Transfer) -> Array:
    """Messages of one micro-batch beside which each rank works, [ranks]: over every border one each way."""
    found, each = np.zeros(num_ranks), transfer.sends_beside + transfer.receives_beside
    ranks = [schedule.rules.rank_of(stage, num_ranks) for stage in range(num_ranks * virtual_stages)]
    for first, second in pairwise(ranks):
        if first != second:
            found[[first, second]] += each
    return found


@lru_cache(maxsize=4096)
def pipeline_coefficient(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> float:
    """The largest number known so that no cut of one stage a rank takes less than it times W.

    Line (1) gives T >= m W / p, since some w_r >= W / p. Its largest is least where all are equal: then W =
    T (1 - (1 - 1/m)^p). Line (2) with w_r >= W / p gives T >= W (m + p - 1) / p. In a mean of line (3) with weights l_r
    that sum to 1, w_i has the coefficient 1 + sum_(r<i) l_r + l_i (m - p + i): where these are equal it is a bound.
    Example: line (1) gives 2 and 1 / (1 - (3/4)^2) = 2.29, line (2) 5 / 2 = 2.5, line (3) with weights 3/4 and 1/4 also
    2.5: T >= 15 s.
    """
    p, m = num_ranks, num_microbatches
    best = max(m / p, 1 / (1 - (1 - 1 / m) ** p))
    if schedule.rules.forwards_first:
        return max(best, (m + p - 1) / p)
    if m > p:
        # Weights for which sum_(i<r) l_i + l_r (m - p + r) is 1 for all ranks; divided by their sum they sum to 1.
        weights: list[float] = []
        for r in range(p):
            weights.append((1 - sum(weights)) / (m - p + r))
        if min(weights) >= 0:
            best = max(best, 1 + 1 / sum(weights))
    return best
