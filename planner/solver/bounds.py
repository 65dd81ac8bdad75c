"""Lower bounds of many layouts at once: however a layout is cut into stages, it takes and needs no less.

The search passes over layouts whose bound is above the best price, so a bound must hold for every cut. Symbols: p
pipeline ranks, m micro-batches, w_r the seconds that rank r works on one micro-batch (both passes and messages beside
them), W their sum, c the seconds of one send, T the time of the pipeline. The examples have six units of 1 s each (W =
6), two ranks, four micro-batches and free sends. Their best cut is the even one, w = (3, 3), and takes 15 s.

**One stage a rank.** For every rank r of every cut (``problems.pipeline_bound_s``):

    (1) any        T >= sum_(i<r) w_i + m w_r
    (2) GPipe      T >= W + (m - 1) w_r + 2 c (p-1)
    (3) 1F1B, m>p  T >= W + (m - p + r) w_r + sum_(i>r) w_i + 2 c (p-1)

(1): rank r works m times. Before it starts the first micro-batch goes forward through the ranks before it, and after it
ends the last gradient goes back through them. (2): besides, a GPipe rank stands still between its last forward and its
first backward pass, until a micro-batch has gone through all ranks behind it and back. (3): a 1F1B rank waits for the
ranks behind it twice, before its first backward and before its last, and fills p - 1 - r micro-batches of its own into
these waits. Example, rank 1 of the cut (2, 4): (1) says 2 + 4 * 4 = 18 s.

The cut is not known yet, so the lines are turned into multiples of W that hold for all cuts
(``glance.pipeline_coefficient``). Some w_r is at least W / p, and at least the work of the units of one kind, rounded
up, that some rank must hold.

The other bounds stand with their methods: rounds of micro-batches in flight (``_rounds_s``), unlike devices, where w_r
is counted on rank r's own (``_weighted_s``), several stages a rank (``_any_cut_s``), memory, of which the fullest rank
needs no less than a weighted mean (``_weighted_bytes``), and what must be recomputed where each block chooses
(``_recomputed_s``).

Beside the bounds stands an estimate: where ranks hold several stages it is what the even cut takes at least. It says
which layouts are worth a look first, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.overlap import message_beside_s
from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Element
from planner.evaluation.cuts import even_starts, stage_sizes
from planner.evaluation.states import held_elements
from planner.evaluation.unit_times import LayoutRows, unit_times
from planner.layout.columns import Array, Columns, Positions
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout
from planner.layout.short_rows import largest_of_each, least_of_each, running_sums
from planner.solver.glance import at_a_glance_s, num_beside, pipeline_coefficient
from planner.solver.memory_bounds import AlikeKey, AlikeMemory, NumMicroBatches
from planner.solver.of_table import CHUNK, OfTable, by_kind
from planner.table.cost_table import CostTable
from planner.table.facts import UnitRow
from planner.table.keys import StateKey

_TRAINABLE, _FROZEN, _TIED, _EXPERT = range(len(Element))
_OPTIMIZER = 2  # on the last axis of the table's ``state_bytes``
_SHARDS_OPTIMIZER = np.array([stage.shards_optimizer for stage in ZERO_STAGES])


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of each layout, in the order of the layouts given."""

    step_time_s: Array
    memory_bytes: Array
    host_share: Array  # of a node's own memory; 0 where nothing is offloaded
    estimate_s: Array  # no bound: about what the layout takes, and no less than its bound


def bounds(
    table: CostTable, layouts: Sequence[Layout], enough_s: float = np.inf, deadline: Deadline | None = None
) -> Bounds:
    """Bounds of every layout; OutOfTimeError where the deadline is over before that.

    Where some time is enough, not all of the time is counted of a layout that takes it or more, and its memory is
    infinite; nor is all of the time of one that needs more memory than there is.
    """
    found = Bounds(*(np.full(len(layouts), value) for value in (0.0, np.inf, 0.0, 0.0)))
    listed = Columns.of(Layout, layouts)
    if not layouts:
        return found
    rows = LayoutRows.of(table, listed)
    of_table = OfTable(table)
    passes = [of_table.passes(rows, place) for place in range(len(table.cluster.devices))]
    found.step_time_s[:] = found.estimate_s[:] = at_a_glance_s(table, listed, passes)
    left = np.flatnonzero(found.step_time_s < enough_s)
    keys, alike = listed.take(left).by(AlikeKey)
    by_key = np.split(left[np.argsort(alike, kind="stable")], np.cumsum(np.bincount(alike))[:-1])
    for key, members in zip(keys, by_key, strict=False):  # without members no key
        for start in range(0, len(members), CHUNK):
            if deadline is not None:
                deadline.check()
            part = members[start : start + CHUNK]
            group = AlikeLayouts(of_table, key, listed.take(part), rows.take(part), passes[0].take(part))
            _fill(found, part, group, enough_s)
    return found


def _fill(found: Bounds, part: Positions, group: AlikeLayouts, enough_s: float) -> None:
    """Closer from step to step, each for the layouts for which it may still matter."""
    if enough_s < np.inf:
        found.step_time_s[part] = found.estimate_s[part] = group.without_recomputing_s()
        part, group = _where(found.step_time_s[part] < enough_s, part, group)
    found.memory_bytes[part] = group.memory_bytes()
    found.host_share[part] = group.host_share()
    if enough_s < np.inf:
        part, group = _where(found.memory_bytes[part] <= group.table.cluster.devices[0].memory_bytes, part, group)
    found.step_time_s[part] = group.step_time_s()
    found.estimate_s[part] = np.maximum(found.step_time_s[part], group.estimate_s())


def _where(stays: NDArray[np.bool], part: Positions, group: AlikeLayouts) -> tuple[Positions, AlikeLayouts]:
    """Layouts, and their group, without those that need not stay; of which none does, one."""
    stays[0] |= not stays.any()
    return (part, group) if stays.all() else (part[stays], group.take(np.flatnonzero(stays)))


class AlikeLayouts(AlikeMemory):
    """Lower bounds of the time of layouts that are alike in what ``AlikeKey`` says, and of their memory."""

    def take(self, places: Positions) -> AlikeLayouts:
        """Some of the layouts."""
        return AlikeLayouts(*self._parts_of(places), is_at_peak=self._is_at_peak)

    @cached_property
    def _updated(self) -> Array:
        """Elements that one pipeline updates: those of one optimiser a pipeline rank, summed over the ranks."""
        whole = self._whole_elements
        divided = whole[:, _TRAINABLE] / self.rows.num_shards
        kept = held_elements(whole[:, _TRAINABLE], whole[:, _EXPERT], self.rows.expert_parts)
        return np.where(_SHARDS_OPTIMIZER[self.rows.zero_stage], divided, kept)

    @property
    def _whole_elements(self) -> Array:
        return self._of_table.whole_elements.take(self.rows.split, axis=0)

    def update_s(self) -> Array:
        """The optimiser step of a whole pipeline on its fastest device: some rank takes at least a p-th of it."""
        cluster, offload = self.table.cluster, self._key.offload
        if offload is not Offload.NONE:
            lines = [cluster.host(offload).update]
        else:
            lines = [cluster.devices[place].update for place in sorted(set(self._places))]
        times = [np.where(self._updated > 0, line.latency_s + self._updated * line.s_per_item, 0.0) for line in lines]
        return np.minimum.reduce(times)

    def host_share(self) -> Array:
        """What an average node keeps off its devices, as a share of what a node has. The fullest needs no less."""
        table, offload = self.table, self._key.offload
        if offload is Offload.NONE:
            return np.zeros(len(self.rows.work))
        cluster, host = table.cluster, table.cluster.host(offload)
        keys, which = self.layouts.by(StateKey)
        on_device = table.state_rows([key._replace(offload=Offload.NONE) for key in keys])[which]
        whole = self._whole_elements
        optimizer = np.einsum("le,le->l", by_kind(whole), table.state_bytes[on_device][..., _OPTIMIZER])
        devices_a_node = cluster.num_devices / -(-cluster.num_devices // cluster.devices_per_node)
        factor = devices_a_node / self.pp
        buffers = self._updated * (host.gradient_bytes + host.parameter_bytes)
        if offload is Offload.NVME:
            return np.maximum(factor * buffers / host.ram_bytes, factor * optimizer / host.nvme_bytes)
        return factor * (optimizer + buffers) / host.ram_bytes

    # -- time ---------------------------------------------------------------------------------

    def step_time_s(self) -> Array:
        """The pipeline's bound, and the optimiser step of the average rank: the slowest rank's takes no less."""
        return self._pipeline_s(self._recomputed_s) + self.once_s

    def without_recomputing_s(self) -> Array:
        """The same if no block recomputes what it need not."""
        return self._pipeline_s(np.zeros_like(self.num_microbatches)) + self.once_s

    @cached_property
    def once_s(self) -> Array:
        """The optimiser step of the average rank and its exposed data-parallel communication that comes once a step.

        What compute hides is a concave function of both that grows as they do, so all ranks hide no more than one that
        had all units would; the slowest rank takes no less than the average.
        """
        data_s = np.zeros_like(self.num_microbatches) if self._key.groups else self.times.data_once_s
        return (self.update_s() + data_s) / self.pp

    def _pipeline_s(self, recomputed_s: Array) -> Array:
        if self._key.groups:
            return self._unlike_s()
        total = self.work_s @ self.counts + recomputed_s + self.beside_s * self.num_beside.sum()
        if self.pp == 1:
            return self.num_microbatches * total
        if not self.schedule.rules.has_one_stage:
            return self._any_cut_s(total)
        p, m, send, receive = self.pp, self.num_microbatches, self.send_s, self.beside_s * self.num_beside.min()
        if self.is_on_demand:
            # A rank stands and waits for what it receives, as if its passes took longer and sends nothing.
            total, send, receive = total + 2 * send * (p - 1), np.zeros_like(send), receive + send
        coefficient = self.layouts.each(
            NumMicroBatches, lambda key: pipeline_coefficient(self.schedule, p, key.num_microbatches)
        )
        best = coefficient * total + 2 * send * (p - 1)
        blocks = np.ceil(self.counts / p)
        most = largest_of_each(self.work_s * blocks) + receive
        if self.schedule.rules.forwards_first:
            return np.maximum(best, total + (m - 1) * most + 2 * send * (p - 1))
        shortest = least_of_each(self.work_s) + receive
        whole = np.where(m > p, total + (m - p) * most + (p - 1) * shortest + 2 * send * (p - 1), m * most)
        best = np.maximum(best, whole)
        for rank in sorted({p // 4, p // 2, 3 * p // 4} - {0}):
            best = np.maximum(best, self._rounds_s(total, send, rank))
        return best

    @property
    def is_on_demand(self) -> bool:
        """Whether results go from rank to rank on demand."""
        return self.table.framework.transfer(self.schedule) is Transfer.ON_DEMAND

    @cached_property
    def beside_s(self) -> Array:
        """What a message adds to a pass of a rank beside which it goes on, [layouts]; see ``Evaluator.beside_s``."""
        pass_s = self.times.forward_s @ self.counts / (self.pp * self.virtual_stages)
        slowdown = self.table.cluster.devices[0].message_slowdown
        return message_beside_s(self.send_s, pass_s, slowdown) * (1 - 1e-12)

    @cached_property
    def num_beside(self) -> Array:
        """So many messages go on beside the passes of each rank on one micro-batch; over unlike devices none count."""
        transfer = self.table.framework.transfer(self.schedule)
        found = num_beside(self.schedule, self.pp, self.virtual_stages, transfer)
        return found * (not self._key.groups)

    def _unlike_s(self) -> Array:
        """Lines (1), (2) and (3) where the devices of the ranks differ."""
        p, m = self.pp, self.num_microbatches
        if not self.schedule.rules.has_one_stage:
            return self._busiest_s
        if self.schedule.rules.forwards_first:
            return self._weighted_s(0.0, [m - 1] * p)
        least = self._weighted_s(-1.0, [m - 1] * p)
        steady = self._weighted_s(1.0, [np.maximum(m - p + rank, 1) for rank in range(p)])
        return np.where(m > p, np.maximum(least, steady), least)

    @cached_property
    def _work_of_ranks(self) -> list[Array]:
        """``_work`` on each pipeline rank's own devices."""
        found: dict[int, Array] = {}
        for place in set(self._places):
            times = unit_times(self.table, self.rows, place)
            found[place] = times.forward_s + times.backward_s
        return [found[place] for place in self._places]

    @property
    def _busiest_s(self) -> Array:
        """What the busiest rank works over unlike devices, of which each may hold several stages, or halves apart.

        For weights l_r that sum to 1, T >= sum_r l_r m w_r, and wherever a unit lies, it adds at least the least of
        m l_r times its seconds on rank r: near its best where l_r times the whole model's seconds is alike for all.
        Example: the units take 1 s on rank 0 and 2 s on rank 1. The weights are 2/3 and 1/3, so each adds 4 * 2/3 s:
        T >= 16 s, as long as four units on rank 0 work, and two on rank 1.
        """
        work = np.array(self._work_of_ranks)  # [ranks, layouts, kinds]
        weights = 1 / (work @ self.counts)
        weights /= weights.sum(axis=0)
        return self.num_microbatches * ((weights[..., None] * work).min(axis=0) @ self.counts)

    def _weighted_s(self, e: float, d: list[Array]) -> Array:
        """A weighted mean of line (1), (2) or (3), from below over all cuts, and what sends take.

        For weights l_r that sum to 1, T >= sum_r l_r line_r = sum_i A_i w_i, with A_i = 1 + e S_i + d_i l_i and S_i =
        sum_(r<i) l_r. Line (1) has e = -1 and d_i = m - 1, line (2) e = 0 and d_i = m - 1, line (3) e = 1 and d_i =
        m - p + i. Wherever a unit lies, it adds at least the least of A_i times its seconds on rank i. Any weights give
        a bound; it is near its best where A_i times the whole model's seconds on rank i is the same for all ranks.
        Example, GPipe: the units take 1 s on rank 0 and 2 s on rank 1. The weights are 7/9 and 2/9, A = (10/3, 5/3), so
        each unit adds 10/3 s: T >= 20 s, which the cut into four and two units meets (8 + 3 * 4).
        """
        work = self._work_of_ranks
        whole = [each @ self.counts for each in work]
        # Let A_i * whole_i = t for all i. Then l_i, and so S_i, is linear in t, and that the weights sum to 1 gives t.
        slope, offset = np.zeros_like(self.num_microbatches), np.zeros_like(self.num_microbatches)
        parts: list[tuple[Array, Array]] = []
        for all_units, own in zip(whole, d, strict=True):
            rate = np.maximum(own, 1e-6)  # any weights give a bound
            parts.append(((1 / all_units - e * slope) / rate, (-1 - e * offset) / rate))
            slope, offset = slope + parts[-1][0], offset + parts[-1][1]
        t = (1 - offset) / slope
        weights = np.maximum(1e-12, np.array([a * t + b for a, b in parts]))  # [ranks, layouts]
        weights /= weights.sum(axis=0)
        before = np.cumsum(weights, axis=0) - weights
        factors = 1 + e * before + np.array(d) * weights
        least = np.min([factor[:, None] * each for factor, each in zip(factors, work, strict=True)], axis=0)
        return least @ self.counts + 2 * self._way_s

    def _any_cut_s(self, total: Array) -> Array:
        """The bound where ranks hold several stages, or halves of backward passes apart.

        Some rank works at least the mean, and at least as many units of one kind as some rank must hold; on the mean
        ranks work so long and stand still for ``before_s``; and one micro-batch goes through all stages and back, but
        for gradients of weights.
        Example: four stages of one or two units (six of 1 s), two on each of two ranks. Rank 1 waits for one unit:
        T >= 4 * 3 + (0 + 1) / 2 s.
        """
        p, m = self.pp, self.num_microbatches
        most = largest_of_each(self.work_s * np.ceil(self.counts / p))
        busiest = m * np.maximum(total / p, most)
        if self.schedule.rules.overlaps_steps:
            return busiest
        sent = self.work_s - self.times.weight_s if self.schedule.rules.splits_backward else self.work_s
        busiest = np.maximum(busiest, m * total / p + self.before_s.mean(axis=1))
        return np.maximum(busiest, sent @ self.counts + 2 * self.send_s * (p - 1))

    @cached_property
    def before_s(self) -> Array:
        """What the ranks before each take at least until the first micro-batch comes, and the last gradient is gone.

        [layouts, ranks]. Each of their first stages holds the least blocks that it may; of a rank's only one, a unit.
        Where passes are split, weight gradients may come last, so the way back does not count.
        """
        splits, p, v, units = self.schedule.rules.splits_backward, self.pp, self.virtual_stages, self.table.units
        work = self.times.forward_s if splits else self.work_s
        blocks = sorted({kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block})
        fewest = stage_sizes(sum(units.is_block), p * v).least
        each = fewest * least_of_each(work[:, blocks]) if v > 1 else least_of_each(work)
        stages = np.repeat(each[:, None], p, axis=1)
        stages[:, 0] = work[:, units.kinds[0]]
        before = running_sums(stages) - stages
        return before + (1 if splits else 2) * np.arange(p) * self.send_s[:, None]

    def estimate_s(self) -> Array:
        """What the even cut takes at least, where ranks hold several stages; 0 elsewhere.

        With w_r the work of all stages of rank r and f_i, w_i that of the first stage of an earlier rank i:

            T >= sum_(i<r) w_i + 2 c r + m w_r

        as in line (1). Where a schedule splits backward passes, only gradients of inputs must pass the ranks before r.
        With u = w less the weight gradients,

            T >= sum_(i<r) f_i + c r + m w_r       and       T >= sum_(i<r) u_i + 2 c r + m u_r
        Example: four stages of one unit (1 s), two on each rank: rank 1 says T >= 1 + 4 * 2 = 9 s.
        """
        rules = self.schedule.rules
        if self._key.groups:
            return self._unlike_estimate_s
        if self._key.offloads_activations and rules.has_one_stage and self.pp > 1:
            # Rank for rank as the mean: with the buffers that the bound, in which some ranks need none, leaves out.
            rounds = (self.num_microbatches + self.pp - 1) / self.pp
            return self.step_time_s() + rounds * np.maximum(0.0, self.likely_s - self._recomputed_s)
        if self.pp == 1 or rules.has_one_stage or self.pp * self.virtual_stages > sum(self.table.units.is_block):
            return np.zeros(len(self.num_microbatches))
        ranks, below = _even_counts(self.table.units, self.schedule, self.pp, self.virtual_stages)
        hops = self.send_s[:, None] * np.arange(self.pp)
        m = self.num_microbatches[:, None]
        work = self.work_s * (1 + self._recomputed_s / (self.work_s @ self.counts))[:, None]
        if not rules.splits_backward:
            even = (work @ below.T + m * (work @ ranks.T) + 2 * hops).max(axis=1)
        elif rules.overlaps_steps:
            even = (m * (work @ ranks.T)).max(axis=1)
        else:
            sent = work - self.times.weight_s
            whole = self.times.forward_s @ below.T + hops + m * (work @ ranks.T)
            even = np.maximum(whole, sent @ below.T + 2 * hops + m * (sent @ ranks.T)).max(axis=1)
        return even + self.once_s

    @property
    def _unlike_estimate_s(self) -> Array:
        """Over unlike devices: as bounded, with what must be recomputed, and the time in which the pipeline fills."""
        rules, m, v = self.schedule.rules, self.num_microbatches, self.virtual_stages
        slower = 1 + self.made_up_s / (self.work_s @ self.counts)
        if rules.has_one_stage or rules.overlaps_steps:
            return self._unlike_s() * slower + self.once_s
        waits = (1 / 3 if rules.splits_backward else 1) * (self.pp - 1)  # about a third of a pass is forward
        return self._busiest_s * slower * (1 + waits / (v * m)) + self.once_s

    def _rounds_s(self, total: Array, send: Array, rank: int) -> Array:
        """The bound by the rounds of micro-batches that 1F1B holds at rank r.

        With x = sum_(i<r) w_i and q = floor((m - 1) / (p - r)) + 1 rounds, one micro-batch of each round goes through
        all ranks from r on before the next round can: T >= x + 2 c r + q (W - x + 2 c (p-1-r)). The ranks before r work
        m times x / r on average: T >= m x / r. The first line falls with x and the second rises, so the larger of
        them is least where they meet.
        Example, r = 1: q = 4, T >= x + 4 (6 - x) and T >= 4 x meet at x = 24 / 7: T >= 13.7 s.
        """
        p, m = self.pp, self.num_microbatches
        rounds = np.floor((m - 1) / (p - rank)) + 1
        way = 2 * send * (p - 1 - rank)
        below = (rounds * (total + way) + 2 * send * rank) / (m / rank + rounds - 1)
        return np.where(below <= total, m * below / rank, total + 2 * send * rank + rounds * way)


@lru_cache(maxsize=1024)
def _even_counts(units: UnitRow, schedule: ScheduleName, num_ranks: int, virtual_stages: int) -> tuple[Array, Array]:
    """Units of each kind on each rank, and in the first stages of the ranks before it; [ranks, kinds] each."""
    stages = _stage_counts(units, num_ranks * virtual_stages)
    ranks = _by_rank(stages, schedule, num_ranks)
    below = np.vstack([np.zeros((1, stages.shape[1])), np.cumsum(stages[: num_ranks - 1], axis=0)])
    return ranks, below


def _by_rank(stages: Array, schedule: ScheduleName, num_ranks: int) -> Array:
    """Sums of the rows of ``stages`` over the stages of each rank."""
    ranks = np.zeros((num_ranks, stages.shape[1]))
    np.add.at(ranks, [schedule.rules.rank_of(stage, num_ranks) for stage in range(len(stages))], stages)
    return ranks


def _stage_counts(units: UnitRow, num_stages: int) -> Array:
    starts = even_starts(units.is_block, num_stages)
    ends = (*starts[1:], len(units.kinds))
    width = max(units.kinds) + 1
    return np.array(
        [np.bincount(units.kinds[a:b], minlength=width) for a, b in zip(starts, ends, strict=True)], dtype=np.float64
    )
